"""lm-eval, on tasks made here: its scores are those of the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from client_guide import snippet
from client_process import run

from vllm_metal.engine.mlx import loader
from vllm_metal.engine.mlx.loader import LoadedModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
CAPITALS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "a banana split"], "answer": 0},
    {"question": "The capital of Italy is", "choices": ["Paris", "Rome", "in Oslo"], "answer": 1},
]
STORIES = [{"text": "Once upon a time there was a naïve 猫 that could not count to three: 1, 2, 4."}]
TASKS = {
    "capitals": (
        CAPITALS,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
    ),
    "stories": (
        STORIES,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    ),
    "sentences": (
        CAPITALS,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
}


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return loader.load(smollm2_path, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where lm-eval finds the tasks."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, (documents, task) in TASKS.items():
        data = tasks / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML too.
        (tasks / f"{name}.yaml").write_text(
            json.dumps({"task": name, "test_split": "test", **source, **task})
        )
    return tmp_path


@pytest.fixture
def evaluate(python_of, server, folder, hub_cache):
    def evaluate(command: str) -> dict[str, list[Any]]:
        """From the name of a task to the model's replies to each document."""
        bin_folder = python_of("lm-eval").parent
        run(["bash", "-c", command], cwd=folder, bin_folder=bin_folder, HF_HOME=str(hub_cache))
        samples = {}
        for file in folder.glob("results/smollm2/samples_*.jsonl"):
            lines = map(json.loads, file.read_text().splitlines())
            in_order = sorted(lines, key=lambda sample: sample["doc_id"])
            samples[file.name.split("_")[1]] = [sample["resps"] for sample in in_order]
        return samples

    return evaluate


def score(model: LoadedModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log probability of a continuation, and whether each of its tokens is the likeliest."""
    tokens = mx.array([context + continuation])
    logits = model.model(tokens)[0, len(context) - 1 : -1].astype(mx.float32)
    expected = mx.array(continuation)
    logprobs = mx.take_along_axis(nn.log_softmax(logits), expected[:, None], axis=-1)
    return mx.sum(logprobs).item(), mx.all(mx.argmax(logits, axis=-1) == expected).item()


def check_capitals(model: LoadedModel, replies: list[Any]) -> None:
    encode = model.tokenizer.encode
    for document, reply in zip(CAPITALS, replies, strict=True):
        context = encode(document["question"])
        for choice, [[logprob, is_greedy]] in zip(document["choices"], reply, strict=True):
            whole = encode(f"{document['question']} {choice}")
            expected, greedy = score(model, context, whole[len(context) :])
            assert float(logprob) == pytest.approx(expected, abs=TOLERANCE)
            assert is_greedy == str(greedy)


def test_the_guides_command(evaluate, server, model):
    samples = evaluate(snippet("lm-eval", "sh", server.url))
    check_capitals(model, samples["capitals"])


def test_all_kinds_of_requests_with_prompts_as_text(evaluate, server, model):
    command = snippet("lm-eval", "sh", server.url)
    for given, changed in (
        ("--tasks capitals", f"--tasks {','.join(TASKS)}"),
        ("--batch_size 4", "--batch_size 1"),
        ("135M-Instruct", "135M-Instruct,tokenized_requests=False"),
    ):
        assert given in command
        command = command.replace(given, changed)
    samples = evaluate(command)
    check_capitals(model, samples["capitals"])
    [[[rolled]]] = samples["stories"]
    begin = model.tokenizer.encode("<|im_start|>")
    expected, _ = score(model, begin, model.tokenizer.encode(STORIES[0]["text"]))
    assert float(rolled) == pytest.approx(expected, abs=TOLERANCE)
    assert "Paris" in samples["sentences"][0][0][0]
