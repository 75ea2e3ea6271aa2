"""Keeps this process's limit on open files while mlx-lm is imported."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_open_files_limit() -> Iterator[None]:
    """Importing mlx-lm lowers the hard limit, and only root could raise it again."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit
