"""`metal show`: what a model is, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vllm_metal.cli import printer
from vllm_metal.errors import MetalError, ModelNotFound
from vllm_metal.hub.model_kind import ModelKind, model_kind

if TYPE_CHECKING:
    from vllm_metal.config import Config
    from vllm_metal.engine.mlx.model_description import ModelDescription
    from vllm_metal.parsing.detection import Choice

_USUAL_CONTEXTS = (4096, 16384, 65536)


class Memory(NamedTuple):
    """What the model will take: its weights, and in all with the KV of so many tokens.

    `budget_bytes` is what models may take here, None where the device does not tell.
    """

    weight_bytes: int
    bytes_at: dict[int, int]
    budget_bytes: int | None


def show(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A model on this machine; else the configured one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the model's whole config.")
    ] = False,
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="Read this configuration file.")] = None,
) -> None:
    """Show what a model is and takes, how its answers are read and why, and its chat template.

    Nothing is downloaded, and no weights are loaded.
    """
    from vllm_metal import config as configuration
    from vllm_metal.hub import names, store

    loaded = configuration.load(path=config, flags={"models.default": model})
    settings = names.config_for(loaded.models.default, loaded)
    source = names.configured_source(settings.models)
    local = store.find(source, models_dir=settings.models.store)
    if local is None:
        raise ModelNotFound(f"`{source}` is not on this machine", hint=f"run `metal pull {source}`")

    from vllm_metal.engine.mlx.model_description import describe

    described = describe(local.path, settings.models)
    try:
        memory: Memory | str = _memory(local.path, settings)
    except MetalError as exc:
        memory = exc.message
    if as_json:
        told = _told(local.path, described) | {
            "memory": {"problem": memory} if isinstance(memory, str) else memory._asdict()
        }
        printer.out(json.dumps(told, indent=2, ensure_ascii=False))
        return
    for name, words in _rows(local.path, described, memory):
        printer.out(f"{name:<14}{words}")
    if described.chat_template and described.kind is ModelKind.GENERATE:
        printer.out(f"\n{described.chat_template}")


def _memory(path: Path, config: Config) -> Memory:
    """Raises as loading would for weights that cannot be loaded."""
    from vllm_metal.engine.mlx import footprint

    found = footprint.measure(path)
    length = min(config.engine.max_model_len or found.context_length, found.context_length)
    token_bytes = found.kv_bytes_per_token if model_kind(path) is ModelKind.GENERATE else None
    contexts = [each for each in _USUAL_CONTEXTS if each < length] + [length] if token_bytes else []
    share, whole = config.engine.gpu_memory_utilization, found.working_set_bytes
    return Memory(
        found.weight_bytes,
        {each: found.weight_bytes + each * (token_bytes or 0) for each in contexts},
        int(share * whole) if whole else None,
    )


def _told(path: Path, described: ModelDescription) -> dict[str, Any]:
    return {
        "path": str(path),
        "kind": described.kind,
        "number_format": described.number_format,
        "context_length": described.context_length,
        "vocab_size": described.vocab_size,
        "end_tokens": described.end_tokens,
        "tool_call_parser": _choice(described.formats.tools),
        "reasoning_parser": _choice(described.formats.reasoning),
        "config": described.config,
        "chat_template": described.chat_template,
    }


def _choice(choice: Choice[Any]) -> dict[str, str]:
    return {"name": choice.name, "reason": choice.reason}


def _rows(path: Path, described: ModelDescription, memory: Memory | str) -> Iterator[tuple[str, str]]:
    yield "model", str(path)
    yield "kind", described.kind
    yield "architecture", str(described.config.get("model_type"))
    yield "format", described.number_format or "unknown"
    yield "context", f"{described.context_length} tokens"
    yield "memory", memory if isinstance(memory, str) else _words(memory, described.kind)
    yield "vocabulary", f"{described.vocab_size} tokens"
    yield "end tokens", ", ".join(described.end_tokens)
    if described.kind is not ModelKind.GENERATE:
        return
    for name, choice in (("tool calls", described.formats.tools), ("reasoning", described.formats.reasoning)):
        yield name, f"{choice.name}: {choice.reason}"
    yield "template", "as follows:" if described.chat_template else "none"


def _words(memory: Memory, kind: ModelKind) -> str:
    from vllm_metal.hub.disk import format_bytes

    at_contexts = ", ".join(
        f"{format_bytes(size)} at {length} tokens" for length, size in memory.bytes_at.items()
    )
    with_kv = f"; with KV {at_contexts or 'unknown'}" if kind is ModelKind.GENERATE else ""
    of_budget = f"; models may take {format_bytes(memory.budget_bytes)} here" if memory.budget_bytes else ""
    return f"weights {format_bytes(memory.weight_bytes)}{with_kv}{of_budget}"
