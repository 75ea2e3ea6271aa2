"""all-MiniLM-L6-v2 gives the similarities that its makers publish."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import minilm
from vllm_metal.engine.mlx import embedding_loader
from vllm_metal.engine.mlx.pooling_runner import PoolingRunner

#: From the documentation of sentence-transformers and from the model's page.
PUBLISHED = [
    (
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."],
        [0.6660, 0.1046, 0.1411],
    ),
    (
        [
            "That is a happy person",
            "That is a happy dog",
            "That is a very happy person",
            "Today is a sunny day",
        ],
        [0.6946, 0.9429, 0.2569],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "similarities"), PUBLISHED)
def test_similarities_are_the_published_ones(texts: list[str], similarities: list[float], cache_dir: Path):
    loaded = embedding_loader.load(minilm.fetch(cache_dir), dtype="float32")
    assert loaded.traits.max_model_len == 256
    computed = PoolingRunner(loaded.model, loaded.head).compute(loaded.tokenizer.encode(texts, None))
    vectors = [np.frombuffer(each, np.float32) for each in computed]
    found = [float(first @ second) for first, second in combinations(vectors, 2)]
    assert found[: len(similarities)] == pytest.approx(similarities, abs=1e-3)
