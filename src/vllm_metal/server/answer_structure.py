"""What the answers to a chat request must follow: a structure it asks for, calls, a budget of reasoning."""

from __future__ import annotations

from dataclasses import replace

from vllm_metal.api.tools import NamedToolChoice
from vllm_metal.engine.async_engine import AsyncEngine
from vllm_metal.errors import InvalidRequest
from vllm_metal.parsing import answer_grammar
from vllm_metal.parsing.answer_grammar import Literal
from vllm_metal.server.reading import Reading
from vllm_metal.structure.grammar import Grammar

_BUDGET = "thinking_token_budget"


async def grammar(reading: Reading, engine: AsyncEngine) -> Grammar | None:
    """None where the model may write what it likes. Raises InvalidRequest."""
    body = reading.body
    asked = body.grammar()
    may_call = body.must_call or bool(asked and asked.kind == "json_schema" and reading.tool_format)
    if may_call:
        asked = await _calls_or(asked, reading, engine)
    budget = body.thinking_token_budget
    if asked is None and budget is None:
        return await _strict_calls(reading, engine)
    if reading.reasoning_format is None or reading.is_over:
        return asked
    literal = await engine.literal(asked.param if asked else _BUDGET)
    marks = answer_grammar.tokens(reading.reasoning_format, literal)
    if budget is not None and marks is None:
        if body.insists_on_budget:
            raise InvalidRequest("this model's reasoning cannot be cut short", param=_BUDGET)
        if asked is None:
            return await _strict_calls(reading, engine)
        budget = None
    prefix = answer_grammar.reasoning_first(
        reading.reasoning_format,
        literal,
        begun=reading.is_begun,
        before_content=asked is not None and not may_call,
        max_tokens=budget,
    )
    if asked is None:
        assert marks is not None
        return Grammar("lark", answer_grammar.anything_but(marks[0]), prefix=prefix, param=_BUDGET)
    return replace(asked, prefix=prefix)


async def _calls_or(content: Grammar | None, reading: Reading, engine: AsyncEngine) -> Grammar:
    """Calls, and where they are not insisted on, what else the answer may be."""
    assert reading.tool_format is not None
    must_call = reading.body.must_call
    param = "tool_choice" if must_call or content is None else content.param
    literal = await engine.literal(param)
    calls = _calls(reading, literal)
    if calls is None:
        raise InvalidRequest(
            f"calls in this model's format, `{reading.tool_format.name}`, can be read but not enforced",
            param=param,
            hint="leave `response_format` out, or have `tool_choice` be `required`",
        )
    if not must_call and content is not None:
        calls = answer_grammar.calls_or_content(calls, content.source, reading.reasoning_format, literal)
    return Grammar("lark", calls, param="tools" if must_call else param)


async def _strict_calls(reading: Reading, engine: AsyncEngine) -> Grammar | None:
    """Any text, in which calls follow their schemas; None where that is not asked for, or no single token
    begins a call.
    """
    if reading.tool_format is None or not any(tool.function.strict for tool in reading.body.offered_tools):
        return None
    literal = await engine.literal("tools")
    calls = _calls(reading, literal)
    begin = literal(reading.tool_format.begin)
    if calls is None or not answer_grammar.is_token(begin):
        return None
    return Grammar("lark", answer_grammar.calls_in_text(calls, begin), param="tools")


def _calls(reading: Reading, literal: Literal) -> str | None:
    body = reading.body
    assert reading.tool_format is not None
    return answer_grammar.calls(
        reading.tool_format,
        [tool.for_template() for tool in body.offered_tools],
        literal,
        several=body.parallel_tool_calls and not isinstance(body.tool_choice, NamedToolChoice),
    )
