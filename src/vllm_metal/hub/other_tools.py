"""The models that LM Studio and Ollama keep, under `lmstudio:` and `ollama:`. Their folders are only read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_metal.hub.variants import variants_in
from vllm_metal.paths import expand_home

_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_GGUF_LAYER = "application/vnd.ollama.image.model"
_DEFAULT_TAG = ":latest"


def models() -> dict[str, Path]:
    """A folder with `config.json` or a GGUF file for each name."""
    return dict(sorted([*_of_lm_studio(), *_of_ollama()]))


def find(name: str) -> Path | None:
    """By a name of `models`; Ollama's `:latest` may be left out."""
    if not name.startswith(("lmstudio:", "ollama:")):
        return None
    known = models()
    return known.get(name) or known.get(name + _DEFAULT_TAG)


def _of_lm_studio() -> Iterator[tuple[str, Path]]:
    home = Path(expand_home("~"))
    folders = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    chosen = _json_object(home / ".lmstudio" / "settings.json").get("downloadsFolder")
    if isinstance(chosen, str) and chosen:
        folders.insert(0, Path(expand_home(chosen)))
    for folder in dict.fromkeys(folders):
        for path in _folders(folder, depth=2):
            name = f"lmstudio:{path.relative_to(folder)}"
            if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
                yield name, path
            found = variants_in(path)
            for variant in found:
                suffix = f":{variant.quant}" if len(found) > 1 else ""
                yield name + suffix, path / variant.files[0]


def _of_ollama() -> Iterator[tuple[str, Path]]:
    folder = Path(expand_home(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models"))
    for path in _folders(folder / "manifests", depth=3):
        for manifest in _entries(path):
            if blob := _gguf_blob(_json_object(manifest)):
                host, namespace, model = path.relative_to(folder / "manifests").parts
                parts = [host, namespace, model]
                if host == "registry.ollama.ai":
                    parts = [model] if namespace == "library" else [namespace, model]
                yield f"ollama:{'/'.join(parts)}:{manifest.name}", folder / "blobs" / blob


def _gguf_blob(manifest: dict[str, Any]) -> str | None:
    layers = manifest.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == _GGUF_LAYER:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            return f"sha256-{digest[1]}" if digest else None
    return None


def _folders(root: Path, depth: int) -> Iterator[Path]:
    if depth == 0:
        yield root
        return
    for path in _entries(root):
        if path.is_dir():
            yield from _folders(path, depth - 1)


def _entries(folder: Path) -> list[Path]:
    """Empty where it cannot be read; what is hidden is no model."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return []


def _json_object(path: Path) -> dict[str, Any]:
    """Empty for whatever is none: files of others may be of any kind."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}
