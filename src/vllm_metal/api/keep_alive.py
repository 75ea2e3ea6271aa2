"""How long a model stays loaded after a request: Ollama's `keep_alive`."""

from __future__ import annotations

import math
import re

from vllm_metal.errors import InvalidRequest

#: A number of seconds, or durations as in `1h30m`; negative means for ever, 0 not at all.
KeepAlive = float | str

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"(?:[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15})"
_PART = re.compile(rf"({_NUMBER})(h|ms|m|s|us|µs|ns)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART.pattern}){{1,8}})")
_PLAIN = re.compile(rf"[+-]?{_NUMBER}")


def seconds(keep_alive: KeepAlive | None) -> float | None:
    """Infinity for a negative one, None for none. Raises InvalidRequest for what is no duration."""
    value = _read(keep_alive) if isinstance(keep_alive, str) else keep_alive
    if value is None:
        return None
    if math.isnan(value):
        raise _invalid()
    return math.inf if value < 0 else float(value)


def _read(text: str) -> float:
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        raise _invalid()
    value = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(match[2]))
    return -value if match[1] == "-" else value


def _invalid() -> InvalidRequest:
    return InvalidRequest(
        "`keep_alive` must be a number of seconds or a duration like `5m`",
        param="keep_alive",
        hint="0 unloads the model after the request, -1 keeps it",
    )
