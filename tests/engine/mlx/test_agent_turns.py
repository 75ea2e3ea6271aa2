"""Conversations of agents go on, whatever the chat template thinks of their turns."""

from __future__ import annotations

import time
from typing import Any

import pytest

from chat_prompt import encode_chat
from vllm_metal.api.chat import REASONING_KEYS
from vllm_metal.engine.mlx.agent_turns import AgentTurns
from vllm_metal.engine.mlx.tokenizer import Tokenizer

EACH = "{%- for m in messages %}"
SHOWN = """
[{{ m.role }}] {{ m.reasoning or '' }}{{ m.content }}{{ ' and calls' if m.tool_calls else '' }}
{% endfor %}"""


def refusing(condition: str) -> str:
    return f"{EACH}{{%- if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif -%}}{SHOWN}"


ANYTHING = EACH + SHOWN
NO_TOOLS = refusing("m.role == 'tool'")
USER_BEHIND_RESULT = "m.role == 'user' and loop.previtem and loop.previtem.role == 'tool'"
NO_USER_BEHIND_RESULTS = refusing(USER_BEHIND_RESULT)
NOR_SYSTEM = refusing(f"m.role == 'system' or {USER_BEHIND_RESULT}")
NO_THINKING_ALOUD = refusing("m.tool_calls and m.content and m.thinking")

CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]
ASKED = {"role": "user", "content": "a"}
CALLED = {"role": "assistant", "content": "b", "tool_calls": CALLS} | dict.fromkeys(REASONING_KEYS, "Hm.")
RESULT = {"role": "tool", "content": "c", "tool_call_id": "a"}
TOLD = {"role": "user", "content": [{"type": "text", "text": "d"}]}


def rendered(byte_tokenizer: Any, template: str, *messages: dict[str, Any]) -> list[str]:
    tokenizer = Tokenizer(byte_tokenizer, chat_template=template)
    return tokenizer.decode(encode_chat(tokenizer, [*messages])).strip().splitlines()


@pytest.mark.parametrize("template", [ANYTHING, NO_TOOLS])
def test_what_the_template_takes_or_wants_none_of_is_left_to_it(byte_tokenizer, template):
    shown = rendered(byte_tokenizer, template, ASKED, CALLED, TOLD)
    assert shown == ["[user] a", "[assistant] Hm.b and calls", "[user] d"]


def test_a_users_words_behind_a_result_join_it(byte_tokenizer):
    assert rendered(byte_tokenizer, NO_USER_BEHIND_RESULTS, ASKED, CALLED, RESULT, RESULT, TOLD, ASKED) == [
        *("[user] a", "[assistant] Hm.b and calls", "[tool] c", "[tool] c", "", "d", "", "a")
    ]


def test_a_system_message_there_does_too(byte_tokenizer):
    system = {"role": "system", "content": "d"}
    shown = rendered(byte_tokenizer, NOR_SYSTEM, ASKED, CALLED, RESULT, system)
    assert shown[2:] == ["[tool] c", "", "<system>", "d", "</system>"]


def test_reasoning_is_part_of_the_text_beside_calls(byte_tokenizer):
    answer = {key: value for key, value in CALLED.items() if key != "tool_calls"}
    assert rendered(byte_tokenizer, NO_THINKING_ALOUD, ASKED, CALLED, RESULT, answer) == [
        *("[user] a", "[assistant] Hm.", "", "b and calls", "[tool] c", "[assistant] Hm.b")
    ]


def test_as_many_as_a_body_holds():
    """Joined one by one they would block the tokenizer for a minute."""
    messages = [RESULT, *[{"role": "user", "content": "x" * 1500}] * 20_000]
    began = time.process_time()
    [joined] = AgentTurns(thinks_aloud=True, user_behind_result=False).adapt(messages)
    assert time.process_time() - began < 5
    assert len(joined["content"]) == 20_000 * 1502 + 1
