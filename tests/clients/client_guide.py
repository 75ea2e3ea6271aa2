"""The snippets of docs/clients.md."""

from __future__ import annotations

import re
from pathlib import Path

_SECTIONS = re.split(
    r"^## ", (Path(__file__).parents[2] / "docs" / "clients.md").read_text(), flags=re.MULTILINE
)


def snippet(client: str, language: str, server_url: str) -> str:
    """The block of that client's section, with the server's own address."""
    [section] = [section for section in _SECTIONS if section.startswith(f"{client}\n")]
    [block] = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return block.replace("http://localhost:8000", server_url)


def clients() -> set[str]:
    return {section.partition("\n")[0] for section in _SECTIONS[1:]}
