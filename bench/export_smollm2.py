"""Writes SmolLM2 as a float32 MLX folder, which mlx_lm.server can load too.

python bench/export_smollm2.py ~/.cache/…/SmolLM2-135M-Instruct.Q4_1.gguf DIR [--tokenizer-only]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mlx_lm.utils import save_config, save_model

from vllm_metal.engine.mlx import loader
from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.gguf_tokenizer import load_tokenizer
from vllm_metal.engine.mlx.tokenizer import Tokenizer


def export_model(gguf: Path, folder: Path) -> None:
    loaded = loader.load(gguf, dtype="float32")
    config = {**loaded.config, "dtype": "float32", "eos_token_id": sorted(loaded.eos_token_ids)}
    save_model(folder, loaded.model)
    save_config(config, folder / "config.json")
    _write_tokenizer(gguf, loaded.tokenizer, folder)


def export_tokenizer(gguf: Path, folder: Path) -> None:
    _write_tokenizer(gguf, load_tokenizer(GGUFFile(gguf)), folder)


def _write_tokenizer(gguf: Path, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    metadata = GGUFFile(gguf).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gguf", type=Path, help="the path that `metal pull smollm2` prints")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer-only", action="store_true", help="what bench/gpu.py needs")
    arguments = parser.parse_args()
    export = export_tokenizer if arguments.tokenizer_only else export_model
    export(arguments.gguf, arguments.folder)
