"""What a model on disk is and will take, from its headers. A program of its own, as MLX may fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from vllm_metal.engine.mlx import device, gguf, gguf_config, loader, safetensors
from vllm_metal.errors import MetalError
from vllm_metal.hub import store
from vllm_metal.hub.model_config import context_length, number_format, quantization_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """`kind` is "MLX", "plain safetensors" or "GGUF"; `quantized_by` the method of another program's weights.

    `kv_bytes_per_token` is at most that, None for a model that says too little; `working_set_bytes` what the
    GPU may use, None without one.
    """

    kind: str
    number_format: str | None
    quantized_by: str | None
    weight_bytes: int
    context_length: int
    kv_bytes_per_token: int | None
    working_set_bytes: int | None


def measure(path: Path) -> Footprint:
    """Raises ModelNotFound, NotAModel or UnsupportedModel, as loading would."""
    return loader.fenced(path, _measure, path)


def _measure(path: Path) -> Footprint:
    store.inspect(path)
    if path.is_dir():
        config = store.read_json(path / "config.json")
        loader.check_architecture(config)
        safetensors.check_files(path)
        return _of_config(config, sum(file.stat().st_size for file in path.glob(store.WEIGHTS)))
    file = gguf.GGUFFile(path)
    config = gguf_config.read_config(file)
    return _footprint("GGUF", config, weight_bytes=file.held_bytes, quantization=file.quantization)


def expect(config: dict[str, Any] | None, architecture: str | None, weight_bytes: int) -> Footprint:
    """Of a model that is not here: its `config.json`, or what is known of a GGUF file without one.

    Raises UnsupportedModel.
    """
    if config is not None:
        loader.check_architecture(config)
        return _of_config(config, weight_bytes)
    if architecture is not None:
        gguf_config.check_architecture(architecture)
    return _footprint("GGUF", {}, weight_bytes=weight_bytes)


def _of_config(config: dict[str, Any], weight_bytes: int) -> Footprint:
    if quantization_name(config):
        return _footprint("MLX", config, weight_bytes=weight_bytes)
    return _footprint(
        "plain safetensors",
        config,
        weight_bytes=weight_bytes,
        quantized_by=(config.get("quantization_config") or {}).get("quant_method"),
    )


def _footprint(
    kind: str,
    config: dict[str, Any],
    *,
    weight_bytes: int,
    quantization: str | None = None,
    quantized_by: str | None = None,
) -> Footprint:
    text_config = config | (config.get("text_config") or {})
    return Footprint(
        kind=kind,
        number_format=quantization or number_format(config),
        quantized_by=quantized_by,
        weight_bytes=weight_bytes,
        context_length=context_length(config),
        kv_bytes_per_token=_kv_bytes_per_token(text_config),
        working_set_bytes=device.memory_bytes() if mx.is_available(mx.gpu) else None,
    )


def _kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Windows and layers without attention are not taken into account."""
    item_bytes = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    try:
        num_layers = int(config["num_hidden_layers"])
        if latent := config.get("kv_lora_rank"):
            return num_layers * (int(latent) + int(config["qk_rope_head_dim"])) * item_bytes
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return 2 * num_layers * num_kv_heads * head_dim * item_bytes


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """A model's path, or `--expect` and a file with the arguments of `expect`."""
    try:
        if arguments[0] == "--expect":
            return asdict(expect(**json.loads(Path(arguments[1]).read_bytes())))
        return asdict(measure(Path(arguments[0])))
    except MetalError as exc:
        return {"error": exc.message, "hint": exc.hint}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])))
