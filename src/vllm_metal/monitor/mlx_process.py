"""Asks MLX in a process of its own, which a broken driver may end or hold up for ever."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from vllm_metal.errors import EngineError
from vllm_metal.monitor import command

#: What runs the programs: the Python of this process, with its packages.
PYTHON = sys.executable

_TIMEOUT_S = 60.0


def has_mlx() -> bool:
    return importlib.util.find_spec("mlx") is not None


def ask(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a program of `engine.mlx` prints. Raises EngineError where it prints none."""
    name = f"vllm_metal.engine.mlx.{module}"
    done = command.run(PYTHON, "-P", "-m", name, *arguments, timeout_s=_TIMEOUT_S)
    if done.exit_code is None:
        raise EngineError(f"MLX gave no answer within {_TIMEOUT_S:g} s")
    if done.exit_code < 0:
        raise EngineError(f"MLX crashed: it was ended by signal {-done.exit_code}")
    try:
        told = json.loads(done.stdout)
    except ValueError:
        told = None
    if done.exit_code or not isinstance(told, dict):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        raise EngineError(f"MLX failed: {''.join(c for c in last if c.isprintable())[:200]}")
    return told
