"""Filling in the middle: how models that learnt it are shown the text before a gap and the text after it."""

from __future__ import annotations

from collections.abc import Callable

_BEFORE, _AFTER = object(), object()

#: By family, each a form of its own: special tokens, with the two texts between them.
_FORMS = (
    ("<|fim_prefix|>", _BEFORE, "<|fim_suffix|>", _AFTER, "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", _BEFORE, "<fim_suffix>", _AFTER, "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", _BEFORE, "<｜fim▁hole｜>", _AFTER, "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", _BEFORE, "▁<SUF>", _AFTER, "▁<MID>"),  # Code Llama
    ("[SUFFIX]", _AFTER, "[PREFIX]", _BEFORE),  # Codestral
)

#: Ends what fills a gap, and nothing else.
END_TOKENS = ("▁<EOT>",)


class FillInMiddle:
    """One family's form. `token_id` gives the id of a token by name, None where the vocabulary has none."""

    def __init__(self, form: tuple[object, ...], token_id: Callable[[str], int | None]) -> None:
        self._form = form
        self._token_id = token_id

    @classmethod
    def detect(cls, token_id: Callable[[str], int | None]) -> FillInMiddle | None:
        """The form whose special tokens the vocabulary has."""
        for form in _FORMS:
            if all(token_id(part) is not None for part in form if isinstance(part, str)):
                return cls(form, token_id)
        return None

    def token_ids(self, before: list[int], after: list[int]) -> list[int]:
        """The prompt for what stands between two texts."""
        texts = {_BEFORE: before, _AFTER: after}
        return [
            token_id
            for part in self._form
            for token_id in ([self._token_id(part)] if isinstance(part, str) else texts[part])
            if token_id is not None
        ]
