"""Which formats a model answers in, by what its chat template makes of a known answer, else by marks."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from vllm_metal.api.chat import REASONING_KEYS
from vllm_metal.errors import ConfigError
from vllm_metal.parsing import reasoning_formats, tool_formats
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_format import ReasoningFormat
from vllm_metal.parsing.tool_format import ToolFormat

Message = dict[str, Any]
F = TypeVar("F", ToolFormat, ReasoningFormat)

_QUESTION: Message = {"role": "user", "content": "How is the weather?"}
_NAME = "get_weather"
_ARGUMENTS = {"place": "Rome", "days": 3}
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
_THOUGHT = "Look outside."
_REPLY = "It is sunny."


class Render(Protocol):
    """The model's chat template."""

    def __call__(
        self, messages: list[Message], *, tools: list[Message] | None, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True)
class Choice(Generic[F]):
    """A format and, in words, why; None where the model has none."""

    format: F | None
    reason: str

    @property
    def name(self) -> str:
        return self.format.name if self.format else "none"


@dataclass(frozen=True)
class Model:
    """What detection looks at; `template` is empty for a model without one."""

    template: str
    vocabulary: Collection[str]
    render: Render

    def answer_text(self, message: Message, tools: list[Message] | None = None) -> tuple[str, str]:
        """The prompt, and what the template writes after it for the answer `message`."""
        prompt = self.render([_QUESTION], tools=tools, add_generation_prompt=True)
        whole = self.render([_QUESTION, message], tools=tools, add_generation_prompt=False)
        pairs = enumerate(zip(prompt, whole, strict=False))
        shared = prompt[: next((i for i, (a, b) in pairs if a != b), len(prompt))]
        # Two marks that begin alike are not to be cut where they part.
        shared = re.sub(r"[<\[{][^>\]}\s]*$", "", shared)
        return shared, whole[len(shared) :]


def tool_format(model: Model, name: str | None = None) -> Choice[ToolFormat]:
    """The format called `name`, else the one that is found. Raises ConfigError for an unknown name."""
    if name is not None:
        return _named(name, tool_formats.TOOL_FORMATS, tool_formats.ALIASES, "tool format")
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        if text := _rendered_call(model, arguments):
            if found := _format_of_call(text):
                return Choice(found, "the chat template writes a call in this format")
            return Choice(None, "the chat template writes calls in a format that is not known")
    if model.template and "tool" not in model.template:
        return Choice(None, "the chat template takes no tools")
    formats = tool_formats.TOOL_FORMATS.values()
    return _by_marks(
        model, [(each, (each.begin,) if each.begin else each.openings, each.marks) for each in formats]
    )


def reasoning_format(model: Model, name: str | None = None) -> Choice[ReasoningFormat]:
    """The format called `name`, else the one that is found. Raises ConfigError for an unknown name."""
    formats = reasoning_formats.REASONING_FORMATS
    if name is not None:
        return _named(name, formats, reasoning_formats.ALIASES, "reasoning format")
    for each in formats.values():
        if _reproduces_reasoning(model, each):
            return Choice(each, "the chat template writes reasoning in this format")
    return _by_marks(
        model, [(each, (each.begin,), (each.begin, each.end, *each.silent)) for each in formats.values()]
    )


def _named(name: str, formats: Mapping[str, F], aliases: Mapping[str, str], kind: str) -> Choice[F]:
    found = formats.get(aliases.get(name, name))
    if found is None:
        raise ConfigError(f"there is no {kind} `{name}`", hint=f"known are {', '.join(sorted(formats))}")
    return Choice(found, "it was asked for by name")


def _rendered_call(model: Model, arguments: Any) -> str | None:
    """What the template makes of a call; None if it shows none."""
    call = {
        "id": "call00000",  # Mistral's templates take nine characters only.
        "type": "function",
        "function": {"name": _NAME, "arguments": arguments},
    }
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        _, text = model.answer_text(message, [_TOOL])
    # The template is the model's program: whatever it raises, it has shown no call.
    except Exception:
        return None
    return text if _NAME in text else None


def _format_of_call(text: str) -> ToolFormat | None:
    """The format that reads the call and leaves least of the text over."""
    leftovers: dict[str, int] = {}
    for each in tool_formats.TOOL_FORMATS.values():
        answer = _parse(text, OutputParser(tool_format=each, tools=[_TOOL]))
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls if call.complete]
        if calls == [(_NAME, _ARGUMENTS)]:
            leftovers[each.name] = len(answer.content)
    return tool_formats.TOOL_FORMATS[min(leftovers, key=leftovers.__getitem__)] if leftovers else None


def _reproduces_reasoning(model: Model, candidate: ReasoningFormat) -> bool:
    named = dict.fromkeys(REASONING_KEYS, _THOUGHT)
    try:
        prompt, text = model.answer_text({"role": "assistant", "content": _REPLY, **named})
    except Exception:
        return False
    answer = _parse(text, OutputParser(reasoning_format=candidate, in_reasoning=candidate.is_open_in(prompt)))
    return answer.reasoning == _THOUGHT and answer.content.startswith(_REPLY)


def _parse(text: str, parser: OutputParser) -> Answer:
    return Answer.of(parser.feed(text) + parser.finish())


def _by_marks(model: Model, candidates: Iterable[tuple[F, Iterable[str], Iterable[str]]]) -> Choice[F]:
    """The format of which most marks are there, one that must be among them."""
    candidates = list(candidates)
    for place, holds in (("chat template", model.template), ("vocabulary", model.vocabulary)):
        best, most = None, 0
        for candidate, needed, marks in candidates:
            num_found = sum(mark in holds for mark in marks)
            if num_found > most and any(mark in holds for mark in needed):
                best, most = candidate, num_found
        if best is not None:
            return Choice(best, f"the {place} has its marks")
    return Choice(None, "neither the chat template nor the vocabulary has marks of any")
