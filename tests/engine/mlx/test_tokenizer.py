from __future__ import annotations

import threading

import pytest

from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.errors import InvalidRequest

USER = {"role": "user", "content": "hé"}


@pytest.fixture
def tokenizer(byte_tokenizer) -> Tokenizer:
    return Tokenizer(byte_tokenizer, eos_token_ids=[7])


def test_encode_and_decode_are_each_others_inverse(tokenizer):
    text = "naïve 北京 😀\n"
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_tokens_are_the_given_ones_and_the_tokenizers_own(tokenizer):
    assert tokenizer.eos_token_ids == {7, 257}
    assert tokenizer.vocab_size == 258


def test_a_lone_surrogate_is_the_clients_fault(tokenizer):
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("\ud800")


def test_the_template_is_rendered_with_its_special_tokens_once(smollm2_tokenizer):
    ids = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    start, end = 1, 2  # <|im_start|> and <|im_end|>
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert smollm2_tokenizer.decode(ids).endswith("user\nHi\nassistant\n")


def test_the_generation_prompt_is_optional_and_variables_reach_the_template(tokenizer):
    def render(**options):
        return tokenizer.decode(tokenizer.apply_chat_template([USER], **options))

    assert render() == "user: héassistant:"
    assert render(add_generation_prompt=False) == "user: hé"
    assert render(name="robot") == "user: hérobot:"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {"role": "system", "content": "x"}], "the system message must be the first"),
        ([{"role": "user", "content": None}], "refused the messages"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_messages_that_the_template_refuses_are_the_clients_fault(tokenizer, messages, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param in ("messages", None)


@pytest.mark.parametrize("variable", ["chat_template", "tokenize", "return_tensors"])
def test_variables_cannot_steer_the_renderer(tokenizer, variable):
    with pytest.raises(InvalidRequest, match=f"`{variable}`") as caught:
        tokenizer.apply_chat_template([USER], **{variable: "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_cannot_reach_python(byte_tokenizer):
    tokenizer = Tokenizer(
        byte_tokenizer, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(InvalidRequest, match="unsafe"):
        tokenizer.apply_chat_template([USER])


def test_a_model_without_a_template_says_what_to_do(byte_tokenizer):
    byte_tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        Tokenizer(byte_tokenizer).apply_chat_template([USER])
    assert "/v1/completions" in caught.value.hint
    replaced = Tokenizer(byte_tokenizer, chat_template="{{ messages[0].content }}")
    assert replaced.decode(replaced.apply_chat_template([USER])) == "hé"


def test_detokenizing_is_not_disturbed_by_encoding(smollm2_tokenizer):
    """The engine thread detokenizes while the executor thread encodes."""
    text = "The quick brown fox jumps over 13 lazy dogs. 北京 " * 40
    failures = []

    def encode() -> None:
        try:
            for _ in range(100):
                smollm2_tokenizer.encode(text)
                smollm2_tokenizer.apply_chat_template([{"role": "user", "content": text}])
        except Exception as exc:
            failures.append(exc)

    ids = smollm2_tokenizer.encode(text)
    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        assert smollm2_tokenizer.decode(ids) == text
    thread.join()
    assert failures == []
