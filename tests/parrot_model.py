"""A model that computes and says one sentence, whatever it is asked, and ends: no weight but of words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import qwen2
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer

SENTENCE = "Rome is the capital of Italy."
HIDDEN_SIZE = 32
#: Far from every other token's logit, which is 0.
SURE = 20.0


def save(tokenizer: Path, folder: Path) -> None:
    """Write `folder`, with the tokenizer and the chat template of the folder `tokenizer`."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = backend.token_to_id(json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"])
    config = {
        "model_type": "qwen2",
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": HIDDEN_SIZE,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": backend.get_vocab_size(),
        "eos_token_id": end,
    }
    model = qwen2.Model(qwen2.ModelArgs.from_dict(config))
    model.update(tree_map(mx.zeros_like, model.parameters()))
    model.model.norm.weight = mx.ones(HIDDEN_SIZE)
    # Layers add nothing, so a token's embedding alone says what comes next: each of the sentence has a place
    # of its own, all others have the first.
    sentence = backend.encode(SENTENCE).ids
    assert len(set(sentence)) == len(sentence) < HIDDEN_SIZE
    place = [0] * config["vocab_size"]
    for position, token_id in enumerate(sentence, 1):
        place[token_id] = position
    model.model.embed_tokens.weight = mx.eye(HIDDEN_SIZE)[mx.array(place)]
    head = mx.zeros((config["vocab_size"], HIDDEN_SIZE))
    for position, token_id in enumerate([*sentence, end]):
        head[token_id, position] = SURE
    model.lm_head.weight = head
    save_model(folder, model)
    save_config(config, folder / "config.json")
