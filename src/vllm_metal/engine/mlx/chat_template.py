"""The chat template that the configuration gives in place of the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from vllm_metal.errors import ConfigError


def read(setting: str) -> str:
    """The text of the template: the file's, unless `setting` is a template itself. Raises ConfigError."""
    if _is_text(setting):
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"the chat template `{setting}` cannot be read: {exc}",
            hint="`models.chat_template` is the path of a Jinja file, or the template itself",
        ) from exc


def check(renderer: Any, setting: str) -> None:
    """Raise ConfigError if the template that `renderer` has from `setting` is not valid Jinja."""
    try:
        renderer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as exc:
        name = "the chat template" if _is_text(setting) else f"`{setting}`"
        raise ConfigError(
            f"{name} line {exc.lineno}: {exc.message}",
            hint="mend the template, or leave `models.chat_template` out for the model's own",
        ) from exc
    except Exception:
        return  # It compiles; which messages it takes is for the requests to see.


def _is_text(setting: str) -> bool:
    return "{" in setting
