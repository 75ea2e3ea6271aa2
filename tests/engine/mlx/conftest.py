"""What the tests of loading and tokenizing share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from vllm_metal.engine.mlx.gguf import GGUFFile
from vllm_metal.engine.mlx.gguf_tokenizer import load_tokenizer
from vllm_metal.engine.mlx.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'robot' %}{{ raise_exception('there is no such role') }}{% endif %}"
    "<s>{{ message['role'] + ': ' + message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>{{ name | default('assistant') }}:{% endif %}"
)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The CPU backend's rules, whatever this machine has."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def smollm2_file(smollm2_path: Path) -> GGUFFile:
    return GGUFFile(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_file: GGUFFile) -> Tokenizer:
    return load_tokenizer(smollm2_file)


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte and two special ones; ids 0 to 257."""
    vocabulary = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
