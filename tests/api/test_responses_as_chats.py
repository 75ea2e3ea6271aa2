"""Requests for responses become the chats that their items amount to."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.api.decoding import decode
from vllm_metal.api.response_items import InputItem
from vllm_metal.api.responses import ResponsesRequest
from vllm_metal.api.sealed_text import seal
from vllm_metal.errors import InvalidRequest

REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":1}'}
PATCH = {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": 'é"'}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "Sunny."}
DONE = {
    "type": "custom_tool_call_output",
    "call_id": "b",
    "output": [{"type": "input_text", "text": "Done."}],
}


def request(**fields: Any) -> ResponsesRequest:
    return decode(msgspec.json.encode({"input": "Hi", **fields}), ResponsesRequest)


def chat(*items: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    asked = request(input=list(items), **fields)
    return asked.chat(asked.items())


def shown(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What a chat template gets of the messages, each without what it does not have."""
    messages = chat(*items, **fields).template_messages()
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for call in calls:
        assert call.pop("type") == "function"
    for message in messages:
        message.pop("reasoning_content", None)
        message.pop("thinking", None)
    return messages


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_an_answer_is_one_message() -> None:
    calls = [
        {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "b", "function": {"name": "patch", "arguments": {"input": 'é"'}}},
    ]
    assert shown(said("user", "Hi"), REASONING, TEXT, CALL, PATCH, RESULT, DONE, TEXT) == [
        said("user", "Hi"),
        said("assistant", "Let me see.", reasoning="Hm.", tool_calls=calls),
        said("tool", "Sunny.", tool_call_id="a"),
        said("tool", "Done.", tool_call_id="b"),
        said("assistant", "Let me see."),
    ]


@pytest.mark.parametrize(
    "items",
    [[CALL, said("assistant", "x" * 2500)], [said("developer", "x" * 2500)] * 2],
    ids=["answer", "rules"],
)
def test_as_many_items_as_a_body_holds_make_one_message(items: list[dict[str, Any]]) -> None:
    """Joined one by one they would block the server for half a minute."""
    body = request(input=[items[0], *[items[1]] * 12_000])
    began = time.process_time()
    [message] = body.chat(body.items()).messages
    assert time.process_time() - began < 5
    assert len(message.text) >= 12_000 * 2500


def test_what_comes_behind_a_text_is_another_answer() -> None:
    assert shown(TEXT, TEXT, REASONING, TEXT) == [
        said("assistant", "Let me see."),
        said("assistant", "Let me see."),
        said("assistant", "Let me see.", reasoning="Hm."),
    ]


def test_results_stay_behind_their_calls() -> None:
    roles = [message["role"] for message in shown(CALL, TEXT, REASONING, PATCH, RESULT, DONE)]
    assert roles == ["assistant", "tool", "tool"]


def test_instructions_come_first_and_are_one_message() -> None:
    developer = said("developer", [{"type": "input_text", "text": "Rules."}])
    later = said("system", "Now.")
    assert shown(developer, said("user", "Hi"), later, instructions="Be brief.") == [
        said("system", "Be brief.\n\nRules."),
        said("user", "Hi"),
        said("system", "Now."),
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": seal("b")}, "a"),
        ({"content": None, "encrypted_content": seal("é")}, "é"),
        (
            {"encrypted_content": "gAAAAABo", "summary": [{"type": "summary_text", "text": "In short."}]},
            "In short.",
        ),
        ({"encrypted_content": "gAAAAABo", "summary": []}, ""),
    ],
)
def test_as_much_of_reasoning_as_can_be_read(fields: dict[str, Any], text: str) -> None:
    item = msgspec.convert({"type": "reasoning", **fields}, InputItem)
    assert item.reasoning == text
    [message, *_] = shown({"type": "reasoning", **fields}, TEXT)
    assert message.get("reasoning", "") == text


def test_tools_of_all_kinds() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    custom = {
        "type": "custom",
        "name": "patch",
        "description": "Patches.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
    }
    namespace = {
        "type": "namespace",
        "name": "crm",
        "description": "C.",
        "tools": [{**function, "name": "g"}],
    }
    tools = chat(said("user", "Hi"), tools=[function, custom, namespace, {"type": "web_search"}]).tools
    assert [tool.function.name for tool in tools] == ["f", "patch", "crm__g"]
    assert [tool.function.strict for tool in tools] == [True, None, True]
    assert tools[1].function.description == ("Patches.\n\n`input` follows this lark grammar:\nstart: /a/")
    assert tools[1].schema["required"] == ["input"]


def test_allowed_tools_are_the_only_ones() -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "g"}, {"type": "web_search"}],
    }
    asked = chat(said("user", "Hi"), tools=tools, tool_choice=choice)
    assert [tool.function.name for tool in asked.tools] == ["g"]
    assert asked.tool_choice == "required"


def test_a_namespace_need_not_be_told_of() -> None:
    tools = [{"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "f"}]}]
    for choice in ({"name": "f"}, {"name": "crm__f"}, {"name": "f", "namespace": "crm"}):
        asked = chat(said("user", "Hi"), tools=tools, tool_choice={"type": "function", **choice})
        assert asked.tool_choice.function.name == "crm__f"
    with pytest.raises(InvalidRequest):
        chat(
            said("user", "Hi"),
            tools=tools,
            tool_choice={"type": "function", "name": "f", "namespace": "other"},
        )


def test_what_the_model_is_asked_for() -> None:
    asked = chat(
        said("user", "Hi"),
        max_output_tokens=5,
        top_logprobs=2,
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        temperature=0.5,
        seed=3,
        stop="x",
        text={
            "format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}},
            "verbosity": "low",
        },
    )
    expected = {"max_tokens": 5, "logprobs": 2, "temperature": 0.5, "seed": 3, "stop": ("x",)}
    assert asked.sampling() == expected
    assert (asked.reasoning_effort, asked.parallel_tool_calls) == ("low", False)
    grammar = asked.grammar()
    assert grammar is not None
    assert grammar.kind == "json_schema"
