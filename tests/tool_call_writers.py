"""How a model of each tool format writes calls down, written by hand to be read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Call = tuple[str, Mapping[str, Any]]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "required": [],
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer"},
                "ratio": {"type": "number"},
                "sure": {"type": "boolean"},
                "options": {"type": "object"},
                "items": {"type": "array"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(key: str = "arguments") -> Callable[[list[Call]], list[str]]:
    return lambda calls: [_json({"name": name, key: arguments}) for name, arguments in calls]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _tagged(call: str, parameter: str, plain: Callable[[Any], str] = _plain) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return "\n".join(
            call % (name, "".join(parameter % (key, plain(value)) for key, value in arguments.items()))
            for name, arguments in calls
        )

    return write


def _headed(pattern: str, separator: str = "") -> Callable[[list[Call]], str]:
    return lambda calls: separator.join(pattern % (name, _json(arguments)) for name, arguments in calls)


def _between(begin: str, write: Callable[[list[Call]], str], end: str) -> Callable[[list[Call]], str]:
    return lambda calls: begin + write(calls) + end


def _list(begin: str, end: str, key: str = "arguments") -> Callable[[list[Call]], str]:
    return lambda calls: f"{begin}[{', '.join(_objects(key)(calls))}]{end}"


def _pythonic(calls: list[Call]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


def _gemma(quote: str) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case dict():
                return "{" + ",".join(f"{key}:{write(each)}" for key, each in value.items()) + "}"
            case list():
                return "[" + ",".join(map(write, value)) + "]"
        return _json(value)

    return write


def _gemma_calls(begin: str, quote: str, end: str) -> Callable[[list[Call]], str]:
    return lambda calls: "".join(f"{begin}call:{name}{_gemma(quote)(args)}{end}" for name, args in calls)


def _dsml(section: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        lines = [f"<｜DSML｜{section}>"]
        for name, arguments in calls:
            lines.append(f'<｜DSML｜invoke name="{name}">')
            for key, value in arguments.items():
                string = str(isinstance(value, str)).lower()
                lines.append(
                    f'<｜DSML｜parameter name="{key}" string="{string}">{_plain(value)}</｜DSML｜parameter>'
                )
            lines.append("</｜DSML｜invoke>")
        return "\n".join([*lines, f"</｜DSML｜{section}>"])

    return write


def _kimi_k2(calls: list[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def _kimi_k3(calls: list[Call]) -> str:
    types = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    written = ""
    for i, (name, arguments) in enumerate(calls):
        written += f'<|open|>call tool="{name}" index="{i + 1}"<|sep|>'
        for key, value in arguments.items():
            kind = types.get(type(value), "null")
            written += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_plain(value)}'
            written += "<|close|>argument<|sep|>"
        written += "<|close|>call<|sep|>"
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


_FUNCTION_TAGS = ("<function=%s>\n%s</function>", "<parameter=%s>\n%s\n</parameter>\n")


def _arg_tags(call: str, tag: str) -> Callable[[list[Call]], str]:
    key, value = tag % "arg_key", tag % "arg_value"
    return _tagged(call, f"<{key}>%s</{key}>\n<{value}>%s</{value}>\n")


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _objects()(calls)),
    "qwen3_coder": _tagged("<tool_call>\n" + _FUNCTION_TAGS[0] + "\n</tool_call>", _FUNCTION_TAGS[1]),
    "seed_oss": _tagged("<seed:tool_call>\n" + _FUNCTION_TAGS[0] + "\n</seed:tool_call>", _FUNCTION_TAGS[1]),
    "mistral": _headed("[TOOL_CALLS]%s[ARGS]%s"),
    "glm45": _arg_tags("<tool_call>%s\n%s</tool_call>", "%s"),
    "longcat": _arg_tags("<longcat_tool_call>%s\n%s</longcat_tool_call>", "longcat_%s"),
    "hunyuan_v3": _between(
        "<tool_calls:opensource>\n",
        _arg_tags(
            "<tool_call:opensource>%s<tool_sep:opensource>\n%s</tool_call:opensource>", "%s:opensource"
        ),
        "\n</tool_calls:opensource>",
    ),
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "minimax_m2": _between(
        "<minimax:tool_call>\n",
        _tagged('<invoke name="%s">\n%s</invoke>', '<parameter name="%s">%s</parameter>\n'),
        "\n</minimax:tool_call>",
    ),
    "muse": _between(
        "<atem:function_calls>\n",
        _tagged(
            '<atem:invoke name="%s">\n%s</atem:invoke>', '<atem:parameter name="%s">%s</atem:parameter>\n'
        ),
        "\n</atem:function_calls>",
    ),
    "minicpm5": _tagged('<function name="%s">%s</function>', '<param name="%s">%s</param>'),
    "deepseek_v3": _between(
        "<｜tool▁calls▁begin｜>",
        _headed(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>",
            separator="\n",
        ),
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _between(
        "<｜tool▁calls▁begin｜>",
        _headed("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "openai": _headed("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>"),
    "gemma4": _gemma_calls("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": _gemma_calls("<start_function_call>", "<escape>", "<end_function_call>"),
    "solar": _between(
        "<|tool_calls|>",
        _headed("<|tool_call:begin|>abcdefgh12<|tool_call:name|>%s<|tool_call:args|>%s<|tool_call:end|>"),
        "<|calls|>",
    ),
    "functionary_v3": _headed("<function=%s>%s</function>"),
    "granite": _list("<|tool_call|>", ""),
    "granite_20b": lambda calls: "\n".join(f"<function_call> {call}" for call in _objects()(calls)),
    "jamba": _list("<tool_calls>", "</tool_calls>"),
    "nemotron": _list("<TOOLCALL>", "</TOOLCALL>"),
    "cohere": lambda calls: (
        "<|START_ACTION|>[\n"
        + ",\n".join(
            "    " + _json({"tool_call_id": str(i), "tool_name": name, "parameters": arguments})
            for i, (name, arguments) in enumerate(calls)
        )
        + "\n]<|END_ACTION|>"
    ),
    "gigachat3": lambda calls: "\n".join(f"function call<|role_sep|>\n{call}" for call in _objects()(calls)),
    "gigachat31": lambda calls: "\n".join(f"<|function_call|>{call}" for call in _objects()(calls)),
    "internlm": lambda calls: "\n".join(
        f"<|action_start|><|plugin|>{call}<|action_end|>" for call in _objects("parameters")(calls)
    ),
    "phi4_mini_json": _list("functools", ""),
    "lfm2": _between("<|tool_call_start|>", _pythonic, "<|tool_call_end|>"),
    "pythonic": _pythonic,
    "llama3_json": lambda calls: "; ".join(_objects("parameters")(calls)),
    "json": _list("```json\n", "\n```"),
}
