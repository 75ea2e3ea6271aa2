"""How much sooner the second turn of an agent's conversation is answered than the first.

python bench/agent_turns.py --model FOLDER [--words 10000] [--save-result PATH]
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import provenance
from servers import OURS, Server

from vllm_metal.bench.words import WORDS
from vllm_metal.client import Client

_ANSWER_TOKENS = 32
_QUESTION_WORDS = 40


def text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(WORDS, k=num_words))


def turn(client: Client, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Ask, and put the answer behind `messages`."""
    cached_before = cached_tokens(client)
    answer, first_s, prompt_tokens = "", None, 0
    began_s = perf_counter()
    for delta in client.chat(messages, max_tokens=_ANSWER_TOKENS, temperature=0):
        if first_s is None and (delta.text or delta.reasoning):
            first_s = perf_counter() - began_s
        answer += delta.text
        prompt_tokens = delta.usage.prompt_tokens if delta.usage else prompt_tokens
    messages.append({"role": "assistant", "content": answer})
    assert first_s is not None, "the model answered nothing"
    cached = cached_tokens(client) - cached_before
    return {"ttft_ms": 1000 * first_s, "prompt_tokens": prompt_tokens, "cached_tokens": cached}


def cached_tokens(client: Client) -> int:
    [total] = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", client.metrics(), re.MULTILINE)
    return int(float(total))


def conversation(client: Client, num_words: int, seed: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    messages = [{"role": "system", "content": f"{seed} {text(source, num_words)}"}]
    turns = []
    for _ in range(2):
        messages.append({"role": "user", "content": text(source, _QUESTION_WORDS)})
        turns.append(turn(client, messages))
    return turns


def main(arguments: argparse.Namespace) -> None:
    with Server(OURS, arguments.model, arguments.log) as server:
        client = Client(server.url)
        conversation(client, arguments.words, seed=-1)  # First uses of shapes compile.
        conversations = [
            conversation(client, arguments.words, seed) for seed in range(arguments.conversations)
        ]
    first, second = ([turns[number]["ttft_ms"] for turns in conversations] for number in range(2))
    figures = {
        "words": arguments.words,
        "prompt_tokens": [turn["prompt_tokens"] for turn in conversations[0]],
        "cached_tokens": [turn["cached_tokens"] for turn in conversations[0]],
        "first_ttft_ms": median(first),
        "second_ttft_ms": median(second),
        "ratio": median(later / earlier for earlier, later in zip(first, second, strict=True)),
    }
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        sys.stdout.write(f"{name:16} {shown}\n")
    if arguments.save_result:
        provenance.save(arguments.save_result, **figures, conversations=conversations)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder or `.gguf` file")
    parser.add_argument("--words", type=int, default=10_000, help="of the agent's instructions and tools")
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--log", type=Path, default=Path("agent_turns.log"), help="what the server writes")
    parser.add_argument("--save-result", type=Path, metavar="PATH", help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
