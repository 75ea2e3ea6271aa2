"""Makes the scripts of `bench/` importable, as they are to each other."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent.parent / "bench"
sys.path.append(str(SCRIPTS))
