"""Folders of tiny random models that embed or compare, and what NumPy makes of their weights."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import WordPiece
from transformers import PreTrainedTokenizerFast

import tiny_folder
import tiny_models

Array = NDArray[np.float32]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CLS, SEP = 2, 3
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
VOCAB_SIZE = len(SPECIAL) + len(WORDS)
SIZE, HEADS, LAYERS, INNER = 32, 4, 3, 48

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": 0,
    },
    "distilbert": {
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        "dim": SIZE,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dim": INNER,
        "activation": "gelu",
        "max_position_embeddings": 64,
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": 0,
    },
}
CONFIGS["xlm-roberta"] = CONFIGS["bert"] | {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "max_position_embeddings": 66,
}

#: Where each kind keeps what, and the index of a text's first position.
_NAMES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "bert": (
        "",
        "encoder.layer",
        {
            "q": "attention.self.query",
            "k": "attention.self.key",
            "v": "attention.self.value",
            "o": "attention.output.dense",
            "norm": "attention.output.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "last_norm": "output.LayerNorm",
        },
        0,
    ),
    "distilbert": (
        "distilbert.",
        "transformer.layer",
        {
            "q": "attention.q_lin",
            "k": "attention.k_lin",
            "v": "attention.v_lin",
            "o": "attention.out_lin",
            "norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "last_norm": "output_layer_norm",
        },
        0,
    ),
}
_NAMES["xlm-roberta"] = ("roberta.", *_NAMES["bert"][1:3], 2)


def weights(kind: str, seed: int = 0) -> dict[str, Array]:
    """By the names under which such models are published."""
    random = np.random.default_rng(seed)
    prefix, layers, names, _ = _NAMES[kind]
    config = CONFIGS[kind]
    made: dict[str, Array] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        made[f"{name}.weight"] = random.normal(0, 0.3, (outputs, inputs)).astype(np.float32)
        made[f"{name}.bias"] = random.normal(0, 0.3, outputs).astype(np.float32)

    def norm(name: str) -> None:
        made[f"{name}.weight"] = random.normal(1, 0.2, SIZE).astype(np.float32)
        made[f"{name}.bias"] = random.normal(0, 0.2, SIZE).astype(np.float32)

    tables = {"word": VOCAB_SIZE, "position": config["max_position_embeddings"]}
    if kind != "distilbert":
        tables["token_type"] = config["type_vocab_size"]
    for name, count in tables.items():
        made[f"{prefix}embeddings.{name}_embeddings.weight"] = random.normal(0, 1, (count, SIZE)).astype(
            np.float32
        )
    norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(LAYERS):
        base = f"{prefix}{layers}.{layer}"
        for part in "qkvo":
            linear(f"{base}.{names[part]}", SIZE, SIZE)
        linear(f"{base}.{names['up']}", SIZE, INNER)
        linear(f"{base}.{names['down']}", INNER, SIZE)
        norm(f"{base}.{names['norm']}")
        norm(f"{base}.{names['last_norm']}")
    # Buffers that some files hold.
    made[f"{prefix}embeddings.position_ids"] = np.arange(64, dtype=np.float32)[None]
    return made


def classifier(kind: str) -> dict[str, Array]:
    """The layers that make a score, by their published names."""
    random = np.random.default_rng(1)
    dense, out = {
        "bert": ("bert.pooler.dense", "classifier"),
        "distilbert": ("pre_classifier", "classifier"),
        "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
    }[kind]
    return {
        f"{dense}.weight": random.normal(0, 0.3, (SIZE, SIZE)).astype(np.float32),
        f"{dense}.bias": random.normal(0, 0.3, SIZE).astype(np.float32),
        f"{out}.weight": random.normal(0, 0.3, (1, SIZE)).astype(np.float32),
        f"{out}.bias": random.normal(0, 0.3, 1).astype(np.float32),
    }


def hidden_states(
    kind: str, made: dict[str, Array], token_ids: list[int], type_ids: list[int] | None = None
) -> Array:
    """What the model makes of one text: [tokens, size]."""
    prefix, layers, names, first_position = _NAMES[kind]
    embeddings = f"{prefix}embeddings"

    def linear(name: str, values: Array) -> Array:
        return values @ made[f"{name}.weight"].T + made[f"{name}.bias"]

    def norm(name: str, values: Array) -> Array:
        centred = values - values.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * made[f"{name}.weight"] + made[f"{name}.bias"]

    def heads(values: Array) -> Array:
        return values.reshape(len(values), HEADS, -1).transpose(1, 0, 2)

    positions = np.arange(first_position, first_position + len(token_ids))
    hidden = made[f"{embeddings}.word_embeddings.weight"][token_ids]
    hidden = hidden + made[f"{embeddings}.position_embeddings.weight"][positions]
    if kind != "distilbert":
        types = np.array(type_ids or [0] * len(token_ids))
        table = made[f"{embeddings}.token_type_embeddings.weight"]
        hidden = hidden + table[np.minimum(types, len(table) - 1)]
    hidden = norm(f"{embeddings}.LayerNorm", hidden)
    for layer in range(LAYERS):
        part = {key: f"{prefix}{layers}.{layer}.{name}" for key, name in names.items()}
        query, key, value = (heads(linear(part[each], hidden)) for each in "qkv")
        logits = query @ key.transpose(0, 2, 1) / np.sqrt(SIZE // HEADS)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        attended = (weight @ value).transpose(1, 0, 2).reshape(len(hidden), SIZE)
        hidden = norm(part["norm"], hidden + linear(part["o"], attended))
        inner = linear(part["up"], hidden)
        gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / np.sqrt(2)))
        hidden = norm(part["last_norm"], hidden + linear(part["down"], gelu))
    return hidden.astype(np.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    """Letters, as BERT spells them."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    backend = BackendTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    # As published files have it, which is not for us to follow.
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def save_encoder(
    folder: Path,
    kind: str = "bert",
    *,
    pooling: str | None = "mean_tokens",
    normalizes: bool = True,
    compares: bool = False,
    **config: Any,
) -> Path:
    """A model folder as sentence-transformers writes it; `pooling` None for one that says nothing of it."""
    folder.mkdir(parents=True)
    made = weights(kind)
    config = CONFIGS[kind] | config
    if compares:
        made |= classifier(kind)
        config["architectures"] = ["SomeForSequenceClassification"]
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: mx.array(each) for name, each in made.items()}
    )
    _write(folder / "config.json", config)
    tokenizer().save_pretrained(folder)
    if pooling is not None and not compares:
        _save_modules(folder, {f"pooling_mode_{pooling}": True}, normalizes)
    return folder


def save_decoder(
    folder: Path, *, head: str = "embed", model_type: str = "qwen3", bare: bool = False, **files: Any
) -> Path:
    """One of tokens that are bytes, each text ending with its end token. `head` is "embed", "judge" or
    "score"; `bare` names the weights as a model without a head does.
    """
    folder.mkdir(parents=True)
    model = tiny_models.make(model_type)
    made = dict(tree_flatten(model.parameters()))
    architecture = {"embed": "Model", "judge": "ForCausalLM", "score": "ForSequenceClassification"}[head]
    if bare:
        made = {name.removeprefix("model."): array for name, array in made.items()}
    if head == "score":
        made["score.weight"] = mx.random.normal((1, 32))
    mx.save_safetensors(str(folder / "model.safetensors"), made)
    _write(
        folder / "config.json", dataclasses.asdict(model.args) | {"architectures": [f"Tiny{architecture}"]}
    )
    saved = tiny_folder.tokenizer()
    backend = saved.backend_tokenizer
    if head == "judge":
        backend.add_tokens([AddedToken(" yes"), AddedToken("yes"), AddedToken("no")])
    else:
        end = backend.token_to_id("</s>")
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
        )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    if head == "embed":
        _save_modules(folder, {"pooling_mode_lasttoken": True}, normalizes=True)
    for name, content in files.items():
        _write(folder / f"{name}.json", content)
    return folder


def _save_modules(folder: Path, pooling: dict[str, Any], normalizes: bool) -> None:
    parts = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{part}" if index else "",
            "type": f"sentence_transformers.models.{part}",
        }
        for index, part in enumerate(parts)
    ]
    _write(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": SIZE, **pooling})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
