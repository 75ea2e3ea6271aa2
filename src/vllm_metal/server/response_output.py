"""Makes the items of a response from what is read of an answer, and the events that tell of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct

from vllm_metal.api.chat import TokenLogprob
from vllm_metal.api.response_events import (
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from vllm_metal.api.response_items import (
    ItemStatus,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    new_id,
)
from vllm_metal.api.response_tools import OfferedTool
from vllm_metal.api.sealed_text import seal
from vllm_metal.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Events = Iterator[ResponseEvent]


class OutputWriter:
    """Writes one item at a time: what is of another kind ends it."""

    def __init__(self, tools: Iterable[OfferedTool], *, seals_reasoning: bool) -> None:
        self.items: list[OutputItem] = []
        self._tools = {tool.function.function.name: tool for tool in tools}
        self._seals_reasoning = seals_reasoning
        self._writer: _ItemWriter | None = None

    def write(self, event: Event, logprobs: list[TokenLogprob]) -> Events:
        """`logprobs` are of the tokens that make the text of a message."""
        match event:
            case ContentDelta(text):
                if not isinstance(self._writer, _MessageWriter):
                    yield from self._begin(_MessageWriter())
                yield from self._add(text, logprobs)
            case ReasoningDelta(text):
                if not isinstance(self._writer, _ReasoningWriter):
                    yield from self._begin(_ReasoningWriter(seals=self._seals_reasoning))
                yield from self._add(text)
            case ToolCallStart(_, call_id, name):
                yield from self._begin(self._call_writer(call_id, name))
            case ToolCallArguments(_, text):
                yield from self._add(text)
            case ToolCallEnd(_, complete):
                yield from self._end("completed" if complete else "incomplete")

    def finish(self, status: ItemStatus) -> Events:
        """End what has been begun. An answer that says nothing is an empty message."""
        if self._writer is None and not self.items:
            yield from self._begin(_MessageWriter())
        yield from self._end(status)

    def _begin(self, writer: _ItemWriter) -> Events:
        yield from self._end("completed")
        self._writer = writer
        yield from writer.opening(len(self.items))

    def _add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Events:
        assert self._writer is not None
        return self._writer.add(text, logprobs)

    def _end(self, status: ItemStatus) -> Events:
        if self._writer is not None:
            item = self._writer.item(status)
            self.items.append(item)
            yield from self._writer.closing(item)
            self._writer = None

    def _call_writer(self, call_id: str, name: str) -> _ItemWriter:
        tool = self._tools.get(name)
        if tool is None:
            return _FunctionCallWriter(call_id, name)
        kind = _CustomToolCallWriter if tool.is_custom else _FunctionCallWriter
        return kind(call_id, tool.name, tool.namespace)


class _ItemWriter(ABC):
    kind: ClassVar[str]

    def __init__(self) -> None:
        self.id = new_id(self.kind)
        self.text = ""
        self.place: dict[str, Any] = {"item_id": self.id}

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """As it is now; empty while it is in progress."""

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events: ...

    @abstractmethod
    def done(self) -> Events:
        """Tells that no more will be added."""

    def opening(self, output_index: int) -> Events:
        self.place["output_index"] = output_index
        yield OutputItemAdded(output_index=output_index, item=self.item("in_progress"))

    def closing(self, item: OutputItem) -> Events:
        yield from self.done()
        yield OutputItemDone(output_index=self.place["output_index"], item=item)


class _MessageWriter(_ItemWriter):
    kind = "message"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[TokenLogprob] = []

    @property
    def _part(self) -> OutputText:
        return OutputText(self.text, logprobs=self._logprobs)

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self.id, [] if status == "in_progress" else [self._part], status)

    def opening(self, output_index: int) -> Events:
        yield from super().opening(output_index)
        yield ContentPartAdded(part=OutputText(), **self.place)

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        self.text += text
        self._logprobs += logprobs
        yield OutputTextDelta(delta=text, logprobs=list(logprobs), **self.place)

    def done(self) -> Events:
        yield OutputTextDone(text=self.text, logprobs=self._logprobs, **self.place)
        yield ContentPartDone(part=self._part, **self.place)


class _ReasoningWriter(_ItemWriter):
    kind = "reasoning"

    def __init__(self, *, seals: bool) -> None:
        super().__init__()
        self._seals = seals

    def item(self, status: ItemStatus) -> OutputReasoning:
        if status == "in_progress":
            return OutputReasoning(self.id, [], status)
        sealed = seal(self.text) if self._seals else UNSET
        return OutputReasoning(self.id, [ReasoningText(self.text)], status, sealed)

    def opening(self, output_index: int) -> Events:
        yield from super().opening(output_index)
        yield ContentPartAdded(part=ReasoningText(), **self.place)

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        self.text += text
        yield ReasoningTextDelta(delta=text, **self.place)

    def done(self) -> Events:
        yield ReasoningTextDone(text=self.text, **self.place)
        yield ContentPartDone(part=ReasoningText(self.text), **self.place)


class _CallWriter(_ItemWriter):
    def __init__(self, call_id: str, name: str, namespace: str | None = None) -> None:
        super().__init__()
        self.call_id = call_id
        self.name = name
        self.namespace = UNSET if namespace is None else namespace


class _FunctionCallWriter(_CallWriter):
    kind = "function_call"

    def item(self, status: ItemStatus) -> OutputFunctionCall:
        return OutputFunctionCall(self.id, self.call_id, self.name, self.text, status, self.namespace)

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        self.text += text
        yield FunctionCallArgumentsDelta(delta=text, **self.place)

    def done(self) -> Events:
        yield FunctionCallArgumentsDone(name=self.name, arguments=self.text, **self.place)


class _CustomToolCallWriter(_CallWriter):
    """The text is told as a whole, once the JSON that holds it is there."""

    kind = "custom_tool_call"

    @property
    def _input(self) -> str:
        try:
            return msgspec.json.decode(self.text, type=_FreeText).input
        except msgspec.DecodeError:
            return self.text

    def item(self, status: ItemStatus) -> OutputCustomToolCall:
        return OutputCustomToolCall(self.id, self.call_id, self.name, self._input, status, self.namespace)

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Events:
        self.text += text
        yield from ()

    def done(self) -> Events:
        yield CustomToolCallInputDelta(delta=self._input, **self.place)
        yield CustomToolCallInputDone(input=self._input, **self.place)


class _FreeText(Struct):
    input: str
