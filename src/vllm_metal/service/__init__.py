"""The daemon under launchd. Standard library only."""
