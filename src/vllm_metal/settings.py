"""The settings: each is declared once below, and all that names settings is made from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_metal import log, paths
from vllm_metal.errors import ConfigError
from vllm_metal.setting import Setting, setting, shown

EXIT_TIMEOUT_S = 60
"""What launchd gives the service to stop: the plist's `ExitTimeOut`."""


def _one_key(text: str) -> object:
    return [text]


def _use_mlx(text: str) -> object:
    if text not in ("0", "1"):
        raise ConfigError(f"`VLLM_METAL_USE_MLX` must be 0 or 1, got {shown(text)}", hint="0 means the CPU")
    return "cpu" if text == "0" else None


def _memory_fraction(text: str) -> object:
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        return text


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def _sampling_default(what: str, **known: Any) -> Any:
    doc = f"{what} where a request names none; unset takes the model's own"
    return setting(None, doc, scope="every model", **known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and to whom."""

    host: str = setting("127.0.0.1", "Address to listen on", required=True)
    port: int = setting(8000, "Port to listen on, 0 for any free one", minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = setting(
        (),
        "Keys that clients must send one of; empty lets everybody in",
        secret=True,
        flag="--api-key",
        variables={"VLLM_API_KEY": _one_key},
    )
    uds: str = setting("", "Unix socket to listen on in place of host and port", is_path=True)
    ssl_certfile: str = setting("", "Certificate file; empty means plain HTTP", is_path=True)
    ssl_keyfile: str = setting("", "Private key file, if not in the certificate file", is_path=True)
    ssl_ca_certs: str = setting("", "File of authorities that sign client certificates", is_path=True)
    ssl_cert_reqs: int = setting(
        0, "Client certificates: 0 not asked for, 1 optional, 2 required", minimum=0, maximum=2
    )
    drain_timeout: float = setting(
        30.0,
        "Seconds that running requests get to finish when the server stops",
        minimum=0,
        maximum=EXIT_TIMEOUT_S,
        reason=f"since launchd kills a service that outstays its `ExitTimeOut` of {EXIT_TIMEOUT_S} s",
    )
    max_queued: int = setting(256, "Requests held at once; one more is answered 429", minimum=1)
    request_timeout: float = setting(
        0.0, "Seconds that a request may take if it brings no `timeout`; 0 means no limit", minimum=0
    )
    max_requests_per_minute: int = setting(
        0, "Requests that each API key may send a minute; 0 means no limit", minimum=0
    )
    max_concurrent_requests: int = setting(
        0, "Requests that each API key may run at once; 0 means no limit", minimum=0
    )
    allowed_hosts: tuple[str, ...] = setting((), "Host names accepted beside those of this machine")
    allowed_origins: tuple[str, ...] = setting((), "Web origins let in by CORS; empty turns CORS off")
    trust_request_chat_template: bool = setting(False, "Whether a request may bring its own chat template")
    max_body_bytes: int = setting(32 * 1024 * 1024, "Largest request body, in bytes", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How models run."""

    device: str = setting(
        "auto",
        "Where models run; auto takes the GPU if there is one",
        choices=("auto", "gpu", "cpu"),
        variables={"VLLM_METAL_USE_MLX": _use_mlx, "VLLM_MLX_DEVICE": str},
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations; auto takes the model's own",
        choices=("auto", "float32", "float16", "bfloat16"),
        synonyms={"half": "float16", "float": "float32"},
    )
    max_model_len: int = setting(
        0,
        "Longest prompt and answer in tokens; 0 takes the model's own",
        scope="every model",
        minimum=2,
        or_zero=True,
    )
    max_output_tokens: int = setting(
        0,
        "Most tokens of any answer, whatever its request asks for; 0 means no such limit",
        scope="every model",
        minimum=0,
    )
    max_num_seqs: int = setting(64, "Requests that run in one batch", minimum=1, maximum=1024)
    max_num_batched_tokens: int = setting(0, "Tokens of one engine step; 0 lets the device decide", minimum=0)
    max_step_stretch: float = setting(
        2.0,
        "How many times longer than without prompts a step may take on average while prompts are prefilled",
        minimum=1,
        maximum=100,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of the device's memory for weights and KV cache",
        above=0,
        maximum=1,
        variables={"VLLM_METAL_MEMORY_FRACTION": _memory_fraction},
    )
    seed: int | None = setting(
        None, "Seed of requests that bring none; unset means random", kind=int, minimum=0, maximum=2**63 - 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """Which model is served, and from where."""

    default: str = setting(
        "mlx-community/Qwen2.5-0.5B-Instruct-4bit",
        "Model served when none is named",
        required=True,
        flag="MODEL",
    )
    served_names: tuple[str, ...] = setting(
        (), "Names the default model answers to; empty means its own", flag="--served-model-name"
    )
    revision: str = setting(
        "", "Branch, tag or commit on the hub; empty means the main branch", scope="default model"
    )
    tokenizer: str = setting(
        "",
        "Folder whose tokenizer is used; empty means the model's own",
        scope="default model",
        is_path=True,
    )
    chat_template: str = setting(
        "",
        "Jinja file, or the template itself; empty means the model's own",
        scope="default model",
        is_path=True,
    )
    tool_call_parser: str = setting(
        "auto",
        "Format of the model's tool calls; auto finds it, none leaves them in the text",
        scope="default model",
        required=True,
    )
    reasoning_parser: str = setting(
        "auto",
        "Format of the model's reasoning; auto finds it, none leaves it in the text",
        scope="default model",
        required=True,
    )
    adapters: Mapping[str, str] = setting(
        {},
        "LoRA adapters of the model, each a folder, served by names of their own",
        scope="default model",
        kind=dict,
        is_path=True,
        flag="--lora-modules",
    )
    preload: bool = setting(
        True, "Whether the model is loaded at start, not by its first request", scope="default model"
    )
    pinned: bool = setting(
        False, "Whether the model stays loaded when idle or in another's way", scope="default model"
    )
    ttl: float = setting(
        1800.0,
        "Seconds without requests after which a model is unloaded; 0 means never; "
        "the default model stays until this is set",
        scope="every model",
        minimum=0,
    )
    aliases: Mapping[str, str] = setting({}, "Short names of your own, each for a model", kind=dict)
    dir: str = setting("", "Folder of models kept outside the hub's cache", is_path=True)
    temperature: float | None = _sampling_default("Temperature", kind=float, minimum=0, maximum=100)
    top_p: float | None = _sampling_default("Top-p", kind=float, above=0, maximum=1)
    top_k: int | None = _sampling_default("Top-k, 0 meaning off,", kind=int, minimum=0)
    min_p: float | None = _sampling_default("Min-p", kind=float, minimum=0, maximum=1)
    repetition_penalty: float | None = _sampling_default("Repetition penalty", kind=float, above=0, maximum=2)
    max_tokens: int | None = setting(
        None,
        "Most tokens of a chat's answer where a request names no limit",
        scope="every model",
        kind=int,
        minimum=1,
    )

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What is set of `SamplingParams`, for requests that leave it open."""
        values = {name: getattr(self, name) for name in _SAMPLING_DEFAULTS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def store(self) -> Path:
        return Path(self.dir).absolute() if self.dir else paths.models_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged."""

    level: str = setting("info", "Least severe records kept", choices=log.LEVELS, flag="--log-level")
    file: str = setting(
        "", "File to log to; empty means standard error, and for the service a file of its own", is_path=True
    )


SECTIONS = {"server": ServerConfig, "engine": EngineConfig, "models": ModelsConfig, "log": LogConfig}

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        f"{section}.{each.name}": Setting(
            section, each.name, getattr(declaration(), each.name), **each.metadata
        )
        for section, declaration in SECTIONS.items()
        for each in fields(declaration)
    }
)

MODEL_SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {each.name: each for each in SETTINGS.values() if each.scope != "daemon"}
)
"""What a section `[models."name"]` may set, by its name there."""
