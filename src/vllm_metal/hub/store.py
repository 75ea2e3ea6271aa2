"""Which models are on disk, and what is wrong with a path that is none. Never uses the network."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_metal.errors import ModelNotFound, NotAModel, UnsupportedModel
from vllm_metal.hub import shared_cache
from vllm_metal.hub.aliases import ALIASES
from vllm_metal.hub.names import AliasSource, HubSource, PathSource, Source
from vllm_metal.hub.variants import choose, variants_in

# A text model is at the top of its repository, but for numbered folders like `1_Pooling`, which tell what
# sentence-transformers do behind it: others hold other formats and demos, `consolidated` files the same
# weights once more.
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model"]
OTHER_FILES = ["[!0-9]*/*", "[0-9][!_]*/*", "consolidated*.safetensors", "adapter_*"]
WEIGHTS = "model*.safetensors"

FETCH_AGAIN = "it may have been fetched only in part: fetch it again"

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_GGUF_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`path` is a folder of safetensors or one GGUF file; `name` is what it is served as."""

    name: str
    path: Path


def find(source: Source, *, models_dir: Path) -> LocalModel | None:
    """The model if all of it is on disk. Raises as `inspect` does for a path that holds none."""
    match source:
        case PathSource(path):
            return inspect(path, name=source.name)
        case AliasSource(name):
            path = alias_path(name, models_dir)
            whole = path.is_file() and path.stat().st_size == ALIASES[name].file_bytes
            return LocalModel(name, path) if whole else None
        case HubSource():
            if folder := modelscope_folder(source, models_dir):
                return _find_in(folder, source)
            return _find_snapshot(source)


def alias_path(name: str, models_dir: Path) -> Path:
    return models_dir / name / ALIASES[name].file_name


def modelscope_folder(source: HubSource, models_dir: Path) -> Path | None:
    """Where a model of ModelScope goes; None unless `VLLM_USE_MODELSCOPE` has it take the hub's place."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("true", "1"):
        return None
    revision = f"@{source.revision.replace('/', '--')}" if source.revision else ""
    return models_dir / "modelscope" / f"{source.repo}{revision}"


def inspect(path: Path, *, name: str | None = None) -> LocalModel:
    """Raises `ModelNotFound` where there is no `path`; `NotAModel`, `UnsupportedModel` for what is wrong."""
    try:
        if path.is_dir():
            _inspect_folder(path)
            return LocalModel(name or path.name, path)
        if path.is_file():
            _inspect_file(path)
            return LocalModel(name or path.stem, path)
    except PermissionError as exc:
        raise NotAModel(
            f"`{exc.filename or path}` cannot be read: permission denied",
            hint=f"see who may read it with `ls -ld {exc.filename or path}`",
        ) from exc
    raise ModelNotFound(f"`{path}` does not exist", hint="check the path")


def require(folder: Path, source: HubSource) -> LocalModel:
    """The model that `source` names, in a folder that has just been fetched. Raises as `inspect` does."""
    return _gguf_in(folder, source) or inspect(folder, name=source.name)


def _find_in(folder: Path, source: HubSource) -> LocalModel | None:
    if gguf := _gguf_in(folder, source):
        return gguf
    if source.quant is not None:
        return None
    with suppress(ModelNotFound, NotAModel, UnsupportedModel):
        return inspect(folder, name=source.name)
    return None


def _find_snapshot(source: HubSource) -> LocalModel | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    there = shared_cache.snapshot(source.repo, source.revision)
    if there is not None and (gguf := _gguf_in(there, source)):
        return gguf
    if source.quant is not None:
        return None
    try:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=MODEL_FILES,
            ignore_patterns=OTHER_FILES,
            local_files_only=True,
        )
        # Another program may have cached a part of it, with no list of files to tell.
        return inspect(Path(folder), name=source.repo)
    except (LocalEntryNotFoundError, NotAModel, UnsupportedModel):
        return None


def _gguf_in(folder: Path, source: HubSource) -> LocalModel | None:
    """The GGUF file that `source` names in a snapshot. Raises `ModelNotFound` where it could be several."""
    if source.quant is None and any(folder.glob(WEIGHTS)):
        return None
    whole = variants_in(folder)
    if source.quant is not None:
        whole = [variant for variant in whole if variant.quant.lower() == source.quant.lower()]
    if not whole:
        return None
    return inspect(folder / choose(whole, source.quant, source.repo).files[0], name=source.name)


def _inspect_file(path: Path) -> None:
    head = _head(path)
    if head.startswith(_GGUF_MAGIC):
        return
    _refuse_lfs_pointer(path, head)
    if path.suffix == ".gguf":
        state = "is empty" if not head else "is not a GGUF file, whatever its name says"
        raise NotAModel(f"`{path}` {state}", hint=FETCH_AGAIN)
    if path.suffix == ".safetensors":
        raise NotAModel(
            f"`{path}` is a file of weights, not a whole model", hint=f"give its folder: `{path.parent}`"
        )
    raise NotAModel(
        f"`{path}` is not a model",
        hint="give a folder with `config.json` and safetensors, or a `.gguf` file",
    )


def _inspect_folder(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        raise NotAModel(f"`{path}` is empty", hint="give a folder with `config.json` and safetensors")
    if "config.json" not in names:
        raise NotAModel(
            f"`{path}` is not a model folder: it has no `config.json`", hint=_without_config(path, names)
        )
    read_json(path / "config.json")
    weights = sorted(path.glob(WEIGHTS))
    # A single whole file may lie beside the index of the model it was made from.
    if _INDEX in names and _WHOLE not in names:
        _require_shards(path)
    elif not weights:
        error = UnsupportedModel if _kinds_of_weights(names) else NotAModel
        raise error(f"`{path}` holds {describe_weights(names)}", hint=_CONVERT_HINT)
    for file in weights:
        _refuse_lfs_pointer(file, _head(file))


_CONVERT_HINT = (
    f"models are read from `{WEIGHTS}` or a `.gguf` file; convert others with "
    "`mlx_lm.convert --hf-path SOURCE --mlx-path FOLDER`"
)


def describe_weights(names: list[str]) -> str:
    """What a folder without `WEIGHTS` has instead, in words."""
    found = _kinds_of_weights(names)
    return f"{' and '.join(found)} but no `{WEIGHTS}`" if found else f"no `{WEIGHTS}`"


def _kinds_of_weights(names: list[str]) -> list[str]:
    kinds = {
        "GGUF files": (".gguf",),
        "PyTorch weights (`.bin`, `.pth`)": (".bin", ".pth", ".pt"),
        "ONNX weights": (".onnx",),
        "safetensors of another layout": (".safetensors",),
    }
    return [kind for kind, suffixes in kinds.items() if any(name.endswith(suffixes) for name in names)]


def _without_config(path: Path, names: list[str]) -> str:
    if "adapter_config.json" in names:
        return "this is a LoRA adapter; give the model it was trained on"
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"give the GGUF file itself: `{path / gguf[0]}`"
    return "give the folder that holds `config.json` and the safetensors"


def _require_shards(path: Path) -> None:
    index = read_json(path / _INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise NotAModel(f"`{path / _INDEX}` has no `weight_map`", hint=FETCH_AGAIN)
    missing = sorted({str(shard) for shard in weight_map.values() if not (path / str(shard)).is_file()})
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotAModel(f"`{path}` lacks `{missing[0]}`{others}", hint=FETCH_AGAIN)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises NotAModel for anything else there."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise NotAModel(f"`{path}` is not valid JSON: {exc}", hint=FETCH_AGAIN) from exc
    if not isinstance(value, dict):
        raise NotAModel(f"`{path}` is not a JSON object", hint=FETCH_AGAIN)
    return value


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER))


def _refuse_lfs_pointer(path: Path, head: bytes) -> None:
    if head == _LFS_POINTER:
        raise NotAModel(
            f"`{path}` is a Git LFS pointer, not the file itself", hint="run `git lfs pull` in its folder"
        )
