"""Coding agents, and how each is pointed at this server. Standard library only."""
