"""Models that embed and compare: as NumPy computes them, whatever they are computed beside."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import tiny_embedders
from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.engine.mlx import embedding_loader
from vllm_metal.engine.mlx.embedding_loader import LoadedEmbeddingModel
from vllm_metal.engine.mlx.pooling_runner import PoolingRunner
from vllm_metal.errors import InvalidRequest, MetalError, NotAModel, UnsupportedModel

TEXTS = ["a", "some words of a text", "abcdefgh " * 5, "zz top"]


def load(folder: Path, **options: int) -> LoadedEmbeddingModel:
    return embedding_loader.load(folder, **options)


def vectors(loaded: LoadedEmbeddingModel, inputs: list[EmbeddingInput]) -> np.ndarray:
    computed = PoolingRunner(loaded.model, loaded.head).compute(inputs)
    return np.stack([np.frombuffer(each, np.float32) for each in computed])


@pytest.mark.parametrize("kind", tiny_embedders.CONFIGS)
def test_an_encoder_is_what_numpy_makes_of_its_weights(kind, tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_encoder(tmp_path / kind, kind))
    inputs = loaded.tokenizer.encode(TEXTS, None)
    assert list(inputs[0].token_ids) == [tiny_embedders.CLS, 4, tiny_embedders.SEP]
    made = tiny_embedders.weights(kind)
    for each, vector in zip(inputs, vectors(loaded, inputs), strict=True):
        wanted = tiny_embedders.hidden_states(kind, made, list(each.token_ids)).mean(0)
        assert vector == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-4)


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ("cls_token", lambda hidden: hidden[0]),
        ("lasttoken", lambda hidden: hidden[-1]),
        ("max_tokens", lambda hidden: hidden.max(0)),
        ("mean_sqrt_len_tokens", lambda hidden: hidden.sum(0) / np.sqrt(len(hidden))),
    ],
)
def test_vectors_are_pooled_as_the_folder_says(pooling, pool, tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_encoder(tmp_path / "model", pooling=pooling, normalizes=False))
    inputs = loaded.tokenizer.encode(TEXTS, None)
    made = tiny_embedders.weights("bert")
    for each, vector in zip(inputs, vectors(loaded, inputs), strict=True):
        assert vector == pytest.approx(
            pool(tiny_embedders.hidden_states("bert", made, list(each.token_ids))), abs=1e-3
        )


@pytest.mark.parametrize("kind", tiny_embedders.CONFIGS)
def test_a_cross_encoder_scores_pairs(kind, tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_encoder(tmp_path / "reranker", kind, compares=True))
    assert loaded.traits.compares
    inputs = loaded.tokenizer.encode_pairs([("query", text) for text in TEXTS], None)
    assert inputs[0].second_start == 7
    made = tiny_embedders.weights(kind) | tiny_embedders.classifier(kind)
    dense, out = {
        "bert": ("bert.pooler.dense", "classifier"),
        "distilbert": ("pre_classifier", "classifier"),
        "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
    }[kind]
    for each, [score] in zip(inputs, vectors(loaded, inputs), strict=True):
        start = each.second_start or 0
        type_ids = [0] * start + [1] * (len(each.token_ids) - start)
        first = tiny_embedders.hidden_states(kind, made, list(each.token_ids), type_ids)[0]
        inner = made[f"{dense}.weight"] @ first + made[f"{dense}.bias"]
        inner = np.maximum(inner, 0) if kind == "distilbert" else np.tanh(inner)
        [logit] = made[f"{out}.weight"] @ inner + made[f"{out}.bias"]
        assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)


def test_the_number_of_a_classifier_can_be_the_score_itself(tmp_path, on_cpu):
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    plain = load(tiny_embedders.save_encoder(tmp_path / "plain", compares=True))
    bare = load(tiny_embedders.save_encoder(tmp_path / "bare", compares=True, sentence_transformers=identity))
    inputs = plain.tokenizer.encode_pairs([("query", "text")], None)
    [[score]], [[logit]] = vectors(plain, inputs), vectors(bare, inputs)
    assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


@pytest.mark.parametrize("bare", [False, True])
def test_a_decoder_embeds_by_its_end_token(bare, tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_decoder(tmp_path / "decoder", bare=bare))
    inputs = loaded.tokenizer.encode(TEXTS, None)
    assert {each.token_ids[-1] for each in inputs} == {256}
    together = vectors(loaded, inputs)
    for each, vector in zip(inputs, together, strict=True):
        hidden = loaded.model.model(mx.array(each.token_ids)[None])
        wanted = np.array(hidden[0, -1].astype(mx.float32))
        assert vector == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-5)
        assert vectors(loaded, [each])[0] == pytest.approx(vector, abs=1e-5)


def test_a_decoder_judges_by_yes_and_no(tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_decoder(tmp_path / "tiny-reranker", head="judge"))
    inputs = loaded.tokenizer.encode_pairs([("query", text) for text in TEXTS], None)
    scores = vectors(loaded, inputs)[:, 0]
    no, yes = 259, 258
    for each, score in zip(inputs, scores, strict=True):
        logits = np.array(loaded.model(mx.array(each.token_ids)[None])[0, -1].astype(mx.float32))
        assert score == pytest.approx(1 / (1 + np.exp(logits[no] - logits[yes])), abs=1e-5)


def test_a_decoder_that_judges_by_other_words_is_refused(tmp_path, on_cpu):
    folder = tiny_embedders.save_decoder(tmp_path / "model", head="judge")
    module = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "1_LogitScore").mkdir()
    answers = folder / "1_LogitScore" / "config.json"
    answers.write_text('{"true_token_id": 258, "false_token_id": 259}')
    assert load(folder).traits.compares
    answers.write_text('{"true_token_id": 258, "false_token_id": null}')
    with pytest.raises(UnsupportedModel, match="does not judge"):
        load(folder)


def test_a_decoder_with_a_head_of_its_own_scores(tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_decoder(tmp_path / "decoder", head="score"))
    inputs = loaded.tokenizer.encode_pairs([("query", text) for text in TEXTS], None)
    for each, [score] in zip(inputs, vectors(loaded, inputs), strict=True):
        hidden = loaded.model.model(mx.array(each.token_ids)[None])[0, -1]
        assert score == pytest.approx(float(mx.sigmoid(loaded.model.score(hidden))[0]), abs=1e-5)


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 20, 70])
def test_pieces_change_nothing(decoder, max_tokens, tmp_path, on_cpu):
    folder = tmp_path / "model"
    loaded = load(tiny_embedders.save_decoder(folder) if decoder else tiny_embedders.save_encoder(folder))
    inputs = loaded.tokenizer.encode(TEXTS, None)
    runner = PoolingRunner(loaded.model, loaded.head)
    forward = runner.begin(inputs, 64)
    worth = [forward.advance(max_tokens)]
    assert forward.vectors is None
    while forward.vectors is None:
        worth.append(forward.advance(max_tokens))
    assert sum(worth) == pytest.approx(64 * len(inputs))
    pieces = np.stack([np.frombuffer(each, np.float32) for each in forward.vectors])
    assert pieces == pytest.approx(vectors(loaded, inputs), abs=1e-5)


def test_a_part_of_a_vector_is_normalized_again(tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_encoder(tmp_path / "model", matryoshka_dimensions=[8, 16, 32]))
    assert loaded.traits.shorter == (8, 16)
    [whole] = loaded.tokenizer.encode(["some text"], None)
    part = EmbeddingInput(whole.token_ids, dimensions=8)
    runner = PoolingRunner(loaded.model, loaded.head)
    full, short = (np.frombuffer(each, np.float32) for each in runner.compute([whole, part]))
    assert len(short) == 8
    assert short == pytest.approx(full[:8] / np.linalg.norm(full[:8]), abs=1e-6)
    with pytest.raises(InvalidRequest, match="cannot have 12 dimensions"):
        loaded.traits.check_dimensions(12)


def test_dense_layers_stand_behind_the_pooling(tmp_path, on_cpu):
    folder = tiny_embedders.save_encoder(tmp_path / "model", normalizes=False)
    weight = np.random.default_rng(0).normal(size=(5, tiny_embedders.SIZE)).astype(np.float32)
    (folder / "2_Dense").mkdir()
    dense = {"in_features": tiny_embedders.SIZE, "out_features": 5, "bias": False}
    dense["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    mx.save_safetensors(str(folder / "2_Dense" / "model.safetensors"), {"linear.weight": mx.array(weight)})
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    loaded = load(folder)
    assert loaded.traits.dimensions == 5
    [each] = loaded.tokenizer.encode(["text"], None)
    hidden = tiny_embedders.hidden_states("bert", tiny_embedders.weights("bert"), list(each.token_ids))
    assert vectors(loaded, [each])[0] == pytest.approx(np.tanh(weight @ hidden.mean(0)), abs=1e-4)


def test_texts_are_cut_and_keep_their_ends(tmp_path, on_cpu):
    loaded = load(tiny_embedders.save_encoder(tmp_path / "model"))
    [cut] = loaded.tokenizer.encode(["a b c d e f g"], 5)
    assert list(cut.token_ids) == [tiny_embedders.CLS, 4, 5, 6, tiny_embedders.SEP]
    [whole] = loaded.tokenizer.encode(["a b c " * 10], None)
    assert len(whole.token_ids) == 32
    assert loaded.tokenizer.cut(["a b c d", "ab"], 2) == ["a b", "ab"]


@pytest.mark.parametrize("kind", ["encoder", "judge"])
def test_of_a_pair_the_second_is_cut(kind, tmp_path, on_cpu):
    folder = tmp_path / "reranker"
    if kind == "judge":
        loaded = load(tiny_embedders.save_decoder(folder, head="judge"))
    else:
        loaded = load(tiny_embedders.save_encoder(folder, compares=True))
    [short] = loaded.tokenizer.encode_pairs([("ab", "c")], None)
    [cut] = loaded.tokenizer.encode_pairs([("ab", "c" + "d" * 30)], len(short.token_ids))
    assert cut == short
    too_few = len(short.token_ids) - 1
    for max_tokens in (too_few, 1):
        with pytest.raises(InvalidRequest, match=f"in {max_tokens} tokens: .* has {too_few}"):
            loaded.tokenizer.encode_pairs([("ab", "c")], max_tokens)


@pytest.mark.parametrize("save", [tiny_embedders.save_encoder, tiny_embedders.save_decoder])
def test_half_a_character_is_refused(save, tmp_path, on_cpu):
    loaded = load(save(tmp_path / "model"))
    with pytest.raises(InvalidRequest, match="surrogate"):
        loaded.tokenizer.encode(["\ud83d"], None)


def test_what_a_model_reads_is_what_its_makers_say(tmp_path, on_cpu):
    folder = tiny_embedders.save_encoder(tmp_path / "model", "xlm-roberta")
    assert load(folder).traits.max_model_len == 64  # positions begin at 2 of 66
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert load(folder).traits.max_model_len == 40
    assert load(folder, max_model_len=30).traits.max_model_len == 30
    for nonsense in ("0", "-5", "true", '"many"', "null"):
        (folder / "sentence_bert_config.json").write_text(f'{{"max_seq_length": {nonsense}}}')
        assert load(folder).traits.max_model_len == 64


def test_inputs_that_would_take_much_memory_need_leave(tmp_path, on_cpu):
    folder = tiny_embedders.save_decoder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    assert load(folder).traits.max_model_len == 8192
    assert load(folder, max_model_len=20_000).traits.max_model_len == 20_000


def test_prompts_come_from_the_folder(tmp_path, on_cpu):
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    traits = load(
        tiny_embedders.save_decoder(tmp_path / "model", config_sentence_transformers=prompts)
    ).traits
    assert traits.prompt(None) == traits.prompt("query") == "query: "
    assert traits.prompt("document") == ""
    with pytest.raises(InvalidRequest, match="no prompt `passage`"):
        traits.prompt("passage")


def test_prompts_that_are_no_texts_are_none(tmp_path, on_cpu):
    prompts = {"prompts": {"query": 5, "document": "d"}, "default_prompt_name": "query"}
    traits = load(
        tiny_embedders.save_decoder(tmp_path / "model", config_sentence_transformers=prompts)
    ).traits
    assert traits.prompts == {"document": "d"}
    assert traits.default_prompt == ""


def test_tokens_that_only_the_tokenizer_knows_are_none(tmp_path, on_cpu):
    folder = tiny_embedders.save_encoder(tmp_path / "model", vocab_size=20)
    saved = mx.load(str(folder / "model.safetensors"))
    saved["embeddings.word_embeddings.weight"] = saved["embeddings.word_embeddings.weight"][:20]
    mx.save_safetensors(str(folder / "model.safetensors"), saved)
    assert load(folder).tokenizer.vocab_size == 20


def test_a_vector_of_a_token_without_numbers_is_none(tmp_path, on_cpu):
    folder = tiny_embedders.save_encoder(tmp_path / "model")
    saved = mx.load(str(folder / "model.safetensors"))
    saved["embeddings.word_embeddings.weight"][5] = float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), saved)
    loaded = load(folder)
    computed = PoolingRunner(loaded.model, loaded.head).compute(loaded.tokenizer.encode(["a", "b"], None))
    assert computed[0] is not None
    assert computed[1] is None


def test_a_quantized_encoder_is_close_to_the_whole_one(tmp_path, on_cpu):
    whole = load(tiny_embedders.save_encoder(tmp_path / "whole"))
    folder = tiny_embedders.save_encoder(tmp_path / "quantized", quantization={"group_size": 32, "bits": 8})
    saved = mx.load(str(folder / "model.safetensors"))
    name = "encoder.layer.0.attention.self.query"
    quantized = mx.quantize(saved.pop(f"{name}.weight"), group_size=32, bits=8)
    saved |= dict(zip((f"{name}.{each}" for each in ("weight", "scales", "biases")), quantized, strict=True))
    mx.save_safetensors(str(folder / "model.safetensors"), saved)
    inputs = whole.tokenizer.encode(TEXTS, None)
    loaded = load(folder)
    assert loaded.number_format == "8-bit"
    assert vectors(loaded, inputs) == pytest.approx(vectors(whole, inputs), abs=0.05)


def test_a_folder_that_does_not_say_how_to_pool_says_so(tmp_path, caplog, on_cpu):
    load(tiny_embedders.save_encoder(tmp_path / "model", pooling=None))
    assert "does not say how its vectors are made" in caplog.text


def _spoil_weights(folder: Path) -> None:
    saved = mx.load(str(folder / "model.safetensors"))
    del saved["encoder.layer.1.output.dense.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), saved)


def _spoil_numbers(folder: Path) -> None:
    saved = mx.load(str(folder / "model.safetensors"))
    saved["encoder.layer.1.output.dense.weight"] *= float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), saved)


def _change(name: str, **values: object):
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (_spoil_weights, UnsupportedModel, "output"),
        (_change("config.json", position_embedding_type="relative_key"), UnsupportedModel, "relative"),
        (_change("config.json", hidden_act="mystery"), UnsupportedModel, "mystery"),
        (_change("config.json", model_type="nomic_bert"), UnsupportedModel, "nomic_bert"),
        (
            _change("1_Pooling/config.json", pooling_mode_weightedmean_tokens=True),
            UnsupportedModel,
            "pooling",
        ),
        (_change("1_Pooling/config.json", include_prompt=False), UnsupportedModel, "prompts"),
        (_spoil_numbers, NotAModel, "`layers.1.output.weight` has what is not a number (NaN)"),
        (_change("config.json", matryoshka_dimensions=8), UnsupportedModel, "iterable"),
        (_change("config.json", matryoshka_dimensions=["8"]), UnsupportedModel, "str"),
        (lambda folder: (folder / "modules.json").write_text('[{"type"'), NotAModel, "modules.json"),
        (
            lambda folder: (folder / "config_sentence_transformers.json").write_text('{"prompts": ["a"]}'),
            UnsupportedModel,
            "items",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{}"), NotAModel, "damaged"),
        (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), MetalError, "1_Pooling"),
        (
            lambda folder: (folder / "modules.json").write_text(
                '[{"type": "x.Pooling"}, {"type": "x.Asym"}]'
            ),
            UnsupportedModel,
            "",
        ),
    ],
)
def test_what_cannot_be_run_says_why(spoil, error, words, tmp_path, on_cpu):
    folder = tiny_embedders.save_encoder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(error) as caught:
        load(folder)
    assert words in caught.value.message
