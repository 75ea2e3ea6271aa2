"""Everything that touches MLX. Its arrays live on the engine thread."""

from vllm_metal.engine.mlx.open_files import kept_open_files_limit

with kept_open_files_limit():
    import mlx_lm  # noqa: F401
