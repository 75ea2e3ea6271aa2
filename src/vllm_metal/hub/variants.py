"""The GGUF files of a repository, which often holds one model in many quantizations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.errors import ModelNotFound
from vllm_metal.hub.disk import format_bytes

#: The name of one part of a model, without its suffix.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d+(?:_[A-Za-z0-9]+)*|TQ\d_\d|BF16|F16|F32|FP16|MXFP4(?:_[A-Za-z]+)?))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
#: Files that go with a model: a projector of images, statistics for quantizing.
_NO_MODEL = ("mmproj", "imatrix")


@dataclass(frozen=True, slots=True)
class Variant:
    """`files` are the parts in order, paths within the repository; `quant` is what tells it from others."""

    quant: str
    files: tuple[str, ...]
    size_bytes: int
    is_whole: bool


def variants(sizes: Mapping[str, int]) -> list[Variant]:
    """From the sizes of all files; the smallest first."""
    groups: dict[str, list[str]] = {}
    for path in sorted(sizes):
        stem, suffix = path[: -len(".gguf")], path[-len(".gguf") :]
        if suffix == ".gguf" and not any(word in path.lower() for word in _NO_MODEL):
            part = PART.fullmatch(stem)
            groups.setdefault(part["stem"] if part else stem, []).append(path)
    quants = {stem: _quant(stem) for stem in groups}
    times = Counter(quants.values())
    found = [
        # Two models of one quantization are told apart by all of their names.
        _variant(quants[stem] if times[quants[stem]] == 1 else stem, files, sizes)
        for stem, files in groups.items()
    ]
    return sorted(found, key=lambda variant: (variant.size_bytes, variant.quant))


def variants_in(folder: Path, *, deep: bool = True) -> list[Variant]:
    """The whole ones in a folder, with the folders inside it or without."""
    paths = folder.rglob("*.gguf") if deep else folder.glob("*.gguf")
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.is_file()}
    return [variant for variant in variants(sizes) if variant.is_whole]


def choose(found: list[Variant], quant: str | None, repo: str) -> Variant:
    """The one that is named, or the only one. Raises `ModelNotFound` with what there is to choose from."""
    if quant is None and len(found) == 1:
        return found[0]
    matching = [each for each in found if quant and each.quant.lower() == quant.lower()]
    if len(matching) == 1:
        return matching[0]
    raise _which(found, quant, repo)


def _which(found: list[Variant], quant: str | None, repo: str) -> ModelNotFound:
    choices = ", ".join(f"`{each.quant}` ({format_bytes(each.size_bytes)})" for each in found)
    problem = f"has no quantization `{quant}`" if quant else f"holds {len(found)} quantizations"
    return ModelNotFound(
        f"`{repo}` {problem}: {choices}",
        hint=f"choose one: `metal pull {repo} --quant {found[0].quant}`, or `{repo}:{found[0].quant}` "
        "wherever a model is named",
    )


def _quant(stem: str) -> str:
    named = _QUANT.findall(stem.rpartition("/")[2]) or _QUANT.findall(stem)
    return named[-1].upper() if named else stem


def _variant(quant: str, files: list[str], sizes: Mapping[str, int]) -> Variant:
    part = PART.fullmatch(files[0].removesuffix(".gguf"))
    return Variant(
        quant=quant,
        files=tuple(files),
        size_bytes=sum(sizes[file] for file in files),
        is_whole=part is None or len(files) == int(part["count"]),
    )
