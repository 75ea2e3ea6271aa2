"""What a restart of the service would run: an upgrade changes it under the running daemon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vllm_metal import paths
from vllm_metal.service import launchd, plist


@dataclass(frozen=True, slots=True)
class Installation:
    """Where the links that an upgrade moves lead: that of the service's program, and that of the venv."""

    program: Path | None
    venv: Path

    @classmethod
    def current(cls) -> Self:
        arguments = plist.read(plist.file()).get("ProgramArguments")
        program = Path(arguments[0]).resolve() if arguments and isinstance(arguments[0], str) else None
        return cls(program, paths.venv().resolve())

    def is_outdated(self) -> bool:
        """Whether launchd would now start something other than what was current at the service's start."""
        return launchd.is_parent() and Installation.current() != self
