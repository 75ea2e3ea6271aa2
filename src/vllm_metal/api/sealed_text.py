"""Text that a client carries for us and gives back, in letters that any API takes."""

from __future__ import annotations

import base64


def seal(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def unseal(sealed: str) -> str | None:
    """None for what `seal` has not made."""
    try:
        text = base64.urlsafe_b64decode(sealed + "=" * (-len(sealed) % 4)).decode()
    except ValueError:
        return None
    return text if seal(text) == sealed else None
