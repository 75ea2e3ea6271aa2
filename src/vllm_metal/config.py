"""The configuration: each setting is declared once below, and all that names settings is made from that."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vllm_metal import log, paths
from vllm_metal.errors import ConfigError
from vllm_metal.setting import Setting, setting, shown
from vllm_metal.toml_document import TomlDocument, render

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
    return setting(None, f"{what} where a request names none; unset takes the model's own", **known)


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
        0, "Longest prompt and answer in tokens; 0 takes the model's own", minimum=2, or_zero=True
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
        (), "Names the model answers to; empty means its own", flag="--served-model-name"
    )
    revision: str = setting("", "Branch, tag or commit on the hub; empty means the main branch")
    tokenizer: str = setting("", "Folder whose tokenizer is used; empty means the model's own", is_path=True)
    chat_template: str = setting(
        "", "Jinja file, or the template itself; empty means the model's own", is_path=True
    )
    tool_call_parser: str = setting(
        "auto",
        "Format of the model's tool calls; auto finds it, none leaves them in the text",
        required=True,
    )
    reasoning_parser: str = setting(
        "auto",
        "Format of the model's reasoning; auto finds it, none leaves it in the text",
        required=True,
    )
    aliases: Mapping[str, str] = setting({}, "Short names of your own, each for a model", kind=dict)
    dir: str = setting("", "Folder of models kept outside the hub's cache", is_path=True)
    temperature: float | None = _sampling_default("Temperature", kind=float, minimum=0, maximum=100)
    top_p: float | None = _sampling_default("Top-p", kind=float, above=0, maximum=1)
    top_k: int | None = _sampling_default("Top-k, 0 meaning off,", kind=int, minimum=0)
    min_p: float | None = _sampling_default("Min-p", kind=float, minimum=0, maximum=1)
    repetition_penalty: float | None = _sampling_default("Repetition penalty", kind=float, above=0, maximum=2)
    max_tokens: int | None = setting(
        None, "Most tokens of a chat's answer where a request names no limit", kind=int, minimum=1
    )

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What is set of `SamplingParams`, for requests that leave it open."""
        values = {name: getattr(self, name) for name in _SAMPLING_DEFAULTS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def store(self) -> Path:
        return Path(self.dir) if self.dir else paths.models_dir()


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


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value. `text` is like "flag --port", "environment METAL_LOG_LEVEL", "config.toml line 3"."""

    layer: Literal["default", "file", "environment", "flag"]
    text: str


_DEFAULT = Origin("default", "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    models: ModelsConfig = ModelsConfig()
    log: LogConfig = LogConfig()
    origins: Mapping[str, Origin] = field(default_factory=lambda: dict.fromkeys(SETTINGS, _DEFAULT))

    def value(self, key: str) -> object:
        """The value of `section.name`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)


def load(
    *,
    path: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Flag over environment over file over default; every value of every layer is checked.

    `flags` maps "section.key" to a value, None meaning not given. An empty variable counts as not set. A file
    named by `path` or `METAL_CONFIG` must exist. Raises `ConfigError`.
    """
    values = {key: each.default for key, each in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, _DEFAULT)
    layers = (_from_file(path, environ), _from_environment(environ), _from_flags(flags or {}))
    for layer in layers:
        for key, value, origin in layer:
            values[key], origins[key] = value, origin
    sections: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, each in SETTINGS.items():
        sections[each.section][each.name] = each.resolve(values[key])
    return Config(
        origins=MappingProxyType(origins),
        **{section: declaration(**sections[section]) for section, declaration in SECTIONS.items()},
    )


_Layer = Iterator[tuple[str, object, Origin]]


def locate(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file that `load` reads: `path`, else `METAL_CONFIG`, else the platform's place."""
    named = path or environ.get("METAL_CONFIG")
    return Path(paths.expand_home(str(named))) if named else paths.config_file()


def read(path: Path) -> TomlDocument:
    """Raises `FileNotFoundError`, and `ConfigError` for all else that is wrong."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise ConfigError(
            f"`{path}` is a folder, not a file", hint=f"name the file: `{path}/config.toml`"
        ) from None
    except OSError as exc:
        raise ConfigError(f"cannot read `{path}`: {exc.strerror}", hint=f"see `ls -l {path}`") from exc
    try:
        text = content.decode()
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        raise ConfigError(f"`{path}` line {line}: not UTF-8 text", hint="save the file as UTF-8") from exc
    try:
        return TomlDocument(text)
    except (ValueError, RecursionError) as exc:
        raise _syntax_error(path, text, str(exc)) from exc


def _syntax_error(path: Path, text: str, reason: str) -> ConfigError:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", reason)
    line = int(place[1]) if place else text.count("\n") + 1
    column = f", column {place[2]}" if place else ""
    reason = re.sub(r" \(at [^()]*\)$", "", reason)
    reason = re.sub(r"\('(\w+)',\)", r"`[\1]`", reason)
    return ConfigError(
        f"`{path}` line {line}{column}: {reason[:1].lower()}{reason[1:]}",
        hint='in TOML text needs quotes, as in `host = "127.0.0.1"`, and a name may stand only once',
    )


def _from_file(path: Path | None, environ: Mapping[str, str]) -> _Layer:
    file = locate(path, environ)
    try:
        document = read(file)
    except FileNotFoundError:
        if path or environ.get("METAL_CONFIG"):
            hint = f"`metal config init --config {file}` writes one"
            raise ConfigError(f"there is no config file `{file}`", hint=hint) from None
        return
    for section, table in document.data.items():
        where = f"`{file}` line {document.line_of(section)}: "
        if not isinstance(table, dict) or section not in SECTIONS:
            raise _not_a_section(section, table, where)
        for name, value in table.items():
            line = document.line_of(section, name) or document.line_of(section)
            where = f"`{file}` line {line}: "
            known = find(f"{section}.{name}", where)
            checked = known.check(value, f"{where}`{known.key}`")
            yield known.key, checked, Origin("file", f"{file.name} line {line}")


def _not_a_section(name: str, value: object, where: str) -> ConfigError:
    if name in SECTIONS:
        return ConfigError(f"{where}`{name}` must be a section", hint=f"write it as `[{name}]`")
    if not isinstance(value, dict):
        return ConfigError(f"{where}`{name}` is in no section", hint=_did_you_mean(name))
    near = _near(name, SECTIONS)
    known = ", ".join(f"`[{each}]`" for each in SECTIONS)
    hint = f"did you mean `[{near[0]}]`?" if near else f"the sections are {known}"
    return ConfigError(f"{where}`[{name}]` is not a known section", hint=hint)


def find(key: str, where: str = "") -> Setting:
    """Raises `ConfigError` that names the nearest key; `where` begins its message."""
    if key not in SETTINGS:
        raise ConfigError(f"{where}`{key}` is not a known key", hint=_did_you_mean(key))
    return SETTINGS[key]


def _did_you_mean(key: str) -> str:
    section, _, name = key.rpartition(".")
    keys = {each.name: each.key for each in SETTINGS.values()}
    here = [each.name for each in _settings_of(section)]
    near = [name] if name in keys else _near(name, here) or _near(name, keys)
    return f"did you mean `{keys[near[0]]}`?" if near else "`metal config show` lists every key"


def _near(word: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=1, cutoff=0.5)


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    for each in SETTINGS.values():
        for variable, reader in (*each.variables.items(), (each.environment, each.read)):
            if (text := environ.get(variable)) and (value := reader(text)) is not None:
                origin = Origin("environment", f"environment {variable}")
                yield each.key, each.check(value, f"`{variable}`"), origin


def _from_flags(flags: Mapping[str, object]) -> _Layer:
    for key, value in flags.items():
        if value is not None:
            each = SETTINGS[key]
            kind = "flag" if each.option.startswith("--") else "argument"
            yield key, each.check(value, f"`{each.option}`"), Origin("flag", f"{kind} {each.option}")


def default_file() -> str:
    """A config file that sets nothing and explains everything."""
    lines = ["# Configuration of vllm-metal. Take the `#` off a line to set it."]
    for section, declaration in SECTIONS.items():
        lines += ["", f"# {declaration.__doc__}", f"[{section}]"]
        for each in _settings_of(section):
            lines += ["", f"# {_meaning(each)}.", f"# {each.name} = {render(each.example)}"]
    return "\n".join(lines) + "\n"


def reference_markdown() -> str:
    """The page `docs/configuration.md`."""
    lines = [
        "# Configuration",
        "",
        "Settings come from one TOML file. `metal config path` prints where it is, `metal config init`",
        "writes one with every setting commented out, and `METAL_CONFIG` or `--config` names another.",
        "",
        "A flag wins over the environment, the environment over the file, the file over the default;",
        "`metal config show` tells which of them set each value. Lists in the environment are separated by",
        "commas; an empty variable counts as not set.",
    ]
    for section, declaration in SECTIONS.items():
        lines += ["", f"## [{section}]", "", f"{declaration.__doc__}", ""]
        lines += ["| Key | Default | Meaning | Environment |", "|---|---|---|---|"]
        for each in _settings_of(section):
            default = each.text(each.default)
            variables = ", ".join(f"`{name}`" for name in (each.environment, *each.variables))
            lines.append(f"| `{each.name}` | `{default}` | {_meaning(each)} | {variables} |")
    return "\n".join(lines) + "\n"


def _settings_of(section: str) -> Iterator[Setting]:
    return (each for each in SETTINGS.values() if each.section == section)


def _meaning(each: Setting) -> str:
    return f"{each.doc} ({each.rule})" if each.choices or each.limits else each.doc
