"""Encoders of BERT's kind as one MLX module: BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.errors import UnsupportedModel
from vllm_metal.hub.served_length import first_position

MODEL_TYPES = {"bert", "camembert", "distilbert", "roberta", "xlm-roberta"}

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_positions: int
    num_types: int
    first_position: int
    activation: str
    norm_eps: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> BertConfig:
        """Raises UnsupportedModel, and KeyError for what a config lacks."""
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise UnsupportedModel("encoders with relative positions are not supported")
        activation = config.get("activation") or config.get("hidden_act", "gelu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModel(f"the activation `{activation}` is not supported")
        is_distilled = config["model_type"] == "distilbert"
        # DistilBERT has other names for the same.
        name = {
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        }
        value = {key: config[other if is_distilled else key] for key, other in name.items()}
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=value["hidden_size"],
            num_layers=value["num_hidden_layers"],
            num_heads=value["num_attention_heads"],
            intermediate_size=value["intermediate_size"],
            num_positions=config["max_position_embeddings"],
            num_types=0 if is_distilled else config.get("type_vocab_size", 2),
            first_position=first_position(config),
            activation=activation,
            norm_eps=config.get("layer_norm_eps", 1e-12),
        )


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.activation = _ACTIVATIONS[config.activation]
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.attention_output = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, eps=config.norm_eps)
        self.intermediate = nn.Linear(size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, size)
        self.output_norm = nn.LayerNorm(size, eps=config.norm_eps)

    def __call__(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        """`hidden` [batch, tokens, size]; `mask` [batch, 1, 1, tokens], false where there is padding."""
        attended = self.attention_output(self._attend(hidden, mask))
        hidden = self.attention_norm(hidden + attended)
        result: mx.array = self.output_norm(hidden + self.output(self.activation(self.intermediate(hidden))))
        return result

    def _attend(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        batch, num_tokens, size = hidden.shape

        def heads(projected: mx.array) -> mx.array:
            return projected.reshape(batch, num_tokens, self.num_heads, -1).transpose(0, 2, 1, 3)

        attended = mx.fast.scaled_dot_product_attention(
            heads(self.query(hidden)),
            heads(self.key(hidden)),
            heads(self.value(hidden)),
            scale=(size // self.num_heads) ** -0.5,
            mask=mask,
        )
        return attended.transpose(0, 2, 1, 3).reshape(batch, num_tokens, size)


class Bert(nn.Module):
    """The layers are called one by one by whoever runs it, so that others get the device in between."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.first_position = config.first_position
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.num_positions, config.hidden_size)
        if config.num_types:
            self.token_type_embeddings = nn.Embedding(config.num_types, config.hidden_size)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.layers = [BertLayer(config) for _ in range(config.num_layers)]

    def embed(self, token_ids: mx.array, type_ids: mx.array) -> mx.array:
        """Both [batch, tokens]; gives [batch, tokens, size]."""
        positions = mx.arange(self.first_position, self.first_position + token_ids.shape[1])
        hidden = self.word_embeddings(token_ids) + self.position_embeddings(positions)
        if "token_type_embeddings" in self:
            # Some know of one type only, whatever the tokens say.
            last_type = self.token_type_embeddings.weight.shape[0] - 1
            hidden = hidden + self.token_type_embeddings(mx.minimum(type_ids, last_type))
        result: mx.array = self.embedding_norm(hidden)
        return result


#: Our names by the published ones, BERT's and DistilBERT's.
_NAMES = {
    "embeddings.word_embeddings": "word_embeddings",
    "embeddings.position_embeddings": "position_embeddings",
    "embeddings.token_type_embeddings": "token_type_embeddings",
    "embeddings.LayerNorm": "embedding_norm",
}
_NAMES_IN_LAYERS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attention_output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
    "attention.q_lin": "query",
    "attention.k_lin": "key",
    "attention.v_lin": "value",
    "attention.out_lin": "attention_output",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "intermediate",
    "ffn.lin2": "output",
    "output_layer_norm": "output_norm",
}
_PREFIX = re.compile(r"^(bert|roberta|distilbert)\.")
_LAYER = re.compile(r"^(?:encoder|transformer)\.layer\.(\d+)\.(.+)$")
#: As old files call the weights of a norm.
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def rename(weights: Mapping[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Published weights as those of `Bert`, and all that belongs to something else, like a head."""
    own: dict[str, mx.array] = {}
    others: dict[str, mx.array] = {}
    for published, array in weights.items():
        path, _, last = _PREFIX.sub("", published).rpartition(".")
        name = _NAMES.get(path)
        if in_layer := _LAYER.match(path):
            part = _NAMES_IN_LAYERS.get(in_layer[2])
            name = f"layers.{in_layer[1]}.{part}" if part else None
        if name is None:
            others[_PREFIX.sub("", published)] = array
        else:
            own[f"{name}.{_OLD_NAMES.get(last, last)}"] = array
    return own, others
