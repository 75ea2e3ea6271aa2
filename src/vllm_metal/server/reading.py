"""How the answers to one chat request are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.stop_strings import StopStrings
from vllm_metal.errors import InvalidRequest
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_format import ReasoningFormat
from vllm_metal.parsing.tool_format import ToolFormat
from vllm_metal.server.answer_reader import AnswerReader

#: Tokens at the end of a prompt that hold the mark of reasoning, if the template has begun it.
_TAIL = 32


@dataclass(frozen=True, slots=True)
class Reading:
    """A format is None where the model or the request has no use for it."""

    body: ChatCompletionRequest
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    in_reasoning: bool

    @classmethod
    async def of(cls, engine: AsyncEngine, body: ChatCompletionRequest, prompt: list[int]) -> Reading:
        """Raises InvalidRequest for tools that this model cannot call."""
        if body.tool_choice not in ("none", "auto"):
            raise InvalidRequest("this `tool_choice` is not supported yet", param="tool_choice")
        tools, reasoning = engine.formats.tools, engine.formats.reasoning.format
        if body.offered_tools and tools.format is None:
            raise InvalidRequest(
                f"this model cannot call tools: {tools.reason}",
                param="tools",
                hint="serve another model, or name the format of its calls with `--tool-call-parser`",
            )
        in_reasoning = False
        if reasoning is not None and body.continue_final_message:
            in_reasoning = reasoning.is_left_open_by(body.messages[-1].text)
        elif reasoning is not None:
            in_reasoning = reasoning.is_open_in(
                await engine.decode(prompt[-_TAIL:], skip_special_tokens=False)
            )
        return cls(body, tools.format if body.offered_tools else None, reasoning, in_reasoning)

    def adapted(self, params: SamplingParams, engine: AsyncEngine) -> SamplingParams:
        """What the request asks of the engine, with all in the text that has to be read."""
        if not self._reads:
            return params
        marks: frozenset[str] = frozenset()
        for each in (self.tool_format, self.reasoning_format):
            marks |= each.visible_tokens if each else frozenset()
        return replace(params, stop=(), visible_token_ids=engine.token_ids(marks))

    def new_reader(self, params: SamplingParams) -> AnswerReader:
        """For one choice; `params` are those that the request asks for."""
        parser = OutputParser(
            reasoning_format=self.reasoning_format,
            tool_format=self.tool_format,
            tools=[tool.for_template() for tool in self.body.offered_tools],
            in_reasoning=self.in_reasoning,
        )
        stops = StopStrings(params.stop if self._reads else (), included=params.include_stop_str_in_output)
        return AnswerReader(
            parser,
            stops,
            one_call=not self.body.parallel_tool_calls,
            tells_reasoning=self.body.include_reasoning,
        )

    @property
    def _reads(self) -> bool:
        """Else the text is all there is, and the engine itself sees the stop strings in it."""
        return self.tool_format is not None or self.reasoning_format is not None
