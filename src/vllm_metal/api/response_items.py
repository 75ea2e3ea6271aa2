"""Items of OpenAI's responses: what requests bring, and what answers hold."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from vllm_metal.api.chat import TokenLogprob
from vllm_metal.api.sealed_text import unseal
from vllm_metal.errors import InvalidRequest

ItemStatus = Literal["in_progress", "completed", "incomplete"]

#: What the ids of each kind of item begin with.
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
#: What an item of each kind cannot be without.
_REQUIRED = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
_TEXT_PARTS = frozenset({"input_text", "output_text", "reasoning_text", "refusal", "summary_text", "text"})


def new_id(kind: str) -> str:
    return f"{_ID_PREFIXES[kind]}_{secrets.token_hex(24)}"


class InputPart(Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


InputContent = str | list[InputPart]


class InputItem(Struct, omit_defaults=True):
    """An item of any kind: what it has to have depends on that."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: InputContent | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: InputContent | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None

    def check(self, path: str) -> None:
        """Raises InvalidRequest, naming the field below `path`."""
        if self.kind not in _REQUIRED:
            raise InvalidRequest(f"items of type `{self.type}` are not supported", param=f"{path}.type")
        for name in _REQUIRED[self.kind]:
            if getattr(self, name) is None:
                raise InvalidRequest(f"`{path}.{name}` is required", param=f"{path}.{name}")
        for name in ("content", "output"):
            _check_content(getattr(self, name), f"{path}.{name}")

    @property
    def kind(self) -> str:
        """Its type, which messages and references to items need not tell."""
        is_reference = self.id is not None and self.role is None and self.content is None
        return self.type or ("item_reference" if is_reference else "message")

    @property
    def text(self) -> str:
        """What a message or the output of a call says."""
        return _text(self.content if self.output is None else self.output)

    @property
    def reasoning(self) -> str:
        """As much of it as can be read: what another server has encrypted cannot."""
        return _text(self.content) or unseal(self.encrypted_content or "") or _text(self.summary)

    def resource(self) -> dict[str, Any]:
        """As the API shows it: with all that an item of its type has to have."""
        shown: dict[str, Any] = {"type": self.kind, **msgspec.to_builtins(self)}
        if self.kind == "message":
            kind = "output_text" if self.role == "assistant" else "input_text"
            shown["content"] = [_shown_part(kind, part) for part in _parts(self.content, kind)]
        if self.kind == "reasoning":
            shown.setdefault("summary", [])
        return shown | {"status": "completed"}


def _check_content(content: InputContent | None, path: str) -> None:
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type not in _TEXT_PARTS:
                raise InvalidRequest(
                    f"content of type `{part.type}` is not supported yet", param=f"{path}[{i}].type"
                )


def _parts(content: InputContent | None, kind: str) -> list[InputPart]:
    return [InputPart(kind, content)] if isinstance(content, str) else content or []


def _shown_part(kind: str, part: InputPart) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal or ""}
    shown = {"type": kind, "text": part.text or ""}
    return shown | {"annotations": [], "logprobs": []} if kind == "output_text" else shown


def _text(content: InputContent | None) -> str:
    return "".join(part.text or part.refusal or "" for part in _parts(content, "text"))


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """`summary` is always empty: the reasoning itself is there."""

    id: str
    content: list[ReasoningText]
    status: ItemStatus
    encrypted_content: str | UnsetType = UNSET
    summary: list[Any] = msgspec.field(default_factory=list)


class OutputFunctionCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class OutputCustomToolCall(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomToolCall


def as_input(output: Sequence[OutputItem]) -> list[InputItem]:
    """The items of an answer, as a client would bring them back."""
    return msgspec.convert(msgspec.to_builtins(output), list[InputItem])
