"""Quantizes a folder of plain weights into one of MLX's own, whole or not at all."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from fnmatch import fnmatchcase
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from vllm_metal.engine.mlx import loader, precision
from vllm_metal.engine.mlx.open_files import kept_open_files_limit
from vllm_metal.errors import ModelError, UnsupportedModel
from vllm_metal.hub.disk import require_space, used_bytes
from vllm_metal.hub.progress import OnProgress, PullProgress
from vllm_metal.hub.store import MODEL_FILES, OTHER_FILES

with kept_open_files_limit():
    import mlx_lm.utils as mlx_lm_utils

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)

_LOOK_EVERY_S = 0.5


def convert(
    source: Path, folder: Path, *, bits: int, group_size: int, dtype: str, on_progress: OnProgress
) -> None:
    """`dtype` is "auto" or one of `precision.DTYPES`, for what is not quantized and for scales.

    Raises as loading does, UnsupportedModel for weights that are quantized already, and ModelError where
    there is something at `folder`.
    """
    if os.path.lexists(folder):
        raise ModelError(f"`{folder}` exists already", hint="name another folder, or remove this one")
    if not source.is_dir():
        raise UnsupportedModel(
            f"`{source}` is not a folder of safetensors", hint="convert the original model"
        )
    on_progress(PullProgress(f"reading `{source.name}`"))
    model, config, quantization, _ = loader.load_folder(source)
    if quantization or "quantization_config" in config:
        raise UnsupportedModel(
            f"`{source.name}` is quantized already ({quantization or 'for other programs'})",
            hint="convert the original model, as each quantization loses some of it",
        )
    if dtype != "auto":
        _cast(model, precision.DTYPES[dtype])
    model, config = _quantize(model, config, bits=bits, group_size=group_size)
    num_bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    require_space(folder.parent, num_bytes)
    with (
        _appearing_whole(folder) as partial,
        _told(partial, PullProgress(f"quantizing `{source.name}` to {bits} bits", 0, num_bytes), on_progress),
    ):
        _copy_other_files(source, partial)
        mlx_lm_utils.save_config(config, config_path=partial / "config.json")
        mlx_lm_utils.save_model(partial, model, donate_model=True)


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Not yet evaluated, so that no more is in memory than what is being written."""
    wants_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        is_number = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if is_number and wants_cast(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantize(
    model: nn.Module, config: dict[str, object], *, bits: int, group_size: int
) -> tuple[nn.Module, dict[str, object]]:
    # mlx-lm prints what it did.
    with redirect_stdout(io.StringIO()):
        model, config = mlx_lm_utils.quantize_model(model, config, group_size, bits)
    if not any(hasattr(module, "scales") for module in model.modules()):
        raise UnsupportedModel(
            f"no layer of the model can be quantized in groups of {group_size}",
            hint=f"take a smaller `--group-size`: {', '.join(map(str, GROUP_SIZES))}",
        )
    return model, config


def _copy_other_files(source: Path, folder: Path) -> None:
    """Tokenizer, template and generation config, as they are."""

    def matches(name: str, patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    for file in source.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json")
        wanted = matches(file.name, MODEL_FILES) and not matches(file.name, OTHER_FILES)
        if file.is_file() and wanted and not is_weights:
            shutil.copyfile(file, folder / file.name)


@contextmanager
def _appearing_whole(folder: Path) -> Iterator[Path]:
    """A folder beside it to write to, which takes its name in the end, or is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Of processes that were killed."""
    for path in folder.parent.iterdir():
        prefix, suffix = f".{folder.name}.", ".partial"
        process = path.name.removeprefix(prefix).removesuffix(suffix)
        if path.name == f"{prefix}{process}{suffix}" and process.isdecimal() and not _runs(int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _told(folder: Path, progress: PullProgress, on_progress: OnProgress) -> Iterator[None]:
    """Tell meanwhile how much has been written to `folder`, from a thread of its own."""
    done = threading.Event()

    def tell(num_bytes: int) -> None:
        on_progress(PullProgress(progress.stage, min(num_bytes, progress.total_bytes), progress.total_bytes))

    def watch() -> None:
        # Whoever listens may have gone; the work goes on.
        with suppress(Exception):
            tell(0)
            while not done.wait(_LOOK_EVERY_S):
                tell(used_bytes(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    tell(progress.total_bytes)
