"""Checks the weight files of a model folder: MLX itself finds a missing part only when it reads it."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_metal.errors import NotAModel, UnsupportedModel

FETCH_AGAIN = "it may have been fetched only in part; fetch it again with `metal pull`"


def check_folder(folder: Path) -> None:
    """Raise NotAModel for a missing, truncated or damaged file, UnsupportedModel for other weights."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise UnsupportedModel(
            f"`{folder}` holds PyTorch weights only", hint="use a safetensors or MLX version of the model"
        )
    if not files:
        raise NotAModel(f"`{folder}` holds no `model*.safetensors`", hint=FETCH_AGAIN)
    _check_index(folder)
    for file in files:
        _check_file(file)


def _check_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    # A single complete file may lie beside the index of the model it was made from.
    if not index.exists() or (folder / "model.safetensors").exists():
        return
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise NotAModel(f"`{index}` is damaged: {exc!r}", hint=FETCH_AGAIN) from exc
    missing = sorted(shard for shard in shards if not (folder / shard).exists())
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotAModel(f"`{folder}` lacks `{missing[0]}`{others}", hint=FETCH_AGAIN)


def _check_file(path: Path) -> None:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if 8 + header_bytes > size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(header_bytes))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        missing_bytes = 8 + header_bytes + max(ends, default=0) - size
        if missing_bytes > 0:
            raise ValueError(f"its last {missing_bytes} bytes are missing")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise NotAModel(f"`{path}` is damaged: {exc}", hint=FETCH_AGAIN) from exc
