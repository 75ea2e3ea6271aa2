"""Files of the user's that commands write."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from vllm_metal.errors import ConfigError


def write(path: Path, content: bytes) -> None:
    """Whole or not at all; links and modes stay. A new file is its owner's alone, since it may hold keys."""
    target = Path(os.path.realpath(path))
    # A pipe or a device would be replaced by a file; a folder is safe from that.
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ConfigError(f"cannot write `{path}`: it is not a file", hint="name a file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if target.exists():
                    temporary.chmod(stat.S_IMODE(target.stat().st_mode))
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot write `{path}`: {exc.strerror}", hint="see who owns its folder") from exc
