"""The `metal` command: one file a command group, heavy imports only inside command functions."""
