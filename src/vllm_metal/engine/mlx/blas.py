"""The BLAS of MLX's CPU backend: on Linux its own is a slow reference one, unless another is preloaded."""

from __future__ import annotations

import ctypes
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_LIBRARY_ROOT = Path("/usr")
_OPENBLAS = ("lib/*-linux-gnu/openblas-pthread/libopenblas.so.0", "lib64/libopenblasp.so.0")


def warn_if_slow() -> None:
    """Tell how to preload OpenBLAS, which multiplies float32 matrices about 50 times faster."""
    if sys.platform != "linux" or _is_preloaded():
        return
    found = [path for pattern in _OPENBLAS for path in sorted(_LIBRARY_ROOT.glob(pattern))]
    if found:
        remedy = f"run `export LD_PRELOAD={found[0]}` first"
    else:
        remedy = "install OpenBLAS (Debian's `libopenblas0-pthread`) and name it in `LD_PRELOAD`"
    logger.warning("models run many times slower than they could, for want of a fast BLAS; %s", remedy)


def _is_preloaded() -> bool:
    # MLX's own, and numpy's, are visible to themselves alone.
    return hasattr(ctypes.CDLL(None), "cblas_sgemm")
