"""From a prompt to token ids: lengths, other threads, templates that cannot work."""

from __future__ import annotations

import inspect
import threading
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import tiny_folder
from chat_prompt import encode_chat
from vllm_metal.api.chat import RENDERING_PARAMETERS, ChatCompletionRequest
from vllm_metal.engine.mlx import loader
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.errors import ConfigError, InvalidRequest, PromptTooLong


@pytest.fixture
def tokenizer() -> Tokenizer:
    # Its longest token is `</s>`.
    return Tokenizer(tiny_folder.tokenizer())


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("é" * 20, max_tokens=10) == 20 * tokenizer.encode("é")
    with pytest.raises(PromptTooLong, match="length is 10 tokens.* has 41 bytes") as caught:
        tokenizer.encode("é" * 20 + "e", max_tokens=10)
    assert caught.value.param == "prompt"
    with pytest.raises(PromptTooLong) as caught:
        encode_chat(tokenizer, [{"role": "user", "content": "x" * 41}], max_tokens=10)
    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_is_the_prompts_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        tokenizer.encode("\ud800")
    assert caught.value.param == "prompt"


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer) -> None:
    took_s = 0.0

    def encode() -> None:
        nonlocal took_s
        began = time.perf_counter()
        tokenizer.encode("word " * 100_000)
        took_s = time.perf_counter() - began

    thread = threading.Thread(target=encode)
    # Before the start, which itself waits for the other thread to let this one run.
    longest_gap_s, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        now = time.perf_counter()
        longest_gap_s, last = max(longest_gap_s, now - last), now
    assert longest_gap_s < took_s / 2


@pytest.mark.parametrize(
    ("template", "line"),
    [("{% if %}", 1), ("{{ messages }}\n{% endfor %}", 2), ("{{ messages | nothing }}", 1)],
)
def test_a_template_that_does_not_compile_is_refused_at_load(
    tmp_path: Path, template: str, line: int
) -> None:
    folder = tiny_folder.save(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=f"the chat template line {line}: ") as caught:
        loader.load(folder, chat_template=template)
    assert "`models.chat_template`" in str(caught.value.hint)
    file = tmp_path / "template.jinja"
    file.write_text(template)
    with pytest.raises(ConfigError, match=f"`{file}` line {line}: "):
        loader.load(folder, chat_template=str(file))


def test_a_template_may_ask_much_of_its_messages(tmp_path: Path) -> None:
    template = "{{ raise_exception('no') if messages | length < 9 }}{% generation %}{% endgeneration %}"
    loaded = loader.load(tiny_folder.save(tmp_path / "tiny"), chat_template=template)
    with pytest.raises(InvalidRequest, match="no"):
        encode_chat(loaded.tokenizer, [{"role": "user", "content": "x"}])


def test_a_template_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        loader.load(tiny_folder.save(tmp_path / "tiny"), chat_template=str(tmp_path / "nothing.jinja"))


@pytest.mark.parametrize(
    "name", sorted(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.keys())
)
def test_no_parameter_of_the_renderer_can_be_set_by_a_request(name: str) -> None:
    if name == "kwargs":
        return
    request = ChatCompletionRequest(messages=[], chat_template_kwargs={name: "x"})
    with pytest.raises(InvalidRequest):
        request.template_kwargs()


def test_nor_a_parameter_of_our_own() -> None:
    ours = inspect.signature(Tokenizer.render_chat).parameters.keys()
    assert ours - {"add_generation_prompt", "variables"} <= RENDERING_PARAMETERS
