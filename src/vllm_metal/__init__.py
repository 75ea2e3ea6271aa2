"""vllm-metal: an OpenAI-compatible inference daemon for Apple Silicon, on MLX."""

__version__ = "0.1.0"
