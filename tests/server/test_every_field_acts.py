"""No field is taken and then forgotten: each changes the reply, or another test sees what it does."""

from __future__ import annotations

from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from vllm_metal.api.chat import ChatCompletionRequest
from vllm_metal.api.completions import CompletionRequest
from vllm_metal.api.responses import ResponsesRequest

ROOT = Path(__file__).parent.parent
PLAIN = {"seed": 1, "temperature": 1, "max_tokens": 12, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**PLAIN, "prompt": "Once"},
    "/v1/chat/completions": {**PLAIN, "messages": [{"role": "user", "content": "Once"}]},
    "/v1/responses": {**PLAIN, "max_tokens": None, "max_output_tokens": 12, "input": "Once"},
}
#: What differs from one reply to the next, or only repeats the request.
NO_ANSWER = {"cached_tokens", "completed_at", "created", "created_at", "id", "temperature", "top_p"}
#: The token that ends an answer comes all the time.
ENDS = {"logit_bias": {"256": 100}}

#: A value that makes a difference, and the fields without which it makes none.
ACTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "allowed_token_ids": ([5, 6], {}),
    "bad_words": (["</s>"], {**ENDS, "skip_special_tokens": False}),
    "frequency_penalty": (2, {"temperature": 0}),
    "guided_choice": (["yes", "no"], {}),
    "guided_grammar": ('root ::= "a"', {}),
    "guided_json": ({"enum": [1, 2]}, {}),
    "guided_regex": ("[ab]+", {}),
    "ignore_eos": (True, ENDS),
    "include_stop_str_in_output": (True, {"stop_token_ids": list(range(256))}),
    "logit_bias": ({"5": 100}, {}),
    "min_p": (0.9, {}),
    "min_tokens": (3, {**ENDS, "ignore_eos": False}),
    "n": (2, {}),
    "presence_penalty": (2, {"temperature": 0}),
    "prompt_logprobs": (0, {}),
    "repetition_penalty": (9, {"temperature": 0}),
    "response_format": ({"type": "json_object"}, {}),
    "return_token_ids": (True, {}),
    "skip_special_tokens": (False, ENDS),
    "stop": ("&", {"logit_bias": {"5": 100}}),
    "stop_token_ids": (list(range(256)), {}),
    "structured_outputs": ({"regex": "[ab]+"}, {}),
    "temperature": (0, {}),
    "top_k": (1, {}),
    "top_p": (0.01, {}),
    "truncate_prompt_tokens": (2, {}),
}
#: Where a test sees what the other fields do.
SEEN_IN = {
    "add_generation_prompt": "engine/mlx/test_tokenizer.py",
    "add_special_tokens": "server/test_special_tokens.py",
    "best_of": "api/test_openai.py",
    "cache_salt": "engine/test_prefix_cache.py",
    "chat_template": "server/test_routes.py",
    "chat_template_kwargs": "server/test_routes.py",
    "continue_final_message": "server/test_routes.py",
    "documents": "engine/mlx/test_tokenizer.py",
    "echo": "server/test_choices.py",
    "guided_whitespace_pattern": "server/test_structured_outputs.py",
    "include": "server/test_responses.py",
    "include_reasoning": "server/test_tool_calls.py",
    "input": "server/test_responses.py",
    "instructions": "server/test_responses.py",
    "keep_alive": "server/test_several_models.py",
    "logprobs": "server/test_sampling_fields.py",
    "max_completion_tokens": "api/test_openai.py",
    "max_output_tokens": "server/test_responses.py",
    "max_tokens": "server/test_choices.py",
    "messages": "server/test_choices.py",
    "metadata": "server/test_responses.py",
    "model": "server/test_protocol.py",
    "parallel_tool_calls": "server/test_tool_calls.py",
    "previous_response_id": "server/test_responses.py",
    "priority": "engine/test_scheduler.py",
    "prompt": "server/test_choices.py",
    "reasoning": "server/test_responses.py",
    "reasoning_effort": "api/test_openai.py",
    "return_tokens_as_token_ids": "server/test_choices.py",
    "seed": "server/test_choices.py",
    "skip_reading_prefix_cache": "engine/test_slot_kv_cache_manager.py",
    "store": "server/test_responses.py",
    "stream": "server/test_streams.py",
    "stream_options": "server/test_streams.py",
    "suffix": "server/test_routes.py",
    "text": "server/test_responses.py",
    "thinking_token_budget": "server/test_required_calls.py",
    "timeout": "server/test_server_process.py",
    "tool_choice": "server/test_tool_calls.py",
    "tools": "server/test_tool_calls.py",
    "top_logprobs": "server/test_sampling_fields.py",
    "truncation": "server/test_responses.py",
}


def test_every_field_is_seen():
    requests = (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    assert {*chain.from_iterable(each.__struct_fields__ for each in requests)} == {*ACTS, *SEEN_IN}
    for field, path in SEEN_IN.items():
        assert field in (ROOT / path).read_text(), f"`{path}` does not mention `{field}`"


def lasting(reply: Any) -> Any:
    match reply:
        case dict():
            return {name: lasting(each) for name, each in reply.items() if name not in NO_ANSWER}
        case list():
            return [lasting(each) for each in reply]
    return reply


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (path, field)
        for path, field in product(BODIES, ACTS)
        if path != "/v1/responses" or field not in ResponsesRequest.unsupported
    ],
)
def test_it_makes_a_difference(tiny_server, path, field):
    value, beside = ACTS[field]

    def answer(**fields: Any) -> Any:
        status, reply = tiny_server.post(path, BODIES[path] | beside | fields)
        assert status == 200, reply
        return lasting(reply)

    without = answer(**{field: None})
    assert answer(**{field: None}) == without
    assert answer(**{field: value}) != without
