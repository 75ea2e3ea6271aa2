"""The configuration: what every setting is, and where each value comes from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vllm_metal import paths
from vllm_metal.errors import ConfigError
from vllm_metal.setting import Setting
from vllm_metal.settings import (
    MODEL_SETTINGS,
    SECTIONS,
    SETTINGS,
    EngineConfig,
    LogConfig,
    ModelsConfig,
    ServerConfig,
)
from vllm_metal.toml_document import TomlDocument, dotted, render, undotted

_OF_DEFAULT_MODEL = [key for key, each in SETTINGS.items() if each.scope == "default model"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value. `text` is like "flag --port", "environment METAL_LOG_LEVEL", "config.toml line 3"."""

    layer: Literal["default", "file", "environment", "flag"]
    text: str


_DEFAULT = Origin("default", "default")

ModelSection = Mapping[str, tuple[object, Origin]]
"""What one `[models."name"]` sets, by the key of the setting that it goes before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    origins: Mapping[str, Origin] = field(default_factory=lambda: dict.fromkeys(SETTINGS, _DEFAULT))
    model_sections: Mapping[str, ModelSection] = field(default_factory=dict)

    def value(self, key: str) -> object:
        """The value of `section.name`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def all_values(self) -> list[tuple[Setting, object, Origin]]:
        """Every setting with its value and who set it; then what the sections of models set."""
        return [
            *((each, self.value(key), self.origins[key]) for key, each in SETTINGS.items()),
            *(
                (_of_model(SETTINGS[key], model), value, origin)
                for model, section in self.model_sections.items()
                for key, (value, origin) in section.items()
            ),
        ]

    def for_model(self, name: str, *, synonyms: Collection[str] = ()) -> Config:
        """What holds for the model `name`, as if it were the default one.

        Its section goes before the rest of the file, but not before flags and variables. What is set of the
        default model is not for others, and these are not preloaded. `synonyms` are other names of the same
        model, under which it may be the default or have its section.
        """
        names = (name, *synonyms)
        values = {key: self.value(key) for key in SETTINGS}
        origins = dict(self.origins)
        if self.models.default not in names:
            for key in ("models.served_names", *_OF_DEFAULT_MODEL):
                values[key], origins[key] = SETTINGS[key].default, _DEFAULT
            values |= {"models.default": name, "models.preload": False}
        elif origins["models.ttl"] == _DEFAULT:
            values["models.ttl"] = 0.0
        # The first in the file, whatever the model is called this time.
        section = next((each for called, each in self.model_sections.items() if called in names), {})
        for key, (value, origin) in section.items():
            if origins[key].layer in ("default", "file"):
                values[key], origins[key] = value, origin
        return _config(values, origins, self.model_sections)


def load(
    *,
    path: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Flag over environment over file over default; every value of every layer is checked.

    `flags` maps "section.key" to a value, None meaning not given; a name that the configured model is served
    by means that model. An empty variable counts as not set. A file named by `path` or `METAL_CONFIG` must
    exist. Raises `ConfigError`.
    """
    values = {key: each.resolve(each.default) for key, each in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, _DEFAULT)
    model_sections: dict[str, dict[str, tuple[object, Origin]]] = {}
    layers = (_from_file(path, environ), _from_environment(environ), _from_flags(flags or {}))
    for layer in layers:
        for known, checked, origin in layer:
            value = known.resolve(checked)
            if known.key == "models.default" and origin.layer == "flag" and _is_served_as(value, values):
                continue
            if known.model:
                section = model_sections.setdefault(known.model, {})
                section[MODEL_SETTINGS[known.name].key] = (value, origin)
            else:
                values[known.key], origins[known.key] = value, origin
    return _config(values, origins, model_sections)


def _is_served_as(name: object, values: Mapping[str, object]) -> bool:
    """Whether it is what the configured model is called."""
    served_names: Any = values["models.served_names"]
    return name in served_names


def _config(
    values: Mapping[str, object],
    origins: Mapping[str, Origin],
    model_sections: Mapping[str, ModelSection],
) -> Config:
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, each in SETTINGS.items():
        sections[each.section][each.name] = values[key]
    return Config(
        origins=MappingProxyType(origins),
        model_sections=MappingProxyType(model_sections),
        **{section: declaration(**sections[section]) for section, declaration in SECTIONS.items()},
    )


_Layer = Iterator[tuple[Setting, object, Origin]]


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
        hint='in TOML text needs quotes, as in `host = "127.0.0.1"`, so does a name with `/` or `.`, as in '
        '`[models."org/name"]`, and a name may stand only once',
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
        for key_path, value in _entries(section, table):
            line = document.line_of(*key_path)
            where = f"`{file}` line {line}: "
            known = _find(key_path, where)
            checked = known.check(value, f"{where}`{known.key}`")
            yield known, checked, Origin("file", f"{file.name} line {line}")


def _entries(section: str, table: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """The path of each key and its value; a table in `[models]` that is no setting is a model's section."""
    for name, value in table.items():
        if section == "models" and isinstance(value, dict) and f"models.{name}" not in SETTINGS:
            yield from (((section, name, key), item) for key, item in value.items())
        else:
            yield (section, name), value


def _not_a_section(name: str, value: object, where: str) -> ConfigError:
    if name in SECTIONS:
        return ConfigError(f"{where}`{name}` must be a section", hint=f"write it as `[{name}]`")
    if not isinstance(value, dict):
        return ConfigError(f"{where}`{dotted([name])}` is in no section", hint=_did_you_mean(name))
    near = [f"models.{render(name)}"] if "/" in name else _near(name, SECTIONS)
    known = ", ".join(f"`[{each}]`" for each in SECTIONS)
    hint = f"did you mean `[{near[0]}]`?" if near else f"the sections are {known}"
    return ConfigError(f"{where}`[{dotted([name])}]` is not a known section", hint=hint)


def find(key: str) -> Setting:
    """The setting of `section.name` or `models."a model".name`, where the quotes may be left out.

    Raises `ConfigError` that names the nearest key.
    """
    with suppress(ValueError):
        if len(path := undotted(key)) <= 3:
            return _find(path)
    section, *rest = key.split(".", 1)
    return _find((section, *(part for each in rest for part in each.rsplit(".", 1))))


def _find(path: tuple[str, ...], where: str = "") -> Setting:
    """`where` begins the message of what is raised."""
    key = dotted(path)
    if key in SETTINGS:
        return SETTINGS[key]
    match path:
        case ("models", model, name) if f"models.{model}" not in SETTINGS:
            if name in MODEL_SETTINGS and model.strip():
                return _of_model(MODEL_SETTINGS[name], model)
            raise ConfigError(f"{where}`{key}` is not a known key", hint=_model_hint(model, name))
        case ("models", model) if "/" in model:
            hint = f"name a key of that model, as in `{dotted((*path, 'ttl'))}`"
            raise ConfigError(f"{where}`{key}` is not a known key", hint=hint)
    raise ConfigError(f"{where}`{key}` is not a known key", hint=_did_you_mean(key))


def _of_model(each: Setting, model: str) -> Setting:
    return replace(each, section="models", model=model)


def _model_hint(model: str, name: str) -> str:
    if not model.strip():
        return 'name the model, as in `[models."org/name"]`'
    if near := _near(model, ["aliases", "adapters"]):
        return f"did you mean `[models.{near[0]}]`?"
    if near := _near(name, MODEL_SETTINGS):
        return f"did you mean `{dotted(('models', model, near[0]))}`?"
    return f"a model's section may set {', '.join(MODEL_SETTINGS)}; a name with a dot in it needs quotes"


def _did_you_mean(key: str) -> str:
    section, _, name = key.rpartition(".")
    if section in SETTINGS:
        return f"did you mean `{section}`?"
    keys = {each.name: each.key for each in SETTINGS.values()}
    here = [each.name for each in SETTINGS.values() if each.section == section]
    near = [name] if name in keys else _near(name, here) or _near(name, keys)
    return f"did you mean `{keys[near[0]]}`?" if near else "`metal config show` lists every key"


def _near(word: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, known, n=1, cutoff=0.5)


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    for each in SETTINGS.values():
        for variable, reader in (*each.variables.items(), (each.environment, each.read)):
            if (text := environ.get(variable)) and (value := reader(text)) is not None:
                origin = Origin("environment", f"environment {variable}")
                yield each, each.check(value, f"`{variable}`"), origin


def _from_flags(flags: Mapping[str, object]) -> _Layer:
    for key, value in flags.items():
        if value is not None:
            each = SETTINGS[key]
            kind = "flag" if each.option.startswith("--") else "argument"
            given = tuple(value) if isinstance(value, list) else value
            yield each, each.check(given, f"`{each.option}`"), Origin("flag", f"{kind} {each.option}")
