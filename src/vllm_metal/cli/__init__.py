"""The `metal` command: one file a command group, heavy imports only inside command functions."""

from vllm_metal.cli.main import main

__all__ = ["main"]
