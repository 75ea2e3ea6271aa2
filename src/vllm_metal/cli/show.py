"""`metal show`: what a model is, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_metal.cli import printer
from vllm_metal.errors import ModelNotFound

if TYPE_CHECKING:
    from vllm_metal.engine.mlx.model_description import ModelDescription
    from vllm_metal.parsing.detection import Choice


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
    """Show what a model is, how its answers are read and why, and its chat template.

    Nothing is downloaded, and no weights are loaded.
    """
    from vllm_metal import config as configuration
    from vllm_metal.hub import names, store

    models = configuration.load(path=config, flags={"models.default": model}).models
    source = names.configured_source(models)
    local = store.find(source, models_dir=models.store)
    if local is None:
        raise ModelNotFound(f"`{source}` is not on this machine", hint=f"run `metal pull {source}`")

    from vllm_metal.engine.mlx.model_description import describe

    described = describe(local.path, models)
    if as_json:
        printer.out(json.dumps(_told(local.path, described), indent=2, ensure_ascii=False))
        return
    for name, words in _rows(local.path, described):
        printer.out(f"{name:<14}{words}")
    if described.chat_template:
        printer.out(f"\n{described.chat_template}")


def _told(path: Path, described: ModelDescription) -> dict[str, Any]:
    return {
        "path": str(path),
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


def _rows(path: Path, described: ModelDescription) -> Iterator[tuple[str, str]]:
    yield "model", str(path)
    yield "architecture", str(described.config.get("model_type"))
    yield "format", described.number_format or "unknown"
    yield "context", f"{described.context_length} tokens"
    yield "vocabulary", f"{described.vocab_size} tokens"
    yield "end tokens", ", ".join(described.end_tokens)
    for name, choice in (("tool calls", described.formats.tools), ("reasoning", described.formats.reasoning)):
        yield name, f"{choice.name}: {choice.reason}"
    yield "template", "as follows:" if described.chat_template else "none"
