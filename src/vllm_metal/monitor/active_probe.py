"""Has the server generate for a few seconds, and looks meanwhile: only then do figures mean something."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue

from vllm_metal.client import Client
from vllm_metal.errors import EngineError, MetalError
from vllm_metal.monitor.finding import Finding, Level
from vllm_metal.monitor.snapshot import Snapshot, Watch
from vllm_metal.monitor.surroundings import Surroundings

#: How long the look lasts, in seconds.
SAMPLE_S = 3.0

_NUM_REQUESTS = 4
_FIRST_TOKEN_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_SUBJECT = "under load"
_PROMPT = "Count from one to a thousand, in words."


def under_load(surroundings: Surroundings) -> Iterator[Finding]:
    if not surroundings.serves():
        yield Finding("skipped", _SUBJECT, "no server of ours is ready to generate anything")
        return
    client = surroundings.client
    refusal = None
    with _generating(client) as news:
        if not (failure := _failure(news)):
            snapshot, refusal = _look(Watch(client), surroundings.with_power)
    if failure:
        yield Finding(
            "warning",
            _SUBJECT,
            f"the server does not generate: {failure.message}",
            why="nothing can be said about the GPU while it has nothing to do",
            hint=failure.hint or "see `metal service logs`",
        )
        return
    yield _judged(snapshot)
    if refusal:
        yield Finding(
            "warning",
            "power",
            refusal.message,
            why="root alone is told of states, and without `macmon` of frequency and power",
            hint=refusal.hint,
        )


def _failure(news: SimpleQueue[MetalError | None]) -> MetalError | None:
    """None as soon as any request has a token: a server may let only some in."""
    failure: MetalError | None = None
    for _ in range(_NUM_REQUESTS):
        try:
            failure = news.get(timeout=_FIRST_TOKEN_TIMEOUT_S)
        except Empty:
            return failure or MetalError(f"no token came within {_FIRST_TOKEN_TIMEOUT_S:g} s")
        if failure is None:
            break
    return failure


def _look(watch: Watch, with_power: bool) -> tuple[Snapshot, MetalError | None]:
    """With the refusal, where root's figures are wanted and not to be had."""
    try:
        return watch.take(SAMPLE_S, with_power=with_power), None
    except MetalError as exc:
        return watch.take(SAMPLE_S), exc


@contextmanager
def _generating(client: Client) -> Iterator[SimpleQueue[MetalError | None]]:
    """Several requests generate until the block ends; gives None for each piece, or what went wrong."""
    news: SimpleQueue[MetalError | None] = SimpleQueue()
    enough = threading.Event()

    def generate() -> None:
        try:
            messages = [{"role": "user", "content": _PROMPT}]
            while not enough.is_set():
                is_empty = True
                with closing(client.chat(messages, max_tokens=2048, ignore_eos=True)) as deltas:
                    next(deltas, None)  # It opens the answer, before any token.
                    for delta in deltas:
                        # What a model thinks has no text here, and is generated all the same.
                        if delta.finish_reason is None and delta.usage is None:
                            is_empty = False
                            news.put(None)
                        if enough.is_set():
                            return
                if is_empty:
                    raise EngineError("its answers are empty")
        except MetalError as exc:
            news.put(exc)

    # Daemons, since an answer that does not go on cannot be left.
    threads = [threading.Thread(target=generate, daemon=True) for _ in range(_NUM_REQUESTS)]
    for thread in threads:
        thread.start()
    try:
        yield news
    finally:
        enough.set()
        for thread in threads:
            thread.join(_END_TIMEOUT_S)


def _judged(snapshot: Snapshot) -> Finding:
    verdict, engine = snapshot.verdict, snapshot.engine
    speed = engine.decode_tokens_per_s if engine else None
    words = [verdict.summary] if verdict.kind != "unknown" else []
    if speed is not None:
        words.append(f"{speed:,.0f} tokens/s")
    if engine and engine.busy_ratio is not None:
        words.append(f"engine busy {engine.busy_ratio:.0%}")
    message = "; ".join(words) or f"nothing tells: {snapshot.engine_problem}"
    if engine and engine.num_running == 0:
        return Finding(
            "warning",
            _SUBJECT,
            f"the look came when nothing was generated: {message}",
            why="low figures are normal then, and say nothing",
            hint="run `metal doctor` again, or `metal top` while several requests generate",
        )
    level: Level = "ok"
    why = hint = None
    if verdict.kind == "idle":
        level, why = "problem", "the GPU should be busy while several requests generate: models run elsewhere"
        hint = "see `device` and `service's device` above, and the device that `metal ps` shows"
    elif verdict.kind == "suspicious":
        level, (why, *_) = "warning", verdict.details
        hint = "look with `metal top --power` for a while"
    return Finding(level, _SUBJECT, message, why, hint)
