"""System messages stay where they are, whatever the chat template thinks of them."""

from __future__ import annotations

import time

import pytest

from chat_prompt import encode_chat
from vllm_metal.engine.mlx.system_messages import SystemMessages
from vllm_metal.engine.mlx.tokenizer import Tokenizer

ANYWHERE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
ONLY_FIRST = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif -%}
[{{ m.role }}] {{ m.content }}
{% endfor %}"""
HOISTED = """\
{%- for m in messages if m.role == 'system' %}[system] {{ m.content }}
{% endfor -%}
{%- for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}
{% endfor %}"""
NOWHERE = """\
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("must alternate") }}{% endif -%}
[{{ m.role }}] {{ m.content }}
{% endfor %}"""
IN_PARTS = """\
{%- for m in messages %}[{{ m.role }}] {% for part in m.content %}{{ part.text }}{% endfor %}

{% endfor %}"""

A, B, C, D, E = "abcde"


def rendered(byte_tokenizer, template: str, *messages: tuple[str, object]) -> str:
    tokenizer = Tokenizer(byte_tokenizer, chat_template=template)
    given = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.decode(encode_chat(tokenizer, given, add_generation_prompt=False))


@pytest.mark.parametrize("template", [ANYWHERE, IN_PARTS])
def test_what_the_template_takes_is_left_to_it(byte_tokenizer, template):
    shown = rendered(byte_tokenizer, template, ("system", A), ("user", B), ("system", C), ("system", D))
    assert shown == "[system] a\n[user] b\n[system] c\n[system] d\n"


@pytest.mark.parametrize("template", [ONLY_FIRST, HOISTED])
def test_later_ones_are_said_by_the_user(byte_tokenizer, template):
    messages = [("system", A), ("user", B), ("system", C), ("assistant", D), ("system", E)]
    assert rendered(byte_tokenizer, template, *messages) == (
        "[system] a\n[user] b\n\n<system>\nc\n</system>\n[assistant] d\n[user] <system>\ne\n</system>\n"
    )


@pytest.mark.parametrize("template", [ONLY_FIRST, HOISTED])
def test_those_that_begin_a_chat_are_one(byte_tokenizer, template):
    shown = rendered(byte_tokenizer, template, ("system", A), ("system", B), ("user", C), ("user", D))
    assert shown == "[system] a\n\nb\n[user] c\n[user] d\n"


def test_a_template_that_knows_none_and_wants_roles_to_alternate(byte_tokenizer):
    messages = [("system", A), ("user", [{"type": "text", "text": B}]), ("assistant", C), ("system", D)]
    assert rendered(byte_tokenizer, NOWHERE, *messages, ("user", E)) == (
        "[user] <system>\na\n</system>\n\nb\n[assistant] c\n[user] <system>\nd\n</system>\n\ne\n"
    )


def test_as_many_as_a_body_holds():
    """Joined one by one they would block the tokenizer for a minute."""
    messages = [{"role": "system", "content": "x" * 1500} for _ in range(20_000)]
    began = time.process_time()
    [joined] = SystemMessages(first=True, later=False).adapt(messages)
    assert time.process_time() - began < 5
    assert len(joined["content"]) == 20_000 * 1502 - 2


@pytest.mark.parametrize("template", [ANYWHERE, ONLY_FIRST, HOISTED, NOWHERE])
def test_what_was_before_stays_as_it_was(byte_tokenizer, template):
    """Else nothing that is kept of an earlier prompt would fit."""
    before = [("user", A), ("assistant", B), ("user", C)]
    earlier = rendered(byte_tokenizer, template, *before)
    assert rendered(byte_tokenizer, template, *before, ("system", D)).startswith(earlier.rstrip())
