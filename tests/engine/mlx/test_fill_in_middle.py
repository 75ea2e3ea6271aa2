"""Filling in the middle, in the form of each family that learnt it."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.errors import InvalidRequest


@pytest.mark.parametrize(
    ("names", "spelled"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
        ),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix>cd<fim_middle>"),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>",
        ),
        (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>ab▁<SUF>cd▁<MID>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]cd[PREFIX]ab"),
    ],
)
def test_the_form_follows_from_the_vocabulary(byte_tokenizer, names, spelled):
    byte_tokenizer.backend_tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer = Tokenizer(byte_tokenizer)
    assert tokenizer.encode_around("ab", "cd") == tokenizer.encode(spelled)
    assert len(tokenizer.encode(spelled)) <= 4 + 3
    ends = {tokenizer.backend.token_to_id(name) for name in names if "EOT" in name}
    assert tokenizer.eos_token_ids == {byte_tokenizer.eos_token_id} | ends


def test_other_models_say_that_they_cannot(byte_tokenizer):
    with pytest.raises(InvalidRequest, match="cannot fill in the middle") as caught:
        Tokenizer(byte_tokenizer).encode_around("a", "b")
    assert caught.value.param == "suffix"
