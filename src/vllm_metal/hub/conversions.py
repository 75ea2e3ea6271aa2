"""Where models that were converted for MLX are kept, each as long as what it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from vllm_metal import __version__, paths
from vllm_metal.hub import safetensors_header

_SUFFIX = ".safetensors"
# Under which a safetensors file names the model that it was made from.
_SOURCE_KEY = "source"


def file_for(source: Path) -> Path:
    """Of the model whose first file is at `source`."""
    # Links stay: what they lead to goes by another name after an update.
    name = hashlib.sha256(_absolute(source).encode(errors="surrogateescape")).hexdigest()
    return paths.conversions_dir() / f"{name[:32]}{_SUFFIX}"


def partial_file_for(source: Path) -> Path:
    """Where this thread writes it, to be renamed to `file_for` once it is whole."""
    file = file_for(source)
    return file.with_name(f".{file.stem}.{threading.get_ident()}.{os.getpid()}{_SUFFIX}")


def description(files: Sequence[Path]) -> dict[str, str]:
    """What a conversion of these files by this version says of itself."""
    return {_SOURCE_KEY: json.dumps([_absolute(files[0]), __version__, *map(_identity, files)])}


def forget(source: Path) -> None:
    """Delete the conversion of a model, if there is one."""
    with suppress(OSError):
        file_for(source).unlink()


def sweep() -> None:
    """Delete what was made from models that are gone, and what processes that are gone have left."""
    for file in _files():
        is_left = not _is_running(file) if file.name.startswith(".") else not _has_source(file)
        if is_left:
            with suppress(OSError):
                file.unlink()


def _files() -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(paths.conversions_dir().glob(f"*{_SUFFIX}"))


def _is_running(partial: Path) -> bool:
    try:
        os.kill(int(partial.stem.rpartition(".")[2]), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _has_source(file: Path) -> bool:
    try:
        header, _ = safetensors_header.read(file)
        path, *_ = json.loads(header["__metadata__"][_SOURCE_KEY])
        return Path(path).exists()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _identity(file: Path) -> list[str | int]:
    """Its time may be that of an archive, which all files of a publisher have."""
    status = file.stat()
    return [file.name, status.st_size, status.st_ino, status.st_mtime_ns]


def _absolute(path: Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100
