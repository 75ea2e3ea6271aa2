"""Loads a model that embeds or compares from a folder, as sentence-transformers lay it out, on its thread."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as BackendTokenizer

from vllm_metal.engine.embedding_request import EmbeddingInput
from vllm_metal.engine.embedding_traits import EmbeddingTraits
from vllm_metal.engine.mlx import bert, loader, pooling, precision, safetensors, soundness
from vllm_metal.engine.mlx.embedding_tokenizer import EmbeddingTokenizer, EncoderPairs, Pairs
from vllm_metal.engine.mlx.open_files import kept_open_files_limit
from vllm_metal.engine.mlx.pooling_runner import PoolingRunner
from vllm_metal.engine.mlx.reranker import JudgePairs, YesNoHead
from vllm_metal.errors import NotAModel, UnsupportedModel
from vllm_metal.hub import store
from vllm_metal.hub.model_config import quantization_name
from vllm_metal.hub.model_kind import ModelKind, model_kind, modules
from vllm_metal.hub.served_length import embedding_length, served_length

with kept_open_files_limit():
    import mlx_lm.utils as mlx_lm_utils

logger = logging.getLogger(__name__)

Weights = dict[str, mx.array]

_ACTIVATIONS: dict[str, pooling.Activation] = {
    "Identity": lambda values: values,
    "Tanh": mx.tanh,
    "Sigmoid": mx.sigmoid,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
}
#: By their names in older configs, in the order in which they stand side by side.
_POOLS: dict[str, tuple[str, pooling.Pool]] = {
    "pooling_mode_cls_token": ("cls", pooling.first),
    "pooling_mode_max_tokens": ("max", pooling.greatest),
    "pooling_mode_mean_tokens": ("mean", pooling.mean),
    "pooling_mode_mean_sqrt_len_tokens": ("mean_sqrt_len_tokens", pooling.mean_by_root),
    "pooling_mode_lasttoken": ("lasttoken", pooling.last),
}
#: Vectors that were trained to hold most in their first numbers, however their config keeps silent of it.
_QWEN3_SHORTEST = 32


@dataclass(frozen=True, slots=True)
class LoadedEmbeddingModel:
    """Its arrays belong to the thread that loaded it."""

    model: nn.Module
    head: pooling.Head
    tokenizer: EmbeddingTokenizer
    traits: EmbeddingTraits
    number_format: str
    weight_bytes: int


def load(path: Path, *, dtype: str = "auto", max_model_len: int = 0) -> LoadedEmbeddingModel:
    """The model at `path`; `max_model_len` 0 means as much as it reads, within reason.

    Raises NotAModel where files are missing or damaged, UnsupportedModel for what this version cannot run.
    """
    store.inspect(path)
    config = store.read_json(path / "config.json")
    safetensors.check_files(path)
    backend = loader.load_tokenizer(path).backend
    model_dtype = None if dtype == "auto" else precision.DTYPES[dtype]
    loaded: LoadedEmbeddingModel = loader.fenced(
        path, _load, path, config, backend, model_dtype, max_model_len
    )
    return loaded


def _load(
    path: Path, config: dict[str, Any], backend: BackendTokenizer, dtype: mx.Dtype | None, max_model_len: int
) -> LoadedEmbeddingModel:
    compares = model_kind(path) is ModelKind.SCORE
    most = embedding_length(path, config)
    if most < 1:
        raise UnsupportedModel(f"`{path / 'config.json'}` leaves no positions for texts")
    model, head = _model_and_head(path, config, backend, compares, dtype)
    [vector] = PoolingRunner(model, head).compute([EmbeddingInput([0, 0])])
    if vector is None:
        raise soundness.not_a_number(path, model)
    dimensions = len(vector) // 4
    pairs: Pairs | None = None
    if compares:
        pairs = JudgePairs(backend) if isinstance(head, YesNoHead) else EncoderPairs(backend)
    traits = EmbeddingTraits(
        max_model_len=min(most, max_model_len or served_length(path, config)),
        compares=compares,
        dimensions=dimensions,
        shorter=() if compares else _shorter(config, dimensions),
        **_prompts(path),
    )
    return LoadedEmbeddingModel(
        model,
        head,
        EmbeddingTokenizer(backend, pairs, traits.max_model_len, _num_embeddings(model)),
        traits,
        quantization_name(config) or precision.compute_dtype(model),
        sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    )


def _model_and_head(
    path: Path, config: dict[str, Any], backend: BackendTokenizer, compares: bool, dtype: mx.Dtype | None
) -> tuple[nn.Module, pooling.Head]:
    is_encoder = config.get("model_type") in bert.MODEL_TYPES
    model, head_weights = _encoder(path, config) if is_encoder else (_decoder(path, config, compares), {})
    precision.set_precision(model, dtype)
    head: pooling.Head
    if not compares:
        head = _vector_head(path, is_encoder)
    elif is_encoder:
        head = _classifier_head(config, head_weights)
    elif "score" in model:
        head = _score_head(config, model)
    else:
        _check_answers(path, backend)
        head = YesNoHead(model, backend)
    return model, head


def _num_embeddings(model: Any) -> int:
    """Of how many tokens it knows: some tokenizers have more."""
    table = model.word_embeddings if isinstance(model, bert.Bert) else model.model.embed_tokens
    return int(table.weight.shape[0])


def _encoder(path: Path, config: dict[str, Any]) -> tuple[nn.Module, Weights]:
    """The encoder, and what of the weights is not its own."""
    weights: Weights = {}
    for file in sorted(path.glob(store.WEIGHTS)):
        weights |= _read_weights(file)
    own, others = bert.rename(weights)
    model = bert.Bert(bert.BertConfig.of(config))
    if quantization := config.get("quantization"):
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=lambda name, module: f"{name}.scales" in own,
        )
    model.eval()
    model.load_weights(list(own.items()))
    return model, others


def _read_weights(file: Path) -> Weights:
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    return weights


def _decoder(path: Path, config: dict[str, Any], compares: bool) -> nn.Module:
    loader.check_architecture(config)
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise UnsupportedModel("decoders whose tokens see those behind them are not supported")
    has_score = _architecture(config).endswith("ForSequenceClassification")
    # Files of a model that only embeds lack the vocabulary projection, which nothing here would use.
    unused_head = {} if compares and not has_score else {"tie_word_embeddings": True}
    model, _ = mlx_lm_utils.load_model(
        path, lazy=True, model_config=unused_head, get_model_classes=partial(_classes, has_score=has_score)
    )
    if not isinstance(getattr(model, "model", None), nn.Module):
        raise UnsupportedModel(f"model architecture `{config['model_type']}` cannot embed texts")
    return model


def _classes(config: dict[str, Any], *, has_score: bool) -> tuple[type[nn.Module], type]:
    """mlx-lm's, for weights that name their parts as a model without a head does, or have another head."""
    model_type = config["model_type"]
    module = importlib.import_module(
        f"mlx_lm.models.{mlx_lm_utils.MODEL_REMAPPING.get(model_type, model_type)}"
    )

    class Decoder(module.Model):  # type: ignore[name-defined]
        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            if has_score:
                self.score = nn.Linear(arguments.hidden_size, 1, bias=False)

        def sanitize(self, weights: Weights) -> Weights:
            heads = ("model.", "lm_head.", "score.")
            named = {
                name if name.startswith(heads) else f"model.{name}": array for name, array in weights.items()
            }
            return super().sanitize(named) if hasattr(module.Model, "sanitize") else named

    return Decoder, module.ModelArgs


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _vector_head(path: Path, is_encoder: bool) -> pooling.VectorHead:
    pools: list[pooling.Pool] = []
    dense: list[tuple[nn.Linear, pooling.Activation]] = []
    parts = modules(path)
    if not parts and (path / "modules.json").exists():
        raise NotAModel(f"`{path / 'modules.json'}` lists no modules", hint=store.FETCH_AGAIN)
    for part, folder in parts:
        match part:
            case "Pooling":
                pools = _pools(folder)
            case "Dense":
                dense.append(_dense(folder))
            case "Transformer" | "Normalize" | "Dropout":
                pass
            case _:
                raise UnsupportedModel(f"`{path / 'modules.json'}` wants `{part}`, which is not supported")
    if not pools:
        pools = [pooling.mean if is_encoder else pooling.last]
        logger.warning(
            "`%s` does not say how its vectors are made: %s, normalized",
            path.name,
            "the mean of its tokens" if is_encoder else "its last token",
        )
    normalizes = not parts or any(part == "Normalize" for part, _ in parts)
    return pooling.VectorHead(pools, dense, normalizes)


def _pools(folder: Path) -> list[pooling.Pool]:
    config = store.read_json(folder / "config.json")
    if config.get("include_prompt") is False:
        raise UnsupportedModel("models that leave prompts out of their vectors are not supported")
    named = config.get("pooling_mode", ())
    named = [named] if isinstance(named, str) else named
    pools = [pool for key, (name, pool) in _POOLS.items() if config.get(key) or name in named]
    wanted = len(named) or sum(config[key] is True for key in config if key.startswith("pooling_mode_"))
    if not pools or len(pools) < wanted:
        raise UnsupportedModel(f"`{folder / 'config.json'}` wants a pooling that is not supported")
    return pools


def _dense(folder: Path) -> tuple[nn.Linear, pooling.Activation]:
    config = store.read_json(folder / "config.json")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise NotAModel(f"`{folder}` lacks `model.safetensors`", hint=store.FETCH_AGAIN)
    weights = _read_weights(file)
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    layer.load_weights([(name.removeprefix("linear."), array) for name, array in weights.items()])
    return layer, _activation(config.get("activation_function", "Tanh"))


def _activation(name: str) -> pooling.Activation:
    """By the name of torch's class for it."""
    short = name.rpartition(".")[2]
    if short not in _ACTIVATIONS:
        raise UnsupportedModel(f"the activation `{name}` is not supported")
    return _ACTIVATIONS[short]


def _classifier_head(config: dict[str, Any], weights: Weights) -> pooling.ClassifierHead:
    for dense_name, out_name, activation in _CLASSIFIERS:
        if f"{dense_name}.weight" in weights:
            dense, out = _linear(weights, dense_name), _linear(weights, out_name)
            _check_labels(out.weight.shape[0])
            return pooling.ClassifierHead(pooling.first, dense, activation, out, _final(config))
    raise UnsupportedModel("the model has no classifier of a kind that is known")


#: The layers of a classifier, and what is between: RoBERTa's, DistilBERT's and BERT's.
_CLASSIFIERS: tuple[tuple[str, str, pooling.Activation], ...] = (
    ("classifier.dense", "classifier.out_proj", mx.tanh),
    ("pre_classifier", "classifier", nn.relu),
    ("pooler.dense", "classifier", mx.tanh),
)


def _score_head(config: dict[str, Any], model: Any) -> pooling.ClassifierHead:
    _check_labels(model.score.weight.shape[0])
    return pooling.ClassifierHead(pooling.last, None, mx.tanh, model.score, _final(config))


def _check_answers(path: Path, backend: BackendTokenizer) -> None:
    """Raises UnsupportedModel where other words than yes and no are told apart: the prompt is another too."""
    for part, folder in modules(path):
        if part == "LogitScore":
            config = store.read_json(folder / "config.json")
            told_apart = [config.get("false_token_id"), config.get("true_token_id")]
            if told_apart != [backend.token_to_id("no"), backend.token_to_id("yes")]:
                raise UnsupportedModel(
                    "the model does not judge by `yes` and `no`, and its prompt is not known"
                )


def _linear(weights: Weights, name: str) -> nn.Linear:
    weight = weights[f"{name}.weight"]
    layer = nn.Linear(*reversed(weight.shape))
    layer.load_weights([("weight", weight), ("bias", weights[f"{name}.bias"])])
    return layer


def _check_labels(num_labels: int) -> None:
    if num_labels != 1:
        raise UnsupportedModel(
            f"the model tells {num_labels} classes of texts apart, which is not supported",
            hint="rerankers have one class",
        )


def _final(config: dict[str, Any]) -> pooling.Activation:
    """What makes a score of the classifier's number."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    return _activation(named or config.get("sbert_ce_default_activation_function") or "Sigmoid")


def _shorter(config: dict[str, Any], dimensions: int) -> tuple[int, ...] | range:
    if listed := config.get("matryoshka_dimensions"):
        return tuple(each for each in listed if each < dimensions)
    if config.get("is_matryoshka"):
        return range(1, dimensions)
    return range(_QWEN3_SHORTEST, dimensions) if config.get("model_type") == "qwen3" else ()


def _prompts(path: Path) -> dict[str, Any]:
    config = _optional(path / "config_sentence_transformers.json")
    prompts = {
        name: prompt for name, prompt in (config.get("prompts") or {}).items() if isinstance(prompt, str)
    }
    return {"prompts": prompts, "default_prompt": prompts.get(config.get("default_prompt_name"), "")}


def _optional(path: Path) -> dict[str, Any]:
    return store.read_json(path) if path.exists() else {}
