"""The reasoning formats, by the names that vLLM uses where it has them."""

from __future__ import annotations

from vllm_metal.parsing.reasoning_format import ReasoningFormat

#: Where two could read the same text, detection takes the first.
REASONING_FORMATS = {
    reasoning_format.name: reasoning_format
    for reasoning_format in (
        ReasoningFormat(name="qwen3", begin="<think>", end="</think>"),
        ReasoningFormat(
            name="granite33", begin="<think>", end="</think>", silent=("<response>", "</response>")
        ),
        ReasoningFormat(
            name="gpt_oss",
            begin="<|channel|>analysis<|message|>",
            end="<|end|>",
            silent=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>final <|constrain|>json<|message|>",
                "<|channel|>commentary<|message|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ),
            resume="<|start|>assistant",
            content_begin="<|channel|>final<|message|>",
        ),
        ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
        ReasoningFormat(name="gemma4", begin="<|channel>thought", end="<channel|>"),
        ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>"),
        ReasoningFormat(name="minimax_m3", begin="<mm:think>", end="</mm:think>"),
        ReasoningFormat(name="hunyuan_v3", begin="<think:opensource>", end="</think:opensource>"),
        ReasoningFormat(name="longcat", begin="<longcat_think>", end="</longcat_think>"),
        ReasoningFormat(
            name="kimi_k3",
            begin="<|open|>think<|sep|>",
            end="<|close|>think<|sep|>",
            silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            content_begin="<|open|>response<|sep|>",
        ),
        ReasoningFormat(
            name="cohere",
            begin="<|START_THINKING|>",
            end="<|END_THINKING|>",
            silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        ReasoningFormat(
            name="solar",
            begin="<|think|>",
            end="<|end|>",
            silent=("<|begin|>assistant", "<|content|>"),
            resume="<|begin|>assistant",
            content_begin="<|content|>",
        ),
        ReasoningFormat(name="apriel", begin="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]"),
        ReasoningFormat(name="granite", begin="Here is my thought process:", end="Here is my response:"),
    )
}

#: Other names of the same formats.
ALIASES = {
    "deepseek_r1": "qwen3",
    "deepseek_v3": "qwen3",
    "ernie45": "qwen3",
    "glm45": "qwen3",
    "kimi_k2": "qwen3",
    "minimax_m2": "qwen3",
    "nemotron_v3": "qwen3",
    "step3": "qwen3",
    "openai_gptoss": "gpt_oss",
    "cohere_command3": "cohere",
}
