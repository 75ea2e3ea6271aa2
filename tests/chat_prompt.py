"""The prompt of a chat, as an engine has a tokenizer make it."""

from __future__ import annotations

from typing import Any

from vllm_metal.engine.mlx.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_special_tokens: bool = False,
    max_tokens: int | None = None,
    only_end: bool = False,
    **variables: Any,
) -> list[int]:
    return tokenizer.encode(
        tokenizer.render_chat(messages, **variables),
        add_special_tokens=add_special_tokens,
        max_tokens=max_tokens,
        only_end=only_end,
        param="messages",
    )
