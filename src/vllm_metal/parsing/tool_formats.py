"""The tool formats, by the names that vLLM uses where it has them."""

from __future__ import annotations

import secrets
import string
from typing import Any

from vllm_metal.parsing.notation import GEMMA
from vllm_metal.parsing.tool_format import Fields, Pattern, ToolFormat


def _mistral_id(fields: Fields) -> str:
    """Nine letters or digits, which Mistral's templates insist on."""
    alphabet = string.ascii_letters + string.digits
    return fields.get("id") or "".join(secrets.choice(alphabet) for _ in range(9))


def _kimi_id(fields: Fields) -> str:
    """The model's own, which its template shows again with the result."""
    return "functions.{name}:{number}".format_map(fields)


def _function_tags(name: str, begin: str, end: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        begin=begin,
        calls=(Pattern("<function={name}> {parameters} </function>"),),
        parameter=Pattern("<parameter={key}>\n{value}\n</parameter>"),
        end=end,
    )


def _arg_tags(name: str, call: str, tag: str, begin: str = "", end: str = "") -> ToolFormat:
    """`tag` is the pattern of the tags' names."""
    key, value = tag.format("arg_key"), tag.format("arg_value")
    return ToolFormat(
        name=name,
        begin=begin,
        calls=(Pattern(call),),
        parameter=Pattern(f"<{key}>{{key}}</{key}> <{value}>{{value}}</{value}>"),
        end=end,
    )


def _dsml(name: str, section: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        begin=f"<｜DSML｜{section}>",
        calls=(Pattern('<｜DSML｜invoke name="{name}"> {parameters} </｜DSML｜invoke>'),),
        parameter=Pattern('<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>'),
        end=f"</｜DSML｜{section}>",
    )


_WITH_PARAMETERS = Pattern('{ "name" : "{name}" , "parameters" : {arguments} }')


def _objects(name: str, begin: str, end: str = "", **more: Any) -> ToolFormat:
    return ToolFormat(name=name, begin=begin, calls=(Pattern("{object}"),), end=end, **more)


#: Where two could read the same text, detection takes the first.
TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        _objects("hermes", "<tool_call>", "</tool_call>"),
        _function_tags("qwen3_coder", "<tool_call>", "</tool_call>"),
        _function_tags("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
        ToolFormat(
            name="mistral",
            begin="[TOOL_CALLS]",
            calls=(
                Pattern("{object}"),
                Pattern("{name}[ARGS] {arguments}"),
                Pattern("{name}[CALL_ID]{id}[ARGS] {arguments}"),
                Pattern("{name} {arguments}"),
            ),
            in_list=True,
            call_id=_mistral_id,
        ),
        _arg_tags("glm45", "<tool_call>{name} {parameters} </tool_call>", "{}"),
        _arg_tags("longcat", "<longcat_tool_call>{name} {parameters} </longcat_tool_call>", "longcat_{}"),
        _arg_tags(
            "hunyuan_v3",
            "<tool_call:opensource>{name}<tool_sep:opensource> {parameters} </tool_call:opensource>",
            "{}:opensource",
            "<tool_calls:opensource>",
            "</tool_calls:opensource>",
        ),
        ToolFormat(
            name="kimi_k2",
            begin="<|tool_calls_section_begin|>",
            calls=tuple(
                Pattern(
                    f"<|tool_call_begin|> {prefix}{{name}}:{{number}}"
                    " <|tool_call_argument_begin|> {arguments} <|tool_call_end|>"
                )
                for prefix in ("functions.", "")
            ),
            end="<|tool_calls_section_end|>",
            call_id=_kimi_id,
        ),
        ToolFormat(
            name="kimi_k3",
            begin="<|open|>tools<|sep|>",
            calls=(
                Pattern(
                    '<|open|>call tool="{name}" index="{number}"<|sep|> {parameters} <|close|>call<|sep|>'
                ),
            ),
            parameter=Pattern(
                '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'
            ),
            end="<|close|>tools<|sep|>",
        ),
        ToolFormat(
            name="minimax_m2",
            begin="<minimax:tool_call>",
            calls=(Pattern('<invoke name="{name}"> {parameters} </invoke>'),),
            parameter=Pattern('<parameter name="{key}">{value}</parameter>'),
            end="</minimax:tool_call>",
        ),
        ToolFormat(
            name="muse",
            begin="<atem:function_calls>",
            calls=(Pattern('<atem:invoke name="{name}"> {parameters} </atem:invoke>'),),
            parameter=Pattern('<atem:parameter name="{key}">{value}</atem:parameter>'),
            end="</atem:function_calls>",
        ),
        ToolFormat(
            name="minicpm5",
            calls=(Pattern('<function name="{name}"> {parameters} </function>'),),
            parameter=Pattern('<param name="{key}">{value}</param>'),
            text_quotes=("<![CDATA[", "]]>"),
        ),
        ToolFormat(
            name="deepseek_v3",
            begin="<｜tool▁calls▁begin｜>",
            calls=(
                Pattern(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}"
                    " ```json {arguments} ``` <｜tool▁call▁end｜>"
                ),
            ),
            end="<｜tool▁calls▁end｜>",
        ),
        ToolFormat(
            name="deepseek_v31",
            begin="<｜tool▁calls▁begin｜>",
            calls=(Pattern("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜> {arguments} <｜tool▁call▁end｜>"),),
            end="<｜tool▁calls▁end｜>",
        ),
        _dsml("deepseek_v32", "function_calls"),
        _dsml("deepseek_v4", "tool_calls"),
        ToolFormat(
            name="openai",
            calls=tuple(
                Pattern(f"{header}<|message|> {{arguments}} <|call|>")
                for header in (
                    "to=functions.{name}<|channel|>{channel}",
                    "to=functions.{name}<|channel|>{channel} <|constrain|>json",
                    "<|channel|>{channel} to=functions.{name} {content_type}",
                    "<|channel|>{channel} to=functions.{name} <|constrain|>json",
                )
            ),
            several=False,
        ),
        ToolFormat(
            name="gemma4",
            calls=(Pattern("<|tool_call>call:{name}{arguments}<tool_call|>"),),
            notation=GEMMA,
        ),
        ToolFormat(
            name="function_gemma",
            calls=(Pattern("<start_function_call>call:{name}{arguments}<end_function_call>"),),
            notation=GEMMA,
        ),
        ToolFormat(
            name="solar",
            begin="<|tool_calls|>",
            calls=(
                Pattern(
                    "<|tool_call:begin|>{id}<|tool_call:name|>{name}"
                    "<|tool_call:args|>{arguments}<|tool_call:end|>"
                ),
            ),
            end="<|calls|>",
        ),
        ToolFormat(name="functionary_v3", calls=(Pattern("<function={name}>{arguments}</function>"),)),
        _objects("granite", "<|tool_call|>", in_list=True),
        _objects("granite_20b", "<function_call>"),
        _objects("jamba", "<tool_calls>", "</tool_calls>", in_list=True),
        _objects("nemotron", "<TOOLCALL>", "</TOOLCALL>", in_list=True),
        _objects(
            "cohere",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            object=Pattern(
                '{ "tool_call_id" : "{number}" , "tool_name" : "{name}" , "parameters" : {arguments} }'
            ),
            in_list=True,
        ),
        _objects("gigachat3", "function call<|role_sep|>", several=False),
        _objects("gigachat31", "<|function_call|>", several=False),
        _objects("internlm", "<|action_start|><|plugin|>", "<|action_end|>", object=_WITH_PARAMETERS),
        _objects("phi4_mini_json", "functools", in_list=True),
        ToolFormat(
            name="lfm2",
            begin="<|tool_call_start|>",
            calls=(Pattern("{name}({keywords})"),),
            end="<|tool_call_end|>",
        ),
        ToolFormat(
            name="pythonic",
            begin="<|python_start|>",
            calls=(Pattern("{name}({keywords})"),),
            end="<|python_end|>",
            unmarked=True,
        ),
        _objects("llama3_json", "<|python_tag|>", object=_WITH_PARAMETERS, unmarked=True, several=False),
        _objects("json", "```json", "```", unmarked=True, in_list=True),
    )
}

#: Other names of the same formats.
ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "qwen": "hermes",
    "granite4": "hermes",
    "glm47": "glm45",
    "gpt_oss": "openai",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "functiongemma": "function_gemma",
    "cohere2": "cohere",
    "granite-20b-fc": "granite_20b",
}
