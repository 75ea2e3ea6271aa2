from __future__ import annotations

import threading

import pytest

from chat_prompt import encode_chat
from vllm_metal.engine.mlx import content_format, request_template
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
    ids = encode_chat(smollm2_tokenizer, [{"role": "user", "content": "Hi"}])
    start, end = 1, 2  # <|im_start|> and <|im_end|>
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert smollm2_tokenizer.decode(ids).endswith("user\nHi\nassistant\n")


def test_the_generation_prompt_is_optional_and_variables_reach_the_template(tokenizer):
    def render(**options):
        return tokenizer.decode(encode_chat(tokenizer, [USER], **options))

    assert render() == "user: héassistant:"
    assert render(add_generation_prompt=False) == "user: hé"
    assert render(name="robot") == "user: hérobot:"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], "no such role"),
        ([{"role": "user", "content": None}], "refused the messages"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_messages_that_the_template_refuses_are_the_clients_fault(tokenizer, messages, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        encode_chat(tokenizer, messages)
    assert caught.value.param in ("messages", None)


@pytest.mark.parametrize("variable", ["chat_template", "tokenize", "return_tensors"])
def test_variables_cannot_steer_the_renderer(tokenizer, variable):
    with pytest.raises(InvalidRequest, match=f"`{variable}`") as caught:
        encode_chat(tokenizer, [USER], **{variable: "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_cannot_reach_python(byte_tokenizer):
    tokenizer = Tokenizer(
        byte_tokenizer, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(InvalidRequest, match="unsafe"):
        encode_chat(tokenizer, [USER])


def test_a_model_without_a_template_says_what_to_do(byte_tokenizer):
    byte_tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        encode_chat(Tokenizer(byte_tokenizer), [USER])
    assert "/v1/completions" in caught.value.hint
    replaced = Tokenizer(byte_tokenizer, chat_template="{{ messages[0].content }}")
    assert replaced.decode(encode_chat(replaced, [USER])) == "hé"


def test_of_a_text_of_which_only_the_end_is_wanted_no_more_is_encoded(smollm2_tokenizer, monkeypatch):
    encoded = []
    backend = smollm2_tokenizer.backend

    class Backend:
        def encode_batch_fast(self, texts, **options):
            encoded.extend(texts)
            return backend.encode_batch_fast(texts, **options)

    text = "The quick brown fox jumps over 13 lazy dogs. 北京 " * 4000
    whole = smollm2_tokenizer.encode(text)
    monkeypatch.setattr(smollm2_tokenizer, "backend", Backend())
    end = smollm2_tokenizer.encode(text, max_tokens=100, only_end=True)
    assert end[-100:] == whole[-100:]
    assert len(encoded[0]) < len(text) / 4
    chat = [{"role": "user", "content": text}]
    assert len(encode_chat(smollm2_tokenizer, chat, max_tokens=100, only_end=True)) < len(whole) / 4


def test_detokenizing_is_not_disturbed_by_encoding(smollm2_tokenizer):
    """The engine thread detokenizes while the executor thread encodes."""
    text = "The quick brown fox jumps over 13 lazy dogs. 北京 " * 40
    failures = []

    def encode() -> None:
        try:
            for _ in range(100):
                smollm2_tokenizer.encode(text)
                encode_chat(smollm2_tokenizer, [{"role": "user", "content": text}])
        except Exception as exc:
            failures.append(exc)

    ids = smollm2_tokenizer.encode(text)
    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        assert smollm2_tokenizer.decode(ids) == text
    thread.join()
    assert failures == []


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "text_content", "parts_content"),
    [
        ("{{ messages[-1].content }}", "x", "a\nb"),
        ("{{ messages[-1].content | trim }}", "x", "a\nb"),
        ("{% for part in messages[-1].content %}[{{ part.text }}]{% endfor %}", "[x]", "[a][b]"),
        (
            "{% if messages[-1].content is string %}{{ messages[-1].content }}{% else %}"
            "{% for part in messages[-1].content %}{{ part.text }}{% endfor %}{% endif %}",
            "x",
            "ab",
        ),
        ("{{ raise_exception('no') if messages | length < 2 }}{{ messages[-1].content }}", "x", "a\nb"),
    ],
)
def test_content_comes_as_the_template_wants_it(byte_tokenizer, template, text_content, parts_content):
    tokenizer = Tokenizer(byte_tokenizer, chat_template=template)

    def render(content):
        return tokenizer.decode(encode_chat(tokenizer, [USER, {"role": "user", "content": content}]))

    assert render("x") == text_content
    assert render(PARTS) == parts_content


def test_messages_without_content_pass():
    adapt = content_format.ContentFormat(text=False, parts=True).adapt
    assert adapt([{"role": "assistant"}]) == [{"role": "assistant", "content": None}]


def test_a_message_is_gone_on_with(byte_tokenizer):
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    tokenizer = Tokenizer(byte_tokenizer, chat_template=template)
    messages = [USER, {"role": "assistant", "content": "It is"}]

    def render(**options):
        return tokenizer.decode(encode_chat(tokenizer, messages, **options))

    assert render() == "<hé><It is>"
    assert render(add_generation_prompt=False, continue_final_message=True) == "<hé><It is"


def test_a_requests_template_sees_what_the_models_own_does(tokenizer):
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% generation %}{{ name }}{% endgeneration %}{{ documents | tojson }}{{ add_generation_prompt }}"
    )
    text = tokenizer.render_request_template(
        template,
        [{"role": "user", "content": PARTS}],
        name="\ud800",
        documents=[{"text": "é"}],
        add_generation_prompt=False,
    )
    assert text == '<s>a\nb\ud800[{"text": "é"}]False'


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "failed: "),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "failed: "),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "failed: "),
        ("{{ raise_exception('no') }}", "failed: no"),
        ("{{ 'x' * 10 ** 8 }}", "failed: it gave more than"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too long"),
    ],
)
def test_a_hostile_template_is_given_up_on(template, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        request_template.render(template, [USER], {})
    assert caught.value.param == "chat_template"


def test_a_template_that_eats_memory_is_given_up_on(monkeypatch):
    # Less than the program takes before it reads the template, so that nothing big has to be made.
    monkeypatch.setattr(request_template, "_MAX_MEMORY_BYTES", 1 << 20)
    with pytest.raises(InvalidRequest, match="too much memory"):
        request_template.render("{{ 1 }}", [USER], {})
