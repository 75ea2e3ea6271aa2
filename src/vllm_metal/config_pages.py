"""What is written of the settings for people: the file that `metal config init` makes, and the reference."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vllm_metal.setting import Setting
from vllm_metal.settings import MODEL_SETTINGS, SECTIONS, SETTINGS
from vllm_metal.toml_document import render


def _names_of(scope: str) -> str:
    *names, last = (f"`{each.name}`" for each in MODEL_SETTINGS.values() if each.scope == scope)
    return f"{', '.join(names)} and {last}"


_ABOUT_MODEL_SECTIONS = textwrap.wrap(
    'What holds for one model alone goes in a section `[models."name"]`, where the name is a repository, a '
    "path or a short name that is no key of `[models]`. Outside of such sections "
    f"{_names_of('every model')} hold for every model, and {_names_of('default model')} for the default "
    "model alone.",
    width=105,
    break_on_hyphens=False,
)

_MODEL_SECTION_EXAMPLE = """\
```toml
[models."mlx-community/Qwen3-4B-4bit"]
max_model_len = 16384
temperature = 0.6
ttl = 600
```

`metal config set models.mlx-community/Qwen3-4B-4bit.ttl 600` writes such a section too. The model may be
called there by any of its names. A flag or a variable wins over it, as over the rest of the file."""


def default_file() -> str:
    """A config file that sets nothing and explains everything."""
    lines = ["# Configuration of vllm-metal. Take the `#` off a line to set it."]
    for section, declaration in SECTIONS.items():
        lines += ["", f"# {declaration.__doc__}", f"[{section}]"]
        for each in _settings_of(section):
            lines += ["", f"# {_meaning(each)}.", f"# {each.name} = {render(each.example)}"]
        if section == "models":
            lines += ["", *(f"# {line}" for line in _ABOUT_MODEL_SECTIONS)]
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
        if section == "models":
            lines += ["", '## [models."name"]', "", *_ABOUT_MODEL_SECTIONS, "", _MODEL_SECTION_EXAMPLE]
    return "\n".join(lines) + "\n"


def _settings_of(section: str) -> Iterator[Setting]:
    return (each for each in SETTINGS.values() if each.section == section)


def _meaning(each: Setting) -> str:
    return f"{each.doc} ({each.rule})" if each.choices or each.limits else each.doc
