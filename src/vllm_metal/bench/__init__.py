"""Load on any OpenAI-compatible server, and the figures of what came back."""
