"""Writes the generated pages of docs/ from the code; `--check` fails if one is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_metal import config

PAGES = {"configuration.md": config.reference_markdown}


def main(check: bool) -> int:
    stale = 0
    for name, render in PAGES.items():
        page = Path(__file__).with_name(name)
        text = render()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.stderr.write(f"docs/{name} is out of date; run `make docs`\n")
            stale = 1
        else:
            page.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
