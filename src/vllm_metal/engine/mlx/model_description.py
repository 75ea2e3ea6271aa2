"""What a model on disk says of itself, and how its answers would be read. No weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_metal.engine.mlx import gguf, gguf_config, loader
from vllm_metal.hub import store
from vllm_metal.hub.model_config import context_length, quantization_name
from vllm_metal.hub.model_kind import ModelKind, model_kind
from vllm_metal.hub.served_length import served_length
from vllm_metal.parsing.output_formats import OutputFormats
from vllm_metal.settings import ModelsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """`config` is that of the model's own files, as mlx-lm knows it."""

    config: dict[str, Any]
    kind: ModelKind
    number_format: str | None
    context_length: int
    vocab_size: int
    end_tokens: list[str]
    chat_template: str
    formats: OutputFormats


def describe(path: Path, models: ModelsConfig) -> ModelDescription:
    """`models` may name another tokenizer, template or format. Raises as loading does."""
    return loader.fenced(path, _describe, path, models)


def _describe(path: Path, models: ModelsConfig) -> ModelDescription:
    source: Path | gguf.GGUFFile
    if path.is_dir():
        source, config = path, store.read_json(path / "config.json")
        number_format, length = quantization_name(config), served_length(path, config)
    else:
        source = gguf.GGUFFile(path)
        config = gguf_config.read_config(source)
        number_format, length = source.quantization, context_length(config)
    tokenizer = loader.load_tokenizer(
        source,
        tokenizer_path=Path(models.tokenizer) if models.tokenizer else None,
        chat_template=models.chat_template,
    )
    text_config = config | (config.get("text_config") or {})
    return ModelDescription(
        config=config,
        kind=model_kind(path),
        number_format=number_format or text_config.get("dtype") or text_config.get("torch_dtype"),
        context_length=length,
        vocab_size=tokenizer.vocab_size,
        end_tokens=sorted(tokenizer.token_bytes.spelling(id).decode() for id in tokenizer.eos_token_ids),
        chat_template=tokenizer.chat_template,
        formats=tokenizer.output_formats(tools=models.tool_call_parser, reasoning=models.reasoning_parser),
    )
