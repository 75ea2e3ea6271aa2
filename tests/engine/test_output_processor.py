"""What ends an answer, and how much of that is part of its text."""

from __future__ import annotations

import pytest

from engine_driver import IdDetokenizer, request
from vllm_metal.engine.output_processor import OutputProcessor
from vllm_metal.engine.outputs import FinishReason

EOS = ord("$")


def text_of(answer: str, **params) -> tuple[str, FinishReason | None]:
    """The text shown of `answer`, a token a character, until it ends."""
    processor = OutputProcessor(IdDetokenizer, frozenset({EOS}))
    asked = request("r", [1], max_tokens=20, **params)
    processor.add(asked)
    text = ""
    for character in answer:
        asked.token_ids.append(ord(character))
        output = processor.process(asked, ord(character))
        text += output.text
        if output.finished:
            return text, output.finish_reason
    return text, None


@pytest.mark.parametrize(
    ("answer", "params", "shown", "shown_with_the_stop"),
    [
        ("Hi$.", {}, "Hi", "Hi$"),
        ("Hi$.", {"stop_token_ids": (ord("i"),)}, "H", "Hi"),
        ("Hi there.", {"stop": (" th", "x")}, "Hi", "Hi th"),
        ("Hi there.", {"stop": (" th",), "min_tokens": 5}, "Hi there.", "Hi there."),
        ("Hi there.", {"stop": ("t", "there")}, "Hi ", "Hi t"),
    ],
)
def test_what_ends_an_answer_is_shown_if_asked_for(answer, params, shown, shown_with_the_stop):
    assert text_of(answer, **params)[0] == shown
    assert text_of(answer, include_stop_str_in_output=True, **params)[0] == shown_with_the_stop


def test_a_stop_string_that_is_not_complete_is_shown_at_the_end():
    for included in (False, True):
        assert text_of("Hi th$", stop=(" the",), include_stop_str_in_output=included)[0].startswith("Hi th")
