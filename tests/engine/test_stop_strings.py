from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.engine.stop_strings import StopStrings

TEXT = st.text(alphabet="ab<|>", max_size=30)


def _feed_all(stops: tuple[str, ...], pieces: list[str], *, included: bool = False) -> tuple[str, bool]:
    matcher = StopStrings(stops, included=included)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(st.lists(TEXT, max_size=8), st.lists(TEXT.filter(bool), max_size=4).map(tuple))
def test_pieces_give_what_the_whole_text_gives(pieces, stops):
    text = "".join(pieces)
    # Of several stop strings the one that is complete first ends the text, wherever it began.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    shown, stopped = _feed_all(stops, list(text))
    assert stopped == bool(ends)
    if ends:
        first_end = min(ends)[0]
        assert shown == text[: min(begin for end, begin in ends if end == first_end)]
    else:
        assert shown == text


@given(st.lists(TEXT, max_size=8), TEXT.filter(bool))
def test_one_stop_string_is_found_however_the_text_is_cut(pieces, stop):
    text = "".join(pieces)
    shown, stopped = _feed_all((stop,), pieces)
    assert stopped == (stop in text)
    before, found, _ = text.partition(stop)
    assert shown == before
    assert _feed_all((stop,), pieces, included=True) == (before + found, stopped)


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopStrings(("</s>",))
    assert matcher.feed("Hello <") == "Hello "
    assert matcher.feed("b>") == "<b>"
    assert matcher.feed("</s") == ""
    assert matcher.flush() == "</s"
