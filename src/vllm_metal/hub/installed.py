"""Every model on this machine, whoever brought it, by its files' headers and without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_metal.errors import MetalError, ModelNotFound
from vllm_metal.hub import gguf_header, other_tools, own_folder, shared_cache, store, usage
from vllm_metal.hub.aliases import ALIASES
from vllm_metal.hub.model_config import number_format
from vllm_metal.hub.model_kind import ModelKind, model_kind
from vllm_metal.hub.names import HubSource, PathSource, parse_source
from vllm_metal.hub.served_length import served_length
from vllm_metal.hub.store import WEIGHTS
from vllm_metal.hub.variants import Variant, variants_in
from vllm_metal.settings import ModelsConfig

Origin = Literal["hub", "models.dir", "LM Studio", "Ollama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledModel:
    """`name` is what to ask for it by, `path` a folder or a GGUF file, `files` all that it consists of.

    `last_used` is in seconds since the epoch. What headers do not tell is None.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    origin: Origin
    kind: ModelKind
    size_bytes: int
    number_format: str | None
    context_length: int | None
    last_used: float | None


def installed_models(models_dir: Path) -> list[InstalledModel]:
    """By origin and name. What is no whole model is left out."""
    found = [*_in_shared_cache(), *_in_models_dir(models_dir), *_of_other_tools()]
    return sorted(found, key=lambda model: (model.origin, model.name.lower()))


def told_context_length(path: Path) -> int | None:
    """By the headers of a folder or a GGUF file, installed or not."""
    with suppress(MetalError, OSError):
        return _read_headers(path)[1]
    return None


def _in_shared_cache() -> Iterator[InstalledModel]:
    for repo in shared_cache.models():
        for snapshot, revision in shared_cache.snapshots(repo).items():
            gguf = variants_in(snapshot)
            for variant in gguf:
                quant = variant.quant if len(gguf) > 1 or any(snapshot.glob(WEIGHTS)) else None
                source = HubSource(repo, revision, quant)
                yield from _model(str(source), snapshot / variant.files[0], "hub", _parts(snapshot, variant))
            others = [path for path in _files(snapshot) if path.suffix != ".gguf"]
            yield from _model(str(HubSource(repo, revision)), snapshot, "hub", others)


def _in_models_dir(models_dir: Path) -> Iterator[InstalledModel]:
    known = {store.alias_path(name, models_dir): name for name in ALIASES}
    for path, files in own_folder.models(models_dir):
        yield from _model(known.get(path) or _shown(path), path, "models.dir", files)


def _of_other_tools() -> Iterator[InstalledModel]:
    for name, path in other_tools.models().items():
        origin: Origin = "Ollama" if name.startswith("ollama:") else "LM Studio"
        yield from _model(name, path, origin, _files(path) if path.is_dir() else [path])


def _model(name: str, path: Path, origin: Origin, files: list[Path]) -> Iterator[InstalledModel]:
    """One or none."""
    with suppress(MetalError, OSError):
        store.inspect(path)
        told_format, told_length = _read_headers(path)
        yield InstalledModel(
            name=name,
            path=path,
            files=tuple(files),
            origin=origin,
            kind=model_kind(path),
            size_bytes=sum(file.stat().st_size for file in files),
            number_format=told_format,
            context_length=told_length,
            last_used=usage.last(path),
        )


def _read_headers(path: Path) -> tuple[str | None, int | None]:
    return _read_config(path) if path.is_dir() else _read_header(path)


def _read_config(path: Path) -> tuple[str | None, int | None]:
    config = store.read_json(path / "config.json")
    # A config may hold anything under any name, and one that does must not hide other models.
    with suppress(MetalError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return number_format(config), served_length(path, config)
    return None, None


def _read_header(path: Path) -> tuple[str | None, int | None]:
    header = gguf_header.read(path)
    length: Any = header.metadata.get(f"{header.metadata.get('general.architecture')}.context_length")
    told_format = header.quantization or next((tensor.type_name for tensor in header.tensors.values()), None)
    return told_format, length if isinstance(length, int) else None


def _parts(folder: Path, variant: Variant) -> list[Path]:
    return [folder / file for file in variant.files]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _shown(path: Path) -> str:
    """With `~` for the home: what a shell takes, and `metal serve` too."""
    with suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def find(text: str, config: ModelsConfig) -> InstalledModel:
    """The one that `text` names, as `metal list` does or any other command. Raises `ModelNotFound`."""
    models = installed_models(config.store)
    for model in models:
        if model.name == text:
            return model
    source = parse_source(text, config)
    for model in models:
        if model.path == source.path if isinstance(source, PathSource) else model.name == str(source):
            return model
    near = [model.name for model in models if model.name.startswith(f"{source}:")]
    raise ModelNotFound(
        f"`{source}` is not among the models on this machine",
        hint=f"name one of {', '.join(f'`{name}`' for name in near)}" if near else "`metal list` shows them",
    )
