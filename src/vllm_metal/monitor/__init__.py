"""What this machine and its GPU are doing, read from the system's own tools, and what that means."""
