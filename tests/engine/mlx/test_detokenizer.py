from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as BackendTokenizer

from vllm_metal.engine.mlx.detokenizer import Detokenizer, TokenBytes
from vllm_metal.errors import UnsupportedModel

REPLACEMENT = "\ufffd"
#: Bytes that spell broken UTF-8, half emoji and half CJK; SmolLM2 has tokens for most single bytes.
BYTES = [
    b"\xff",
    b"\xc0",
    b"\xf0",
    b"\x9f",
    b"\x98",
    b"\x80",
    b"\xe5",
    b"\x8c",
    b"\x97",
    b"\xed",
    b"\xa0",
    b"A",
]


@pytest.fixture(scope="session")
def backend(smollm2_tokenizer) -> BackendTokenizer:
    """The library's own decoder, as the judge."""
    return smollm2_tokenizer.backend


@pytest.fixture(scope="session")
def byte_ids(smollm2_tokenizer) -> list[int]:
    token_bytes = TokenBytes(smollm2_tokenizer.backend)
    ids = {token_bytes[token_id]: token_id for token_id in range(smollm2_tokenizer.vocab_size)}
    return [ids[byte] for byte in BYTES if byte in ids]


def chunks(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.add, token_ids), detokenizer.flush()]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_decoded_text(smollm2_tokenizer, backend, byte_ids, data, skip):
    any_id = st.integers(0, smollm2_tokenizer.vocab_size - 1)
    words = st.text(alphabet="a 1é京😀👩‍👩‍👧\n", max_size=6).map(lambda text: backend.encode(text).ids)
    pieces = data.draw(
        st.lists(st.one_of(any_id.map(lambda i: [i]), st.sampled_from(byte_ids).map(lambda i: [i]), words))
    )
    token_ids = [token_id for piece in pieces for token_id in piece]
    streamed = chunks(smollm2_tokenizer.detokenizer((), skip), token_ids)
    assert "".join(streamed) == backend.decode(token_ids, skip_special_tokens=skip)
    for chunk in streamed:
        chunk.encode()  # no half surrogate either


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(), cut=st.integers(0, 40))
def test_valid_text_streams_without_replacement(smollm2_tokenizer, backend, text, cut):
    """Wherever the prompt ends, within a character too, the answer goes on from there."""
    token_ids = backend.encode(text).ids
    # SmolLM2 has no tokens for the bytes of some unassigned characters.
    assume(REPLACEMENT not in text and backend.decode(token_ids) == text)
    prompt, answer = token_ids[:cut], token_ids[cut:]
    streamed = chunks(smollm2_tokenizer.detokenizer(prompt), answer)
    assert REPLACEMENT not in "".join(streamed)
    before = backend.decode(prompt, skip_special_tokens=True).rstrip(REPLACEMENT)
    assert before + "".join(streamed) == text


def test_a_character_comes_out_with_its_last_token(smollm2_tokenizer, backend):
    token_ids = backend.encode("😀").ids
    assert len(token_ids) > 1
    streamed = chunks(smollm2_tokenizer.detokenizer(), token_ids)
    assert streamed == [""] * (len(token_ids) - 1) + ["😀", ""]


def test_an_unfinished_character_is_replaced_at_the_end(smollm2_tokenizer, backend):
    token_ids = backend.encode("😀").ids[:-1]
    assert chunks(smollm2_tokenizer.detokenizer(), token_ids) == [""] * len(token_ids) + [REPLACEMENT]


def test_special_tokens_and_ids_past_the_vocabulary_say_nothing(smollm2_tokenizer, backend):
    end = next(iter(smollm2_tokenizer.eos_token_ids))
    hello = backend.encode("hello").ids
    token_ids = [end, smollm2_tokenizer.vocab_size, *hello, 2**31 - 1, end]
    assert "".join(chunks(smollm2_tokenizer.detokenizer(), token_ids)) == "hello"


def sentencepiece_like() -> BackendTokenizer:
    tokens = ["<unk>", "<s>", "▁Hello", "▁", "world", "▁world", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = BackendTokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        (["<s>"], ["▁Hello", "▁world"], "Hello world"),
        (["<s>", "▁Hello"], ["▁world"], " world"),
        ([], ["▁", "▁", "world"], " world"),
        ([], ["<s>", "▁Hello", "<0xE2>", "<0x82>", "<0xAC>", "world"], "Hello€world"),
        (["▁Hello", "<0xE2>"], ["<0x82>", "<0xAC>", "▁Hello"], "€ Hello"),
    ],
)
def test_the_first_space_goes_only_at_the_start_of_a_text(prompt, answer, expected):
    backend = sentencepiece_like()
    prompt_ids, answer_ids = ([backend.token_to_id(token) for token in tokens] for tokens in (prompt, answer))
    assert "".join(chunks(Detokenizer(TokenBytes(backend), prompt_ids), answer_ids)) == expected
    whole = backend.decode(prompt_ids + answer_ids, skip_special_tokens=True)
    assert whole.endswith(expected)


@pytest.mark.parametrize(
    ("decoder", "tokens", "expected"),
    [
        (decoders.Metaspace(), ["▁one", "▁two", "s"], "one twos"),
        (decoders.WordPiece(cleanup=False), ["one", "##s", "two"], "ones two"),
    ],
)
def test_other_decoders_keep_their_own_rules(decoder, tokens, expected):
    backend = BackendTokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    backend.decoder = decoder
    assert "".join(chunks(Detokenizer(TokenBytes(backend)), list(range(len(tokens))))) == expected
    assert backend.decode(list(range(len(tokens)))) == expected


def test_a_tokenizer_without_a_decoder_is_refused():
    with pytest.raises(UnsupportedModel, match="no decoder"):
        TokenBytes(BackendTokenizer(models.WordLevel({"a": 0}, unk_token="a")))
