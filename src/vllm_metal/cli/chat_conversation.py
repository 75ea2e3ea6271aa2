"""A conversation: the turns so far, and the next answer printed as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from vllm_metal.cli import printer
from vllm_metal.cli.waiting import stage_of, telling
from vllm_metal.client import ChatDelta, Client, Usage
from vllm_metal.errors import EngineUnavailable, MetalError

Result = TypeVar("Result")

# What could move the cursor or drive the terminal in other ways: C0 but tab and newline, DEL, C1.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


@dataclass(slots=True)
class Turn:
    question: str
    answer: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    asked_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def messages(self) -> Iterator[dict[str, str]]:
        yield {"role": "user", "content": self.question}
        if self.answer:
            yield {"role": "assistant", "content": self.answer}

    def add(self, delta: ChatDelta) -> None:
        if delta.text or delta.reasoning:
            self.last_token_at = time.perf_counter()
            self.first_token_at = self.first_token_at or self.last_token_at
            self.answer += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage

    def stats(self) -> str:
        """Tokens, the wait for the first and the speed after it, as far as they are known."""
        waited = f"first after {self.first_token_at - self.asked_at:.2f} s"
        if not self.usage:
            return f"{waited}; stopped before its end, so its tokens were not counted"
        tokens = f"{self.usage.prompt_tokens} prompt + {self.usage.completion_tokens} completion tokens"
        took = self.last_token_at - self.first_token_at
        speed = f", {(self.usage.completion_tokens - 1) / took:.1f} tokens/s" if took else ""
        return f"{tokens}, {waited}{speed}, finished by {self.finish_reason}"


class Conversation:
    def __init__(
        self, client: Client, *, model: str | None, system: str | None, params: Mapping[str, Any]
    ) -> None:
        self.client = client
        self.model = model
        self.system = system
        self.turns: list[Turn] = []
        self._params = params

    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *chain.from_iterable(turn.messages() for turn in self.turns)]

    def ask(self, question: str) -> None:
        """Print the answer to `question` as it comes, and remember both.

        An interrupted answer is remembered as far as it came; a question left without any is forgotten.
        """
        turn = Turn(question)
        self.turns.append(turn)
        try:
            self._answer(turn)
        except MetalError:
            turn.answer = ""
            raise
        finally:
            if not turn.answer:
                self.turns.pop()

    def _answer(self, turn: Turn) -> None:
        def begin() -> tuple[ChatDelta, Generator[ChatDelta, None, None]]:
            turn.asked_at = time.perf_counter()
            stream = self.client.chat(self.messages(), model=self.model, **self._params)
            return next(stream, ChatDelta()), stream

        with telling(self.client, partial(stage_of, self.model)):
            first, stream = when_ready(begin)
        on_terminal = sys.stdout.isatty()
        reasoning = False
        try:
            with closing(stream):
                for delta in chain([first], stream):
                    turn.add(delta)
                    if delta.reasoning:
                        printer.note(delta.reasoning.translate(CONTROLS), end="")
                    elif reasoning and delta.text:
                        printer.note("\n")
                    reasoning = bool(delta.reasoning) or (reasoning and not delta.text)
                    printer.out(delta.text.translate(CONTROLS) if on_terminal else delta.text, end="")
        finally:
            if reasoning:
                printer.note()
            if turn.answer and not turn.answer.endswith("\n"):
                printer.out()
        if not turn.answer:
            printer.note("the answer is empty")


def when_ready(call: Callable[[], Result]) -> Result:
    """What `call` returns once the server is ready; meanwhile says what it waits for."""
    reason = None
    while True:
        try:
            return call()
        except EngineUnavailable as exc:
            if exc.message != reason:
                reason = exc.message
                printer.note(f"waiting for the server: {reason}")
            time.sleep(exc.retry_after_s)
