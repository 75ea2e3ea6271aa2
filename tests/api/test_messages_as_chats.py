"""Anthropic's requests become the chats that they are."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.api import messages_as_chats
from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.api.decoding import decode
from vllm_metal.api.message_content import ToolUseBlock
from vllm_metal.api.message_turns import MessageTurns, call_id
from vllm_metal.api.messages import CountTokensRequest, InputMessage, MessagesRequest
from vllm_metal.api.sealed_text import seal, unseal
from vllm_metal.errors import InvalidRequest

HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
DEFERRED = TOOL | {"name": "leap", "defer_loading": True}
LEAP = '{"name":"leap","description":"Look.","parameters":{"type":"object","properties":{}}}'


def chat(*messages: Any, **fields: Any) -> ChatCompletionRequest:
    body = {"max_tokens": 5, "messages": messages or [HI], **fields}
    return messages_as_chats.chat(decode(json.dumps(body).encode(), MessagesRequest))


def shown(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages as templates get them, without what says nothing."""
    return [
        {key: value for key, value in message.items() if key not in ("thinking", "reasoning_content")}
        for message in chat(*messages, **fields).template_messages()
    ]


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_a_system_prompt_comes_first_as_text_or_in_blocks():
    system = {"role": "system", "content": "Be brief.\n\nBe kind."}
    user = {"role": "user", "content": "Hi"}
    assert shown(HI, system="Be brief.\n\nBe kind.") == [system, user]
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert shown(HI, system=[text("Be brief."), text("Be kind.", **cached)]) == [system, user]
    assert shown(HI, system=[]) == shown(HI) == [user]


def test_what_is_for_anthropics_bills_is_left_out():
    """It is another in every request, so that no kept prefix would fit."""
    bill = "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=cli; cch=1f2e3;"
    assert shown(HI, system=[text(bill), text("Be brief.")]) == shown(HI, system="Be brief.")
    assert shown(HI, system=bill) == shown(HI)


def test_system_messages_stay_in_their_place():
    messages = [HI, {"role": "system", "content": "Now in French."}, {"role": "user", "content": "And?"}]
    assert [each["role"] for each in shown(*messages, system="Be brief.")] == [
        "system",
        "user",
        "system",
        "user",
    ]
    inside = {"type": "mid_conv_system", "content": [text("Now"), text("in French.")]}
    assert shown({"role": "user", "content": [text("Hi"), inside, text("And?")]}) == [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Now\n\nin French."},
        {"role": "user", "content": "And?"},
    ]


def test_messages_of_one_role_in_a_row_are_one():
    assert shown(HI, {"role": "user", "content": [text("You"), text("there?")]}) == [
        {"role": "user", "content": "Hi\n\nYou\n\nthere?"}
    ]


def test_calls_and_their_results():
    messages = [
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                text("I look."),
                {"type": "tool_use", "id": "toolu_01A", "name": "look", "input": {"at": "日本"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01A",
                    "content": [text("A"), text("B")],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "tool_result", "tool_use_id": "other", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "none"},
                text("Go on."),
            ],
        },
    ]
    call = {"id": "toolu_01A", "type": "function", "function": {"name": "look", "arguments": {"at": "日本"}}}
    assert shown(*messages) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "A\n\nB", "tool_call_id": "toolu_01A"},
        {"role": "tool", "content": "The tool failed: no", "tool_call_id": "other"},
        {"role": "tool", "content": "", "tool_call_id": "none"},
        {"role": "user", "content": "Go on."},
    ]


def test_as_many_calls_as_a_body_holds():
    """Joined one by one they would block the server for a minute."""
    message = InputMessage("assistant", [ToolUseBlock("toolu_01A", "look")] * 150_000)
    began = time.process_time()
    [answer] = MessageTurns([]).of([message])
    assert time.process_time() - began < 8
    assert answer.tool_calls is not None
    assert len(answer.tool_calls) == 150_000


def test_templates_get_the_ids_that_the_model_gave():
    """In whatever letters: Mistral's templates count them, and Kimi's models read them."""
    for own in ("call_0123456789abcdef01234567", "a1B2c3D4e", "functions.look:0"):
        id = call_id(own)
        assert id.startswith("toolu_")
        assert id.replace("_", "").replace("-", "").isalnum()
        messages = [
            HI,
            {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "x"}]},
        ]
        _, called, result = shown(*messages)
        assert called["tool_calls"][0]["id"] == result["tool_call_id"] == own


@pytest.mark.parametrize("id", ["toolu_01A", "call_1", "", "toolu_", seal("a")])
def test_the_ids_of_other_servers_stay(id):
    [_, result] = shown(
        HI, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "x"}]}
    )
    assert result["tool_call_id"] == id


def test_reasoning_that_was_not_shown_comes_back():
    hidden = {"type": "thinking", "thinking": "", "signature": seal("Hm. 日本")}
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"}
    [_, said, _] = shown(HI, {"role": "assistant", "content": [hidden, foreign, text("A")]}, HI)
    assert said == {"role": "assistant", "content": "A", "reasoning": "Hm. 日本"}


@given(st.text())
def test_sealed_text_is_read_as_it_was(sealed):
    assert unseal(seal(sealed)) == sealed
    read = unseal(sealed)
    assert read is None or seal(read) == sealed


def test_an_answer_that_has_begun_goes_on():
    begun = chat(HI, {"role": "assistant", "content": [text("It"), text(" is")]})
    assert begun.continue_final_message
    assert begun.messages[-1].text == "It is"
    for blank in ("", " \n", []):
        empty = chat(HI, {"role": "assistant", "content": blank})
        assert not empty.continue_final_message
        assert [message.role for message in empty.messages] == ["user"]
    with pytest.raises(InvalidRequest, match="a call that has no `tool_result`"):
        chat(
            HI,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        )


@pytest.mark.parametrize(("role", "content"), [("user", []), ("assistant", []), ("assistant", "")])
def test_there_is_something_to_answer(role, content):
    with pytest.raises(InvalidRequest, match="`messages` holds nothing to answer"):
        chat({"role": role, "content": content})


@pytest.mark.parametrize(
    ("role", "block", "message"),
    [
        ("user", {"type": "image", "source": {}}, "content of type `image` is not supported yet"),
        ("user", {"type": "document", "source": {}}, "content of type `document` is not supported yet"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
            "content of type `image` is not supported yet",
        ),
        ("user", {"type": "tool_use", "id": "a", "name": "b"}, "a message of role `user` cannot hold"),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}, "role `assistant` cannot hold"),
        ("system", {"type": "thinking", "thinking": "a"}, "role `system` cannot hold `thinking`"),
        ("user", {"type": "hologram"}, "invalid value 'hologram'"),
    ],
)
def test_blocks_that_nothing_can_be_made_of_are_named(role, block, message):
    with pytest.raises(InvalidRequest, match=message) as raised:
        chat(HI, {"role": role, "content": [text("A"), block]})
    assert raised.value.message.startswith("`messages[1].content[1]")


def test_a_system_prompt_is_text():
    with pytest.raises(InvalidRequest, match=r"`system\[1\]\.type`: invalid enum value 'image'"):
        chat(system=[text("A"), {"type": "image"}])


def test_tools():
    offered = chat(tools=[TOOL | {"type": "custom", "strict": True, "cache_control": None}]).tools
    assert [tool.for_template()["function"] for tool in offered] == [
        {"name": "look", "description": "Look.", "parameters": TOOL["input_schema"]}
    ]
    assert offered[0].function.strict


def test_tools_of_anthropics_own_are_left_out():
    """Clients offer them to every server."""
    theirs = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    assert [tool.function.name for tool in chat(tools=[*theirs, TOOL]).tools] == ["look"]


def test_deferred_tools_are_told_where_a_message_refers_to_them():
    """So the tools that begin the prompt, and all that is kept of it, stay the same."""
    found = [{"type": "tool_reference", "tool_name": name} for name in ("leap", "gone")]
    result = {"type": "tool_result", "tool_use_id": "a", "content": found}
    messages = [HI, {"role": "assistant", "content": "A"}, {"role": "user", "content": [result]}]
    before = chat(*messages[:1], tools=[TOOL])
    after = chat(*messages, tools=[DEFERRED | {"name": "crawl"}, DEFERRED, TOOL])
    assert [tool.function.name for tool in after.offered_tools] == ["look", "leap"]
    assert before.template_kwargs()["tools"] == after.template_kwargs()["tools"]
    assert (
        after.messages[-1].text
        == f"<functions>\n<function>{LEAP}</function>\n</functions>\n\nThere is no tool `gone`."
    )


def test_deferred_tools_that_nobody_could_find_are_shown():
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    asked = chat(tools=[search, DEFERRED])
    assert [tool["function"]["name"] for tool in asked.template_kwargs()["tools"]] == ["leap"]
    assert chat(tools=[DEFERRED]).template_kwargs().get("tools") is None


def test_system_messages_add_and_remove_tools():
    def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    inline = {"type": "tool_definition", "definition": TOOL | {"name": "leap"}}
    named = {"type": "tool_reference", "name": "leap"}
    added = chat(HI, change("tool_addition", inline), tools=[TOOL])
    assert LEAP in added.messages[-1].text
    assert [tool.function.name for tool in added.offered_tools] == ["look", "leap"]
    assert [tool["function"]["name"] for tool in added.template_kwargs()["tools"]] == ["look"]
    assert chat(HI, change("tool_addition", named), tools=[TOOL, DEFERRED]).tools == added.tools
    removed = chat(HI, change("tool_addition", inline), change("tool_removal", named), tools=[TOOL])
    assert removed.messages[-1].text.endswith("The tool `leap` cannot be called any more.")
    assert [tool.function.name for tool in removed.offered_tools] == ["look"]


@pytest.mark.parametrize("missing", ["name", "input_schema"])
def test_tools_that_lack_something_are_refused(missing):
    with pytest.raises(InvalidRequest, match=rf"`tools\[1\]\.{missing}` is required"):
        chat(tools=[TOOL, {key: value for key, value in TOOL.items() if key != missing}])


@pytest.mark.parametrize(
    ("choice", "must_call", "offered"),
    [
        (None, False, 2),
        ({"type": "auto"}, False, 2),
        ({"type": "any"}, True, 2),
        ({"type": "tool", "name": "look"}, True, 1),
        ({"type": "none"}, False, 0),
    ],
)
def test_tool_choice(choice, must_call, offered):
    fields = {"tool_choice": choice} if choice else {}
    asked = chat(tools=[TOOL, TOOL | {"name": "leap"}], **fields)
    assert (asked.must_call, len(asked.offered_tools)) == (must_call, offered)
    assert asked.parallel_tool_calls
    if choice and choice["type"] != "none":
        fields["tool_choice"] = choice | {"disable_parallel_tool_use": True}
        assert not chat(tools=[TOOL], **fields).parallel_tool_calls


@pytest.mark.parametrize(
    ("thinking", "thinks", "budget"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, None),
        ({"type": "adaptive", "display": "omitted"}, True, None),
        ({"type": "enabled", "budget_tokens": 2048}, True, 2048),
    ],
)
def test_thinking_turns_the_models_reasoning_on_and_off(thinking, thinks, budget):
    asked = chat(thinking=thinking)
    assert asked.include_reasoning is thinks
    assert asked.thinking_token_budget == budget
    assert asked.template_kwargs()["enable_thinking"] is thinks
    assert asked.template_kwargs()["thinking"] is thinks


@pytest.mark.parametrize(
    ("effort", "told"), [(None, None), ("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
)
def test_effort_is_told_in_words_that_templates_know(effort, told):
    assert chat(output_config={"effort": effort}).reasoning_effort == told


def test_an_output_format_is_a_structure():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    grammar = chat(output_config=form).grammar()
    assert grammar is not None
    assert grammar.kind == "json_schema"
    with pytest.raises(InvalidRequest, match="cannot go with an answer that has begun"):
        chat(HI, {"role": "assistant", "content": "{"}, output_config=form)
    with pytest.raises(InvalidRequest, match=r"`output_config\.format` has replaced it"):
        chat(output_format={"type": "json_schema", "schema": schema})


def test_sampling():
    asked = chat(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a", "b"]).sampling()
    assert asked == {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 5, "stop": ("a", "b")}
    with pytest.raises(InvalidRequest, match="`stop_sequences"):
        chat(stop_sequences=[""])


def test_what_is_asked_of_anthropics_service_changes_nothing():
    service = {
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "mcp_servers": [],
        "betas": ["unheard-of-2027-01-01"],
        "container": None,
    }
    assert chat(HI, **service) == chat(HI)


@pytest.mark.parametrize("field", ["container", "mcp_servers"])
def test_what_would_be_missed_is_refused(field):
    with pytest.raises(InvalidRequest, match=f"`{field}` is not supported yet"):
        chat(HI, **{field: [{"type": "url", "url": "https://example.com", "name": "x"}]})


def test_only_an_answer_needs_a_limit():
    with pytest.raises(InvalidRequest, match="`max_tokens` is required"):
        decode(json.dumps({"messages": [HI]}).encode(), MessagesRequest)
    body = decode(json.dumps({"messages": [HI]}).encode(), CountTokensRequest)
    assert messages_as_chats.prompt(body).messages[0].text == "Hi"


#: A value of each field that makes the chat another.
ACTS: dict[str, Any] = {
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "Ho"}],
    "model": "other",
    "output_config": {"effort": "low"},
    "stop_sequences": ["a"],
    "stream": True,
    "system": "Be brief.",
    "temperature": 0,
    "thinking": {"type": "adaptive"},
    "tool_choice": {"type": "any"},
    "tools": [TOOL],
    "top_k": 1,
    "top_p": 0.5,
}


def test_every_field_acts():
    assert {*MessagesRequest.__struct_fields__} == {*ACTS}
    for field, value in ACTS.items():
        body = {"max_tokens": 5, "messages": [HI]}
        acting = decode(json.dumps(body | {field: value}).encode(), MessagesRequest)
        assert messages_as_chats.chat(acting) != chat(HI), field
