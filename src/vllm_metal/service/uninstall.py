"""What the product has put into a user's folders, and its removal: nothing of others, nor behind a link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_metal import config, paths
from vllm_metal.errors import ConfigError, MetalError, SetupError
from vllm_metal.service import agent, executable, launchd, plist, venv

# What such names begin files that are being written have too.
_STATE = (paths.chat_history().name, paths.last_used_dir().name, launchd.reason_file().stem)


@dataclass(frozen=True, slots=True)
class Kept:
    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is: `folders` are ours too, and go once they are empty."""

    has_service: bool
    has_venv: bool
    removed: tuple[Path, ...]
    kept: tuple[Kept, ...]
    folders: tuple[Path, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.has_service or self.has_venv or self.removed)


def plan(*, purge: bool) -> Plan:
    """Look at what there is, and change nothing. With `purge` configuration and models go too."""
    removed: list[Path] = []
    kept: list[Kept] = []
    for path, reason in [*_contents(purge), *_brew_log(), *_own_models_dir()]:
        if reason:
            kept.append(Kept(path, reason))
        else:
            removed.append(path)
    try:
        has_venv = bool(venv.contents(paths.venv()))
    except SetupError:
        has_venv = False
        kept.append(Kept(paths.venv(), "`metal setup` did not make it"))
    return Plan(_has_service(), has_venv, tuple(removed), tuple(kept), tuple(_folders()))


def carry_out(plan: Plan, on_busy: Callable[[], None]) -> None:
    """Remove what the plan names, the service first; `on_busy` is told that a `metal setup` is waited for.

    Raises MetalError with the first that could not be removed, once all others are.
    """
    if plan.has_service:
        agent.uninstall()
    steps: list[Callable[[], None]] = [partial(_remove, path) for path in plan.removed]
    if plan.has_venv:
        steps.append(partial(_remove_venv, on_busy))
    failed: list[MetalError] = []
    for step in steps:
        try:
            step()
        except MetalError as exc:
            failed.append(exc)
        except OSError as exc:
            hint = "everything else is; remove it by hand, or run this again once you may"
            failed.append(MetalError(f"`{exc.filename}` cannot be removed: {exc.strerror}", hint=hint))
    for folder in plan.folders:
        # Not if something is kept in it.
        with suppress(OSError):
            folder.rmdir()
    if failed:
        raise failed[0]


def _has_service() -> bool:
    # Without launchd there is none.
    return shutil.which("launchctl") is not None and (plist.file().exists() or agent.find() is not None)


def _folders() -> list[Path]:
    """Ours by their names, innermost first; several are one on a Mac."""
    folders = {
        paths.log_dir(),
        paths.cache_dir(),
        paths.state_dir(),
        paths.data_dir(),
        paths.config_file().parent,
    }
    return sorted(folders, reverse=True)


def _contents(purge: bool) -> Iterator[tuple[Path, str]]:
    """What is in our folders, and why it stays if it does."""
    folders = _folders()
    for folder in folders:
        if folder.parent in folders:
            continue
        if folder.is_symlink():
            yield folder, "it is a link to elsewhere"
        elif folder.exists() and not folder.is_dir():
            yield folder, "`metal` did not make it"
        elif folder.is_dir() and folder.stat().st_uid != os.geteuid():
            yield folder, "it belongs to another user"
        elif folder.is_dir():
            for path in sorted(folder.iterdir()):
                yield path, _reason_to_keep(path, purge)


def _reason_to_keep(path: Path, purge: bool) -> str:
    config_file = paths.config_file()
    # Beside the file there may be copies of it.
    is_config = path.parent == config_file.parent and path.name.startswith(config_file.name)
    if path == paths.models_dir() or is_config:
        return "" if purge else "`--purge` removes it"
    is_state = path.parent == paths.state_dir() and path.name.startswith(_STATE)
    if is_state or not {path, path.parent}.isdisjoint({paths.cache_dir(), paths.log_dir()}):
        return ""
    return "`metal` did not make it"


def _brew_log() -> Iterator[tuple[Path, str]]:
    """What Homebrew's own service writes to: in `var`, where no uninstall of brew's looks."""
    keg = executable.find().parent.parent
    log = keg.parent.parent / "var" / "log" / "vllm-metal.log"
    if keg.parts[-2:] == ("opt", "vllm-metal") and log.exists():
        yield log, ""


def _own_models_dir() -> Iterator[tuple[Path, str]]:
    with suppress(ConfigError):
        folder = config.load(environ={}).models.store
        if folder != paths.models_dir() and folder.is_dir():
            yield folder, "`models.dir` names it, and others may use it"


def _remove_venv(on_busy: Callable[[], None]) -> None:
    with venv.exclusive(paths.venv(), on_busy):
        venv.remove(paths.venv())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
