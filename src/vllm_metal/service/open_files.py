"""The limit on open files, of which each connection and each file of a model is one."""

from __future__ import annotations

import resource
from contextlib import suppress

NUM_OPEN_FILES = 8192


def raise_limit() -> None:
    """macOS lets a process begin with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_OPEN_FILES if hard == resource.RLIM_INFINITY else min(NUM_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # The kernel may have a ceiling of its own; the limit that it leaves is worth a try.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
