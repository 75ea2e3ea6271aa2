"""What loading a model does to the process that serves it."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import transformers

import tiny_folder
from vllm_metal.config import Config
from vllm_metal.server.model_loader import MLXLoader


def test_garbage_collections_pass_over_what_was_imported(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "tiny")
    gc.unfreeze()

    async def load() -> None:
        engine = MLXLoader().engine("tiny", folder, Config(), 1 << 28)
        await engine.start()
        await engine.stop()

    asyncio.run(load())
    assert not any(each is transformers for each in gc.get_objects())
