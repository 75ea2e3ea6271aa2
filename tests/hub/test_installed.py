"""Models that are found on a machine, and those of them that can be removed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_metal.errors import ModelError, ModelNotFound
from vllm_metal.hub import installed, names, removal, shared_cache, usage
from vllm_metal.hub.installed import InstalledModel, installed_models
from vllm_metal.hub.names import PathSource, Source
from vllm_metal.settings import ModelsConfig

CONFIG = {"model_type": "llama", "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}
COMMIT, OLD_COMMIT = "a" * 40, "b" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def models_dir(home: Path) -> Path:
    return home / "models"


def gguf(context_length: int = 4096, types: tuple[int, ...] = (12, 12, 14)) -> bytes:
    """A header of version 3: two entries, and tensors of the types (12 is Q4_K, 14 Q6_K)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    body = b"GGUF" + struct.pack("<IQQ", 3, len(types), 2)
    body += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    body += text("llama.context_length") + struct.pack("<II", 4, context_length)
    for place, kind in enumerate(types):
        body += text(f"t{place}") + struct.pack("<IQIQ", 1, 256, kind, 0)
    return body


def parse_source(text: str) -> Source:
    return names.parse_source(text, ModelsConfig())


def find(models_dir: Path, text: str, aliases: Mapping[str, str] | None = None) -> InstalledModel:
    return installed.find(text, ModelsConfig(dir=str(models_dir), aliases=aliases or {}))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def mlx(**changes: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps(CONFIG | changes).encode(), "model.safetensors": b"weights"}


def cache(repo: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """As the hub's client lays it out: links to blobs that are named by their content."""
    folder = shared_cache.model_folder(repo)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        link = folder / "snapshots" / commit / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if ref:
        write(folder / "refs", {ref: commit.encode()})
    return folder / "snapshots" / commit


def ollama(home: Path, name: str, content: bytes, **changes: Any) -> Path:
    digest = hashlib.sha256(content).hexdigest()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"} | changes
    manifest = {
        "layers": [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:0"}, layer]
    }
    root = home / ".ollama" / "models"
    write(root, {f"manifests/{name}": json.dumps(manifest).encode(), f"blobs/sha256-{digest}": content})
    return root / "blobs" / f"sha256-{digest}"


def named(models_dir: Path) -> dict[str, InstalledModel]:
    return {model.name: model for model in installed_models(models_dir)}


def test_the_hubs_cache(models_dir: Path) -> None:
    path = cache("org/name", mlx(quantization={"bits": 4, "group_size": 64}))
    cache("org/name", mlx(), commit=OLD_COMMIT, ref=None)
    cache("org/tagged", mlx(), ref="refs/pr/1")
    cache("org/part", {"config.json": b"{}"})
    cache("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"p"})
    found = named(models_dir)
    assert found.keys() == {"org/name", f"org/name@{OLD_COMMIT}", "org/tagged@refs/pr/1"}
    model = found["org/name"]
    assert (model.path, model.origin) == (path, "hub")
    assert (model.number_format, model.context_length) == ("4-bit", 2048)
    assert model.size_bytes == sum(map(len, mlx(quantization={"bits": 4, "group_size": 64}).values()))
    assert found[f"org/name@{OLD_COMMIT}"].number_format == "bfloat16"


def test_gguf_files_of_the_hub_go_by_their_quantization_where_there_are_several(models_dir: Path) -> None:
    one = cache("org/one", {"m-Q4_K_M.gguf": gguf()})
    parts = {f"Q8_0/m-0000{n}-of-00002.gguf": gguf() + bytes(n) for n in (1, 2)}
    cache("org/two", {"m-Q4_0.gguf": gguf(1024, (2,)), **parts, "l-Q2_K-00001-of-00002.gguf": gguf()})
    found = named(models_dir)
    assert found.keys() == {"org/one", "org/two:Q4_0", "org/two:Q8_0"}
    assert found["org/one"].path == one / "m-Q4_K_M.gguf"
    assert (found["org/one"].number_format, found["org/one"].context_length) == ("Q4_K", 4096)
    assert found["org/two:Q8_0"].size_bytes == sum(map(len, parts.values()))
    assert (found["org/two:Q4_0"].number_format, found["org/two:Q4_0"].context_length) == ("Q4_0", 1024)


def test_our_own_folder(models_dir: Path) -> None:
    write(models_dir / "mine-4bit", mlx())
    write(models_dir / "sub", {"x.gguf": gguf(), "notes.txt": b"x"})
    write(models_dir / "smollm2", {"SmolLM2-135M-Instruct.Q4_1.gguf": gguf()})
    write(models_dir / ".mine.1.partial", mlx())
    write(models_dir / "broken", {"config.json": b"[]", "model.safetensors": b"w"})
    found = named(models_dir)
    assert found.keys() == {"~/models/mine-4bit", "~/models/sub/x.gguf", "smollm2"}
    assert {model.origin for model in found.values()} == {"models.dir"}
    for name, model in found.items():
        assert name == "smollm2" or parse_source(name) == PathSource(model.path)


def test_lm_studio(home: Path, models_dir: Path) -> None:
    folder = write(home / ".lmstudio/models/org/mlx-model", mlx())
    write(home / ".lmstudio/models/org/ggufs", {"m-Q4_0.gguf": gguf(), "m-Q8_0.gguf": gguf()})
    elsewhere = write(home / "elsewhere/org/one", {"m-Q4_0.gguf": gguf()})
    write(home / ".lmstudio", {"settings.json": json.dumps({"downloadsFolder": "~/elsewhere"}).encode()})
    found = named(models_dir)
    assert found.keys() == {
        "lmstudio:org/mlx-model",
        "lmstudio:org/ggufs:Q4_0",
        "lmstudio:org/ggufs:Q8_0",
        "lmstudio:org/one",
    }
    assert {model.origin for model in found.values()} == {"LM Studio"}
    assert parse_source("lmstudio:org/mlx-model") == PathSource(folder)
    assert parse_source("lmstudio:org/one") == PathSource(elsewhere / "m-Q4_0.gguf")


def test_ollama(home: Path, models_dir: Path) -> None:
    blob = ollama(home, "registry.ollama.ai/library/llama3.2/latest", gguf(8192))
    ollama(home, "registry.ollama.ai/someone/tuned/q8", gguf(1))
    ollama(home, "hf.co/org/name/Q4_0", gguf(2))
    ollama(home, "registry.ollama.ai/library/evil/latest", gguf(3), digest="sha256:../../../etc/passwd")
    ollama(home, "registry.ollama.ai/library/tensors/latest", b"not GGUF")
    ollama(home, "registry.ollama.ai/library/odd/latest", gguf(4), mediaType=7)
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/torn", {"latest": b'{"layers": ['})
    found = named(models_dir)
    assert found.keys() == {"ollama:llama3.2:latest", "ollama:someone/tuned:q8", "ollama:hf.co/org/name:Q4_0"}
    model = found["ollama:llama3.2:latest"]
    assert (model.path, model.origin, model.context_length) == (blob, "Ollama", 8192)
    assert parse_source("ollama:llama3.2") == parse_source("ollama:llama3.2:latest") == PathSource(blob)
    source = parse_source("ollama:llama3.2")
    assert (source.name, str(source)) == ("ollama:llama3.2", "ollama:llama3.2")
    with pytest.raises(ModelNotFound):
        parse_source("ollama:gone")


def test_ollamas_folder_may_be_elsewhere(
    home: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama(home, "registry.ollama.ai/library/m/latest", gguf())
    (home / ".ollama" / "models").rename(home / "moved")
    monkeypatch.setenv("OLLAMA_MODELS", "~/moved")
    assert named(models_dir).keys() == {"ollama:m:latest"}


def test_what_was_loaded_is_known_as_used(models_dir: Path) -> None:
    path = cache("org/name", mlx())
    assert named(models_dir)["org/name"].last_used is None
    usage.record(path)
    used = named(models_dir)["org/name"].last_used
    assert used is not None
    assert used == usage.last(path)


@pytest.mark.parametrize("config", [{"quantization": {}}, {"text_config": 7}, {"rope_scaling": "x"}])
def test_odd_configs_are_listed_without_what_they_do_not_tell(
    models_dir: Path, config: dict[str, Any]
) -> None:
    cache("org/odd", mlx(**config))
    assert named(models_dir)["org/odd"].number_format in (None, "bfloat16")


def test_a_model_is_found_by_any_of_its_names(models_dir: Path) -> None:
    path = write(models_dir / "mine", mlx())
    cache("mlx-community/Qwen3-8B-4bit", mlx())
    aliases = {"daily": "qwen3-8b"}
    for text in ("mlx-community/Qwen3-8B-4bit", "qwen3-8b", "daily"):
        assert find(models_dir, text, aliases).name == "mlx-community/Qwen3-8B-4bit"
    for text in ("~/models/mine", str(path), "mine"):
        assert find(models_dir, text, aliases).path == path


def test_the_last_part_of_a_name_will_do_where_it_means_nothing_else(models_dir: Path) -> None:
    for folder in ("one/twice", "two/twice", "mine", "daily"):
        write(models_dir / folder, mlx())
    cache("org/name", mlx())
    assert find(models_dir, "mine").name == "~/models/mine"
    assert find(models_dir, "daily", {"daily": "org/name"}).name == "org/name"
    for text in ("twice", "name"):
        with pytest.raises(ModelNotFound):
            find(models_dir, text)


def test_what_is_not_found_is_told_with_its_quantizations(models_dir: Path) -> None:
    cache("org/two", {"m-Q4_0.gguf": gguf(), "m-Q8_0.gguf": gguf(7)})
    with pytest.raises(ModelNotFound) as caught:
        find(models_dir, "org/two")
    assert caught.value.hint == "name one of `org/two:Q4_0`, `org/two:Q8_0`"
    with pytest.raises(ModelNotFound, match="`org/gone` is not among"):
        find(models_dir, "org/gone")


def test_removing_the_only_model_of_a_repository_leaves_nothing_of_it(models_dir: Path) -> None:
    cache("org/name", mlx())
    other = cache("org/other", mlx())
    write(shared_cache.folder() / ".locks" / "models--org--name", {"x.lock": b""})
    usage.record(named(models_dir)["org/name"].path)
    removal.remove(named(models_dir)["org/name"], models_dir)
    assert named(models_dir).keys() == {"org/other"}
    assert list(shared_cache.folder().rglob("models--org--name")) == []
    assert (other / "model.safetensors").read_bytes() == b"weights"


def test_removing_one_of_several_leaves_what_they_share(models_dir: Path) -> None:
    old = cache("org/name", mlx() | {"tokenizer.json": b"old"}, commit=OLD_COMMIT, ref=None)
    cache("org/name", mlx())
    removal.remove(named(models_dir)["org/name"], models_dir)
    folder = shared_cache.model_folder("org/name")
    assert named(models_dir).keys() == {f"org/name@{OLD_COMMIT}"}
    assert (old / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in (folder / "snapshots").iterdir()] == [OLD_COMMIT]
    assert list((folder / "refs").iterdir()) == []


def test_removing_one_quantization_frees_its_blob(models_dir: Path) -> None:
    cache("org/two", {"m-Q4_0.gguf": gguf(), "m-Q8_0.gguf": gguf(7)})
    removal.remove(named(models_dir)["org/two:Q4_0"], models_dir)
    assert named(models_dir).keys() == {"org/two"}
    assert len(list((shared_cache.model_folder("org/two") / "blobs").iterdir())) == 1


def test_removing_from_our_own_folder(models_dir: Path) -> None:
    write(models_dir / "mine", mlx())
    write(models_dir / "deep/er", {"x.gguf": gguf(), "y.gguf": gguf()})
    removal.remove(named(models_dir)["~/models/mine"], models_dir)
    removal.remove(named(models_dir)["~/models/deep/er/x.gguf"], models_dir)
    assert named(models_dir).keys() == {"~/models/deep/er/y.gguf"}
    removal.remove(named(models_dir)["~/models/deep/er/y.gguf"], models_dir)
    assert list(models_dir.iterdir()) == []


def test_other_tools_models_are_never_removed(home: Path, models_dir: Path) -> None:
    ollama(home, "registry.ollama.ai/library/m/latest", gguf())
    write(home / ".lmstudio/models/org/m", mlx())
    for model in installed_models(models_dir):
        with pytest.raises(ModelError, match="belongs to") as caught:
            removal.remove(model, models_dir)
        assert caught.value.hint == "remove it there"
    assert len(installed_models(models_dir)) == 2


def test_what_a_link_leads_to_is_never_removed(home: Path, models_dir: Path) -> None:
    elsewhere = write(home / "elsewhere" / "m", mlx())
    write(home / "elsewhere", {"x.gguf": gguf()})
    models_dir.mkdir()
    (models_dir / "x.gguf").symlink_to(home / "elsewhere" / "x.gguf")
    (models_dir / "linked").symlink_to(home / "elsewhere")
    for model in installed_models(models_dir):
        with pytest.raises(ModelError, match="is a link to somewhere else"):
            removal.remove(model, models_dir)
    assert (elsewhere / "config.json").exists()
    assert (home / "elsewhere" / "x.gguf").exists()
    assert named(models_dir).keys() == {"~/models/x.gguf"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": math.inf}},
        {"rope_scaling": {"type": "yarn", "factor": math.nan}},
        {"rope_scaling": [1]},
        {"quantization": 5},
        {"text_config": [1]},
        {"model_type": ["llama"], "architectures": 5},
    ],
)
def test_a_config_that_holds_anything_hides_no_model(changes: dict[str, Any], models_dir: Path) -> None:
    write(models_dir / "odd", mlx(**changes))
    write(models_dir / "whole", mlx())
    assert [path.name for path in sorted(model.path for model in installed_models(models_dir))] == [
        "odd",
        "whole",
    ]
