"""The models that are kept in `models.dir`, and the short names that these have."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_metal.hub.variants import variants_in


def models(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """What looks like a model in `folder`, a folder or a GGUF file, with all files that it consists of."""
    for root, subfolders, _ in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        path = Path(root)
        with suppress(OSError):  # it may be listed, but not be for us to enter
            if (path / "config.json").is_file():
                subfolders.clear()
                yield path, sorted(file for file in path.rglob("*") if file.is_file())
            for variant in variants_in(path, deep=False):
                yield path / variant.files[0], [path / file for file in variant.files]


def short_names(folder: Path) -> dict[str, Path]:
    """The last part of a path, for each model that has it alone."""
    paths = [path for path, _ in models(folder)]
    times = Counter(map(_last_part, paths))
    return {_last_part(path): path for path in paths if times[_last_part(path)] == 1}


def _last_part(path: Path) -> str:
    return path.name.removesuffix(".gguf")
