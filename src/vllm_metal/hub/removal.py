"""Takes models off this machine: those of the hub's cache and of our own folder, and no others."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from vllm_metal.errors import ModelError
from vllm_metal.hub import conversions, shared_cache, usage
from vllm_metal.hub.installed import InstalledModel


def require_ours(model: InstalledModel, models_dir: Path) -> None:
    """Raises ModelError for what another program keeps, or what only a link leads to."""
    if model.origin not in ("hub", "models.dir"):
        raise ModelError(f"`{model.name}` belongs to {model.origin}", hint="remove it there")
    home = shared_cache.folder() if model.origin == "hub" else models_dir
    if not model.path.parent.resolve().is_relative_to(home.resolve()) or (
        model.origin == "models.dir" and model.path.is_symlink()
    ):
        raise ModelError(
            f"`{model.path}` is a link to somewhere else",
            hint="remove the link, or what it leads to, by hand",
        )


def remove(model: InstalledModel, models_dir: Path) -> None:
    """Raises as `require_ours` does, and for what cannot be deleted."""
    require_ours(model, models_dir)
    try:
        if model.origin == "hub":
            _remove_from_cache(model)
        elif model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            _unlink(model.files, models_dir)
    except OSError as exc:
        raise ModelError(
            f"`{exc.filename or model.path}` cannot be deleted: {exc.strerror}",
            hint="see who owns it; `metal list` tells whether the model is still there",
        ) from exc
    usage.forget(model.path)
    conversions.forget(model.path)


def _remove_from_cache(model: InstalledModel) -> None:
    """Other models of the repository, and files that these share, stay."""
    folder = shared_cache.folder() / model.path.relative_to(shared_cache.folder()).parts[0]
    snapshots, blobs = folder / "snapshots", folder / "blobs"
    contents = {file.resolve() for file in model.files}
    _unlink(model.files, snapshots)
    shared = {file.resolve() for file in snapshots.rglob("*") if file.is_file()}
    if not shared:
        shutil.rmtree(folder)
        shutil.rmtree(shared_cache.folder() / ".locks" / folder.name, ignore_errors=True)
        return
    for blob in contents - shared:
        if blob.is_relative_to(blobs.resolve()):
            blob.unlink()
    for ref in (folder / "refs").rglob("*"):
        if ref.is_file() and not (snapshots / ref.read_text().strip()).is_dir():
            ref.unlink()


def _unlink(files: tuple[Path, ...], root: Path) -> None:
    """And the folders that are empty then, up to `root`."""
    for file in files:
        file.unlink()
    folders = {parent for file in files for parent in file.parents if root in parent.parents}
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            folder.rmdir()
