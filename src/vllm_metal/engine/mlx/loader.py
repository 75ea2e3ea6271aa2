"""Loads a model and its tokenizer from an MLX folder or a GGUF file, on the engine thread."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import mlx.nn as nn
from mlx.utils import tree_flatten
from transformers import AutoTokenizer

from vllm_metal.engine.mlx import bert, gguf, safetensors
from vllm_metal.engine.mlx import chat_template as chat_templates
from vllm_metal.engine.mlx.open_files import kept_open_files_limit
from vllm_metal.engine.mlx.tokenizer import Tokenizer
from vllm_metal.engine.sampling_params import SamplingParams
from vllm_metal.errors import InvalidRequest, MetalError, NotAModel, UnsupportedModel
from vllm_metal.hub import store
from vllm_metal.hub.model_config import context_length, quantization_name

with kept_open_files_limit():
    import mlx_lm.utils as mlx_lm_utils

    from vllm_metal.engine.mlx import adapted_layers, adapters, gguf_model, gguf_tokenizer, precision

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. Its arrays belong to the thread that loaded it."""

    model: nn.Module
    tokenizer: Tokenizer
    config: dict[str, Any]
    context_length: int
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, float]
    weight_bytes: int
    quantization: str | None
    dtype: str


def load(
    path: Path,
    *,
    dtype: str = "auto",
    tokenizer_path: Path | None = None,
    chat_template: str = "",
    adapter_folders: Sequence[Path] = (),
) -> LoadedModel:
    """Load the model at `path`, a folder or a GGUF file.

    `dtype` is "auto" or one of `precision.DTYPES`. `tokenizer_path` is a folder whose tokenizer replaces the
    model's own, `chat_template` a template that does or the path of one. Requests may use the adapters of
    `adapter_folders`, counted from 1. Raises NotAModel where files are missing or damaged, UnsupportedModel
    where this version cannot run them or an adapter does not fit, ConfigError for a bad template.
    """
    return fenced(path, _load, path, dtype, tokenizer_path, chat_template, adapter_folders)


def _load(
    path: Path,
    dtype: str,
    tokenizer_path: Path | None,
    chat_template: str,
    adapter_folders: Sequence[Path],
) -> LoadedModel:
    file = None
    requested_dtype = None if dtype == "auto" else precision.DTYPES[dtype]
    if path.is_dir():
        model, config, quantization, generation_config = load_folder(path)
        eos_token_ids = frozenset(_end_token_ids(config) + _end_token_ids(generation_config))
        default_dtype = None
    elif path.is_file():
        file = gguf.GGUFFile(path)
        model, config = gguf_model.load_model(file)
        quantization, generation_config = file.quantization, {}
        eos_token_ids = gguf_tokenizer.end_token_ids(file)
        default_dtype = precision.DTYPES[config["dtype"]]
    else:
        raise NotAModel(f"`{path}` does not exist")

    tokenizer = load_tokenizer(path if file is None else file, eos_token_ids, tokenizer_path, chat_template)
    precision.set_precision(model, requested_dtype, default=default_dtype)
    compute_dtype = precision.compute_dtype(model)
    if adapter_folders:
        adapted_layers.install(model, adapter_folders, precision.DTYPES[compute_dtype])
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=context_length(config),
        eos_token_ids=tokenizer.eos_token_ids,
        generation_defaults=_generation_defaults(generation_config),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        + adapters.of(model).num_bytes,
        quantization=quantization,
        dtype=compute_dtype,
    )


def load_tokenizer(
    source: Path | gguf.GGUFFile,
    eos_token_ids: Iterable[int] = (),
    tokenizer_path: Path | None = None,
    chat_template: str = "",
) -> Tokenizer:
    """That of a model, a folder or a GGUF file, unless `tokenizer_path` and `chat_template` replace parts of
    it. Raises as `load` does.
    """
    template = chat_templates.read(chat_template) if chat_template else None
    if isinstance(source, gguf.GGUFFile) and tokenizer_path is None:
        tokenizer = gguf_tokenizer.load_tokenizer(source, chat_template=template)
    else:
        path = source.path if isinstance(source, gguf.GGUFFile) else source
        tokenizer = _load_tokenizer(tokenizer_path or path, eos_token_ids, template)
    if template is not None:
        chat_templates.check(tokenizer.template_renderer, chat_template)
    return tokenizer


def load_folder(path: Path) -> tuple[nn.Module, dict[str, Any], str | None, dict[str, Any]]:
    """The model, whose weights are read when they are needed, its config, quantization and generation config.

    Raises as `load` does.
    """
    store.inspect(path)
    config = store.read_json(path / "config.json")
    generation_config = {}
    if (path / "generation_config.json").exists():
        generation_config = store.read_json(path / "generation_config.json")
    check_architecture(config)
    safetensors.check_files(path)
    model, full_config = fenced(path, mlx_lm_utils.load_model, path, lazy=True)
    # mlx-lm lets the generation config's end tokens replace the model's; both count here.
    full_config["eos_token_id"] = _end_token_ids(config)
    return model, full_config, quantization_name(full_config), generation_config


def check_architecture(config: dict[str, Any]) -> None:
    """Raises UnsupportedModel."""
    model_type = str(config.get("model_type"))
    if model_type in bert.MODEL_TYPES:
        return
    if "model_file" in config:
        raise UnsupportedModel(
            f"model architecture `{model_type}` comes as Python code in the model folder, which is never run",
            hint="look for a version of the model that needs no code of its own",
        )
    modules = [mlx_lm_utils.MODEL_REMAPPING.get(model_type, model_type)]
    for architecture in config.get("architectures") or ():
        modules.append(mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING.get((model_type, architecture), ""))
    if not any(_is_mlx_lm_model(module) for module in modules):
        raise UnsupportedModel(
            f"model architecture `{model_type}` is not supported",
            hint="models that work with this version of mlx-lm work here; look for another model or update",
        )


def _is_mlx_lm_model(module: str) -> bool:
    return module.isidentifier() and importlib.util.find_spec(f"mlx_lm.models.{module}") is not None


def fenced(path: Path, action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Do what reads a model's files, where every failure means that this model cannot be run."""
    try:
        return action(*arguments, **options)
    except MetalError:
        raise
    except Exception as exc:
        _refuse(f"`{path}` cannot be loaded", exc)


def _refuse(what: str, exc: Exception) -> NoReturn:
    reason = " ".join(str(exc).split())
    shortened = reason if len(reason) <= 300 else reason[:300] + "…"
    raise UnsupportedModel(
        f"{what}: {shortened or type(exc).__name__}",
        hint="the files may be incomplete, or made for a newer version",
    ) from exc


def _load_tokenizer(path: Path, eos_token_ids: Iterable[int], chat_template: str | None) -> Tokenizer:
    if not any(next(path.glob(name), None) for name in _TOKENIZER_FILES):
        raise NotAModel(
            f"`{path}` holds no tokenizer",
            hint="pass the folder of one with `--tokenizer`, or fetch the model again with `metal pull`",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # transformers raises every kind of exception for damaged files.
    except Exception as exc:
        _refuse(f"the tokenizer of `{path}` cannot be loaded", exc)
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            f"the tokenizer of `{path}` has no `tokenizer.json` form", hint="pass one with `--tokenizer`"
        )
    return Tokenizer(tokenizer, eos_token_ids=eos_token_ids, chat_template=chat_template)


def _end_token_ids(config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _generation_defaults(generation_config: dict[str, Any]) -> dict[str, float]:
    if generation_config.get("do_sample") is False:
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as exc:
        logger.warning("the sampling defaults of `generation_config.json` are ignored: %s", exc)
        return {}
    return defaults
