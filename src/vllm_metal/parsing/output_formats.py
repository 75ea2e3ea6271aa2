"""The formats that a model's answers are read in, each with the reason why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_metal.parsing import detection
from vllm_metal.parsing.detection import Choice, Model
from vllm_metal.parsing.reasoning_format import ReasoningFormat
from vllm_metal.parsing.tool_format import ToolFormat

_SWITCHED_OFF: Choice[Any] = Choice(None, "the configuration says `none`")


@dataclass(frozen=True, slots=True)
class OutputFormats:
    tools: Choice[ToolFormat] = _SWITCHED_OFF
    reasoning: Choice[ReasoningFormat] = _SWITCHED_OFF

    @classmethod
    def of(cls, model: Model, *, tools: str = "auto", reasoning: str = "auto") -> OutputFormats:
        """`tools` and `reasoning` are the name of a format, "auto" or "none". Raises ConfigError."""
        return cls(
            _SWITCHED_OFF if tools == "none" else detection.tool_format(model, _name(tools)),
            _SWITCHED_OFF if reasoning == "none" else detection.reasoning_format(model, _name(reasoning)),
        )


def _name(setting: str) -> str | None:
    return None if setting == "auto" else setting
