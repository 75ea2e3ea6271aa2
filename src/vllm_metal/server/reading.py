"""How the answers to one chat request are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.engine.stop_strings import StopStrings
from vllm_metal.errors import InvalidRequest
from vllm_metal.parsing import answer_grammar
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_format import ReasoningFormat
from vllm_metal.parsing.tool_format import ToolFormat
from vllm_metal.parsing.tool_formats import TOOL_FORMATS
from vllm_metal.server.answer_reader import AnswerReader
from vllm_metal.server.thought_counter import ThoughtCounter

#: Tokens at the end of a prompt that hold the mark of reasoning, if the template has begun it.
_TAIL = 32


@dataclass(frozen=True, slots=True)
class Reading:
    """A format is None where the model or the request has no use for it. The prompt may have begun the
    reasoning, or ended it.
    """

    body: ChatCompletionRequest
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    is_begun: bool = False
    is_over: bool = False

    @classmethod
    async def of(cls, engine: AsyncEngine, body: ChatCompletionRequest, prompt: list[int]) -> Reading:
        """Raises InvalidRequest for tools that this model cannot call."""
        tool_format, reasoning = await _tool_format(engine, body), engine.formats.reasoning.format
        if reasoning is None:
            return cls(body, tool_format, None)
        if body.continue_final_message:
            return cls(body, tool_format, reasoning, reasoning.is_left_open_by(body.messages[-1].text))
        tail = await engine.decode(prompt[-_TAIL:], skip_special_tokens=False)
        return cls(body, tool_format, reasoning, reasoning.is_open_in(tail), reasoning.is_over_in(tail))

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
            in_reasoning=self.is_begun,
        )
        stops = StopStrings(params.stop if self._reads else (), included=params.include_stop_str_in_output)
        return AnswerReader(
            parser,
            stops,
            one_call=not self.body.parallel_tool_calls,
            tells_reasoning=self.body.include_reasoning,
        )

    def new_thought_counter(self, engine: AsyncEngine) -> ThoughtCounter | None:
        """For one choice; None where not single tokens mark the reasoning."""
        if self.reasoning_format is None:
            return None
        begin, end = (
            engine.token_ids([mark]) for mark in (self.reasoning_format.begin, self.reasoning_format.end)
        )
        return ThoughtCounter(min(begin), min(end), begun=self.is_begun) if begin and end else None

    @property
    def _reads(self) -> bool:
        """Else the text is all there is, and the engine itself sees the stop strings in it."""
        return self.tool_format is not None or self.reasoning_format is not None


async def _tool_format(engine: AsyncEngine, body: ChatCompletionRequest) -> ToolFormat | None:
    tools = engine.formats.tools
    if not body.offered_tools:
        return None
    if body.must_call and not (tools.format and await _is_enforced(tools.format, engine, body)):
        return TOOL_FORMATS["json"]  # A grammar has any model write it.
    if tools.format:
        return tools.format
    raise InvalidRequest(
        f"this model cannot call tools: {tools.reason}",
        param="tools",
        hint="serve another model, or name the format of its calls with `--tool-call-parser`",
    )


async def _is_enforced(tool_format: ToolFormat, engine: AsyncEngine, body: ChatCompletionRequest) -> bool:
    literal = await engine.literal("tool_choice")
    tools = [tool.for_template() for tool in body.offered_tools]
    return answer_grammar.calls(tool_format, tools, literal, several=False) is not None
