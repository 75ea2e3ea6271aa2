"""Chat templates and tokenizers of real models: the formats are found, and they read what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tool_call_writers import TOOL, WRITERS, Call
from vllm_metal.parsing import detection
from vllm_metal.parsing.answer import Answer
from vllm_metal.parsing.output_parser import OutputParser
from vllm_metal.parsing.reasoning_formats import REASONING_FORMATS
from vllm_metal.parsing.tool_formats import TOOL_FORMATS

pytestmark = pytest.mark.slow

#: The tool format and the reasoning format of each.
TEMPLATES: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": (None, None),
    "Apriel-1.6-15b-Thinker-fixed": ("jamba", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("json", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat31", None),
    "HuggingFaceTB-SmolLM3-3B": (None, "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": (None, None),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "LFM2.5-Instruct": (None, None),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("jamba", None),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "MiniMax-M3": (None, "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "Spark2.5": ("glm45", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v4", "qwen3"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4_mini_json", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite33"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm45", "qwen3"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "qwen3"),
    "llama-cpp-rwkv-world": (None, "qwen3"),
    "meetkai-functionary-medium-v3.1": ("functionary_v3", None),
    "meetkai-functionary-medium-v3.2": (None, None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "muse-glimmer": ("muse", None),
    "openai-gpt-oss-120b": ("openai", "gpt_oss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "qwen3"),
    "poolside-Laguna-S-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS.2": ("glm45", "qwen3"),
    "tencent-Hy3": ("hunyuan_v3", "hunyuan_v3"),
    "unsloth-Apriel-1.5": ("jamba", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "upstage-Solar-Open-100B": ("solar", "solar"),
}

#: These refuse tools that other templates take, or show no calls.
SHOW_NO_CALLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
}
#: Templates that show calls in a format that is known, and of those the ones that show one of several.
SHOW_CALLS = [name for name, (tools, _) in TEMPLATES.items() if tools and name not in SHOW_NO_CALLS]
SHOW_ONE_CALL = {
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
}
AWKWARD: Call = ("get_weather", {"place": 'a "b" {c}\n日本 🎉', "options": {"a": [1, {"b": "c"}]}})


def _render(template: str) -> detection.Render:
    def render(messages, *, tools, add_generation_prompt):
        [text], _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
        return text

    return render


def _model(path: Path) -> detection.Model:
    template = path.read_text()
    return detection.Model(template, vocabulary=(), render=_render(template))


def test_every_template_is_in_the_table(chat_templates: Path):
    assert {path.stem for path in chat_templates.glob("*.jinja")} == TEMPLATES.keys()


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_found(chat_templates: Path, name: str):
    model = _model(chat_templates / f"{name}.jinja")
    tools, reasoning = detection.tool_format(model), detection.reasoning_format(model)
    found = (tools.format and tools.format.name, reasoning.format and reasoning.format.name)
    assert found == TEMPLATES[name], f"{tools.reason}; {reasoning.reason}"


def _shown(model: detection.Model, calls: list[Call]) -> tuple[str, str]:
    """The end of the prompt and what the template shows of an answer with these calls."""
    tool_calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return model.answer_text({"role": "assistant", "content": "", "tool_calls": tool_calls}, [TOOL])


@pytest.mark.parametrize(
    ("name", "calls"),
    [(name, [call]) for name in SHOW_CALLS for call in (AWKWARD, ("get_weather", {}))]
    + [(name, [AWKWARD, AWKWARD]) for name in SHOW_CALLS if name not in SHOW_ONE_CALL],
)
def test_what_the_template_shows_is_read_back(chat_templates: Path, name: str, calls: list[Call]):
    model = _model(chat_templates / f"{name}.jinja")
    tools, reasoning = detection.tool_format(model).format, detection.reasoning_format(model).format
    prompt, text = _shown(model, calls)
    in_reasoning = reasoning is not None and reasoning.is_open_in(prompt)
    parser = OutputParser(
        tool_format=tools, reasoning_format=reasoning, tools=[TOOL], in_reasoning=in_reasoning
    )
    answer = Answer.of(parser.feed(text) + parser.finish())
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == calls


def _text_seen(tokenizer: Tokenizer, text: str, visible: frozenset[str]) -> str:
    """What is left of a text that a model writes, where special tokens show only if they are `visible`."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    kept = [id for id in ids if id not in special or tokenizer.id_to_token(id) in visible]
    return tokenizer.decode(kept, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("family", "tools", "reasoning", "are_special"),
    [
        ("qwen3", "hermes", "qwen3", False),
        ("gptoss", "openai", "gpt_oss", True),
        ("deepseek_v3", "deepseek_v3", "qwen3", False),
    ],
)
def test_the_marks_of_a_real_vocabulary_are_seen(
    real_tokenizer: Callable[[str], Tokenizer], family: str, tools: str, reasoning: str, are_special: bool
):
    tokenizer = real_tokenizer(family)
    tool_format, marks = TOOL_FORMATS[tools], REASONING_FORMATS[reasoning]
    written = f"{marks.begin}Hm.{marks.end}{WRITERS[tools]([AWKWARD])}"

    def read(visible: frozenset[str]) -> tuple[str, list[Call]]:
        parser = OutputParser(tool_format=tool_format, reasoning_format=marks, tools=[TOOL])
        seen = _text_seen(tokenizer, written, visible)
        answer = Answer.of(parser.feed(seen) + parser.finish())
        return answer.reasoning, [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]

    expected = ("Hm.", [AWKWARD])
    assert read(tool_format.visible_tokens | marks.visible_tokens) == expected
    assert (read(frozenset()) != expected) == are_special
