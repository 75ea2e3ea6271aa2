from __future__ import annotations

import io
import random

import gguf_writer
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from chat_prompt import encode_chat
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.gguf_pre_tokenizers import PRE_TOKENIZERS
from vllm_metal.engine.mlx.gguf_tokenizer import end_token_ids, load_tokenizer
from vllm_metal.errors import NotAModel, UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "a b", "Ġ a"]


def write(path, *, architecture="llama", **settings) -> GGUFFile:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in settings.items() if value is not None}
    metadata["general.architecture"] = architecture
    template = metadata.pop("tokenizer.ggml.chat_template", None)
    extra = {} if template is None else {"tokenizer.chat_template": template}
    return GGUFFile(gguf_writer.write(path / "tokenizer.gguf", metadata | extra, {}))


def byte_level(path, **settings) -> GGUFFile:
    tokens = ["<|start|>", "<|end|>", "<think>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)
    defaults = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return write(path, **(defaults | settings))


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    "text", ["Hello world", "  two  spaces\n\n", "naïve 北京 😀", "def f(x):\n\treturn x**2", "<|im_end|"]
)
def test_smollm2_round_trips(smollm2_tokenizer, text):
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_smollm2_keeps_digits_apart_and_words_together(smollm2_tokenizer):
    assert pieces(smollm2_tokenizer, "Hello 1234 world") == ["Hello", " ", "1", "2", "3", "4", " world"]


def test_smollm2_special_tokens_are_one_token_each(smollm2_tokenizer):
    assert smollm2_tokenizer.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    assert smollm2_tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "1"]),
        ("smollm", ["1", "2", "3", "1"]),
        ("llama-bpe", ["123", "1"]),
        ("qwen2", ["1", "2", "3", "1"]),
        ("tekken", ["1", "2", "3", "1"]),
        ("gpt-4o", ["123", "1"]),
        ("deepseek-v3", ["123", "1"]),
        ("deepseek-coder", ["1", "2", "3", "1"]),
        ("seed-coder", ["1", "2", "3", "1"]),
        ("falcon", ["123", "1"]),
        ("command-r", ["1", "2", "3", "1"]),
        ("default", ["123", "1"]),
    ],
)
def test_each_rule_splits_digits_its_own_way(tmp_path, pre, expected):
    assert pieces(load_tokenizer(byte_level(tmp_path, pre=pre, add_bos_token=False)), "1231") == expected


def test_merges_do_not_cross_the_words_of_the_rule(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path, add_bos_token=False))
    assert pieces(tokenizer, "ab a ba") == ["ab", " a", " ", "b", "a"]


SPLITS = {
    "llama-bpe": ["It", "'S", " ", "½", " Über", "!!\n", " ", " x"],
    "gpt-4o": ["It'S", " ", "½", " Über", "!!\n", " ", " x"],
    "deepseek-v3": ["It", "'S", " ", "½", " Über", "!!\n", " ", " x"],
    "gpt-2": ["It", "'", "S", " ½", " Über", "!!", "\n ", " x"],
    "deepseek-coder": ["It", "'", "S", " ", "½", " Über", "!!", "\n", " ", " x"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_each_rule_splits_words_its_own_way(pre):
    """As the tokenizers of the models that it comes from do."""
    text = "It'S ½ Über!!\n  x"
    words = [text[start:end] for _, (start, end) in PRE_TOKENIZERS[pre].pre_tokenize_str(text)]
    assert words == SPLITS[pre]


@pytest.mark.parametrize("pre", ["klingon", None])
def test_unknown_split_rules_are_refused(tmp_path, pre):
    with pytest.raises(UnsupportedModel, match=f"`{pre}`"):
        load_tokenizer(byte_level(tmp_path, pre=pre))


def test_other_kinds_are_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="`t5`"):
        load_tokenizer(byte_level(tmp_path, model="t5"))


@pytest.mark.parametrize("damage", [{"merges": ["no such"]}, {"merges": None}, {"eos_token_id": 99999}])
def test_parts_that_do_not_fit_are_not_a_model(tmp_path, damage):
    with pytest.raises(NotAModel, match="damaged"):
        load_tokenizer(byte_level(tmp_path, **damage))


@pytest.mark.parametrize("odd", [-1, 99999, "0", [0], 0.5])
@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "bos_token_id"])
def test_ids_of_no_token_are_not_a_model(tmp_path, key, odd):
    file = byte_level(tmp_path)
    file.metadata[f"tokenizer.ggml.{key}"] = odd
    with pytest.raises(NotAModel, match="token"):
        load_tokenizer(file)
    if key != "bos_token_id":
        with pytest.raises(NotAModel, match="it has no token"):
            end_token_ids(file)


def test_a_template_that_is_no_text_is_not_a_model(tmp_path):
    with pytest.raises(NotAModel, match="not a text"):
        load_tokenizer(byte_level(tmp_path, chat_template=5))


@pytest.mark.parametrize(
    ("settings", "begins_with_bos"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
    ],
)
def test_the_first_token(tmp_path, settings, begins_with_bos):
    tokenizer = load_tokenizer(byte_level(tmp_path, **settings))
    assert (tokenizer.encode("ab")[0] == 0) is begins_with_bos
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != 0


def test_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path))
    assert tokenizer.encode("<think><|end|>") == [2, 1]
    assert tokenizer.decode([2, 1]) == "<think>"


def test_end_of_turn_ends_too(tmp_path):
    assert load_tokenizer(byte_level(tmp_path, eot_token_id=2)).eos_token_ids == {1, 2}


@pytest.mark.parametrize(("kind", "ends"), [(CONTROL, {1, 3}), (USER_DEFINED, {1, 3}), (NORMAL, {1})])
def test_what_ends_a_turn_is_known_by_its_text(tmp_path, kind, ends):
    tokens = [
        "<|start|>",
        "<|end|>",
        "<think>",
        "<end_of_turn>",
        *ALPHABET,
        *(m.replace(" ", "") for m in MERGES),
    ]
    types = [CONTROL, CONTROL, USER_DEFINED, kind] + [NORMAL] * (len(tokens) - 4)
    tokenizer = load_tokenizer(byte_level(tmp_path, tokens=tokens, token_type=types))
    assert tokenizer.eos_token_ids == ends


def test_the_files_template_is_used(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template="{{ bos_token + messages[0].content }}"))
    assert encode_chat(tokenizer, [{"role": "user", "content": "ab"}])[0] == 0


@pytest.fixture(scope="session")
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    words = ["the", "quick", "brown", "fox", "lazy", "dogs", "jumping", "über", "naïve", "123", "x=1;"]
    choose = random.Random(0)
    sentences = [" ".join(choose.choices(words, k=8)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=380,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def token_type(model: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if model.IsByte(token_id):
        return BYTE
    if model.IsUnknown(token_id):
        return UNKNOWN
    return CONTROL if model.IsControl(token_id) else NORMAL


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_model, tmp_path_factory):
    model = sentencepiece_model
    ids = range(model.vocab_size())
    return load_tokenizer(
        write(
            tmp_path_factory.mktemp("spm"),
            model="llama",
            tokens=[model.IdToPiece(i) for i in ids],
            scores=[model.GetScore(i) for i in ids],
            token_type=[token_type(model, i) for i in ids],
            bos_token_id=model.bos_id(),
            eos_token_id=model.eos_id(),
            unknown_token_id=model.unk_id(),
        )
    )


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="thequickbrown fxlazydgs12=;ü京😀\n", min_size=1, max_size=40))
def test_scores_give_the_tokens_of_sentencepiece(sentencepiece_model, sentencepiece_tokenizer, text):
    expected = sentencepiece_model.encode(text)
    ids = sentencepiece_tokenizer.encode(text)
    assert ids == [sentencepiece_model.bos_id(), *expected]
    assert sentencepiece_tokenizer.decode(ids) == text


def test_the_space_before_a_text_can_be_off(sentencepiece_model, tmp_path):
    tokens = [sentencepiece_model.IdToPiece(i) for i in range(sentencepiece_model.vocab_size())]
    file = write(
        tmp_path,
        model="llama",
        tokens=tokens,
        scores=[0.0] * len(tokens),
        add_space_prefix=False,
        bos_token_id=1,
    )
    tokenizer = load_tokenizer(file)
    first = tokenizer.encode("t", add_special_tokens=False)[0]
    assert tokens[first] == "t"
    assert tokenizer.decode(tokenizer.encode(" t", add_special_tokens=False)) == " t"


def test_gemmas_runs_of_spaces_are_tokens_of_their_own(tmp_path):
    """They are written as in a text, other pieces with the mark for a space. Texts are begun with none."""
    pieces = ["<unk>", "<s>", "a", "b", "▁", "▁a", "▁b", "  ", "   "]
    types = [UNKNOWN, CONTROL, *[NORMAL] * 5, USER_DEFINED, USER_DEFINED]
    file = write(
        tmp_path,
        model="llama",
        tokens=pieces,
        scores=[0.0, 0.0, *(-float(index) for index in range(len(pieces) - 2))],
        token_type=types,
        architecture="gemma2",
        bos_token_id=1,
    )
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode("a b   b  a", add_special_tokens=False)
    assert [pieces[token_id] for token_id in ids] == ["a", "▁b", "   ", "b", "  ", "a"]
    assert tokenizer.decode(ids) == "a b   b  a"


@pytest.mark.slow
def test_gemma3_takes_texts_apart_as_its_own_tokenizer_does(gemma3_path):
    tokenizer = load_tokenizer(GGUFFile(gemma3_path))
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    for text in (
        "  two  spaces\n\n\n\tand tabs",
        "naïve 北京 😀 \u0300",
        "<start_of_turn>user\nHi<end_of_turn>",
    ):
        assert (
            tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix("<bos>") == text
        )
