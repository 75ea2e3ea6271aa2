"""The main job: a real server process, the real SmolLM2, the real `openai` SDK and `metal chat`."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import tiny_folder
from server_process import METAL, ServerProcess

QUESTIONS = [
    "Name the capital of France.",
    "What is two plus two?",
    "Write one sentence about the sea.",
    "Why is the sky blue? Answer in one sentence.",
    "List three colours.",
    "Say hello in Spanish, with an emoji.",
    "Who wrote Hamlet?",
    "Describe a cat.",
]


def _metal(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [METAL, *args],
        input=stdin,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _stream(client: openai.OpenAI, question: str, **fields: object) -> tuple[str, object]:
    chunks = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def test_chat_without_a_model_answers_fluent_text(server):
    assert "Paris" in server.chat("Name the capital of France.")


def test_eight_clients_at_once_get_what_each_gets_alone(client):
    alone = [_stream(client, question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: _stream(client, question), QUESTIONS))
    assert together == alone
    assert all(text for text, _ in alone)


def test_streamed_and_whole_answers_are_the_same(client):
    for question in QUESTIONS[:3]:
        streamed, usage = _stream(client, question)
        whole = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=12,
        )
        assert whole.choices[0].message.content == streamed
        assert whole.usage == usage


def test_a_seed_makes_sampling_repeatable_whatever_runs_beside_it(client):
    def sampled(seed: int) -> str:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Tell me a story."}],
            temperature=1.2,
            top_p=0.95,
            max_tokens=10,
            seed=seed,
        )
        return answer.choices[0].message.content

    alone = sampled(7)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(sampled, [7, 8, 9, 7]))
    assert together[0] == together[3] == alone
    assert len(set(together)) == 3


def test_completions_stop_strings_and_token_prompts(client):
    answer = client.completions.create(
        model="smollm2",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=12,
        stop=["xyz", "Paris"],
    )
    assert answer.choices[0].text == " "
    assert answer.choices[0].finish_reason == "stop"
    tokens = client.completions.create(model="smollm2", prompt=[504, 3575, 282], temperature=0, max_tokens=2)
    assert tokens.usage.prompt_tokens == 3
    assert tokens.choices[0].finish_reason == "length"


def test_the_sdk_gets_errors_it_understands(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="smollm2", prompt=[1] * 9000)
    assert too_long.value.code == "context_length_exceeded"
    assert "this model's maximum context length is 8192 tokens" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hi"}], temperature=-1
        )
    assert wrong.value.param == "temperature"


def test_the_models_list(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_a_running_answer_goes_on_while_a_long_prompt_is_prefilled(client):
    def ask(question: str, max_tokens: int):
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
        )
        assert next(stream).choices[0].delta.role == "assistant"  # it is in the engine's hands
        return stream

    short = ask(QUESTIONS[3], 8)
    next(short)
    long = ask("word " * 1500, 1)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, long)
        assert list(short)
        assert not rest.done()
        assert rest.result()


def test_chat_quick_from_a_pipe(server):
    asked = _metal("chat", "-q", "-", "--temperature", "0", "--url", server.url, stdin=QUESTIONS[0])
    assert asked.returncode == 0, asked.stderr
    assert "Paris" in asked.stdout


def test_chat_local_needs_no_server(smollm2_path):
    asked = _metal("chat", str(smollm2_path), "--local", "-q", QUESTIONS[0], "--temperature", "0")
    assert asked.returncode == 0, asked.stderr
    assert "Paris" in asked.stdout


def test_a_term_signal_stops_the_server_cleanly(tmp_path):
    with ServerProcess(str(tiny_folder.save(tmp_path / "tiny")), env={}) as process:
        process.ready()
        assert process.stop() == 0, process.log
        assert "Traceback" not in process.log


def test_a_conversation_starts_from_what_is_kept_of_it(server):
    def ask(messages: list[dict[str, str]], **fields: object) -> tuple[str, int, int]:
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached, usage["prompt_tokens"] - cached

    messages = [{"role": "user", "content": f"Remember these words: {'apple pear plum ' * 40}. Which fruit?"}]
    first, cached, length = ask(messages, cache_salt="this test")
    assert cached == 0
    assert ask(messages, cache_salt="this test") == (first, length - 1, 1)
    assert ask(messages, cache_salt="another") == (first, 0, length)
    assert ask(messages, cache_salt="this test", skip_reading_prefix_cache=True) == (first, 0, length)
    turn = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    _, cached, _ = ask(turn, cache_salt="this test")
    assert cached >= 128
