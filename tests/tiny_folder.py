"""A whole model folder: a tiny random model with a tokenizer of one token a byte."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

import tiny_models

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=CHAT_TEMPLATE)


def save(folder: Path, *, model_seed: int = 0, **generation_config: object) -> Path:
    """`generation_config` is what `generation_config.json` says."""
    folder.mkdir()
    model = tiny_models.make("llama", seed=model_seed)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.args)))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    tokenizer().save_pretrained(folder)
    return folder
