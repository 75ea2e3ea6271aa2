"""Tools and reasoning through the server, with real tokenizers and templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from pydantic import BaseModel, Field

from server_process import ServerProcess

pytestmark = pytest.mark.slow

THINK, END_THINK = 151667, 151668
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


class City(StrEnum):
    ROME = "Rome"
    OSLO = "Oslo"


class GetWeather(BaseModel):
    """Tells the weather."""

    city: City
    days: int = Field(ge=1, le=9)


TOOL = openai.pydantic_function_tool(GetWeather)
ASKED: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "How is Oslo tomorrow?"}]}


@pytest.fixture(scope="module")
def random_qwen3(
    tokenizer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A random model with Qwen3's own tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("qwen3")
    for file in tokenizer_folder("qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (
        ServerProcess(str(folder), env={}) as process,
        openai.OpenAI(base_url=f"{process.ready().url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert "tool calls as hermes, reasoning as qwen3" in process.log
        yield client


@pytest.fixture
def smollm2(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_of_a_random_model_is_parsed(random_qwen3: openai.OpenAI, seed: int) -> None:
    completion = random_qwen3.chat.completions.parse(
        **ASKED,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="none",
        seed=seed,
        temperature=1,
        max_tokens=600,
    )
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_reasoning_ends_at_its_budget_and_the_schema_holds_behind_it(random_qwen3: openai.OpenAI) -> None:
    for begin in ({THINK: 100}, {THINK: 100, END_THINK: -100}):
        completion = random_qwen3.chat.completions.parse(
            **ASKED,
            response_format=GetWeather,
            logit_bias={str(token_id): bias for token_id, bias in begin.items()},
            temperature=1,
            seed=1,
            max_tokens=200,
            extra_body={"thinking_token_budget": 7},
        )
        [choice] = completion.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, GetWeather)
        assert completion.usage.completion_tokens_details.reasoning_tokens <= 7 + 2
    assert completion.usage.completion_tokens_details.reasoning_tokens == 7 + 2
    assert choice.message.reasoning


def test_free_answers_go_on_behind_the_budget(random_qwen3: openai.OpenAI) -> None:
    completion = random_qwen3.chat.completions.create(
        **ASKED,
        logit_bias={str(THINK): 100, str(END_THINK): -100},
        seed=1,
        max_tokens=20,
        extra_body={"thinking_token_budget": 5},
    )
    [choice] = completion.choices
    assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens_details.reasoning_tokens >= 5 + 2
    assert choice.message.reasoning
    assert choice.message.content


def test_a_small_model_fills_a_required_call_in(smollm2: openai.OpenAI) -> None:
    asked = {"tools": [TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    completion = smollm2.chat.completions.parse(**ASKED, **asked, parallel_tool_calls=False)
    [call] = completion.choices[0].message.tool_calls
    assert call.function.parsed_arguments.city is City.OSLO
    with smollm2.chat.completions.stream(**ASKED, **asked, parallel_tool_calls=False) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
