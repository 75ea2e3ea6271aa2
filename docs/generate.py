"""Writes the generated pages of docs/ from the code; `--check` fails if one is out of date."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import typer.main
from typer.cli import get_docs_for_click

from vllm_metal import config_pages
from vllm_metal.api import reference
from vllm_metal.cli import launcher
from vllm_metal.cli.main import app
from vllm_metal.server.routes import ROUTES


def commands_markdown() -> str:
    """The page `docs/cli.md`: what `--help` says of every command."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="metal", **command.context_settings)
    page = get_docs_for_click(obj=command, ctx=context, name="metal", title="Commands")
    for name in launcher.OWN_COMMANDS:
        # Of these typer knows the name alone.
        section = "\n".join(_section(launcher.own_parser(name), "##"))
        page = re.sub(
            rf"## `metal {name}`\n.*?(?=^## )", lambda _, new=section: new + "\n", page, flags=re.S | re.M
        )
    # Help texts escape what rich would take for markup.
    return page.replace("\\[", "[").rstrip() + "\n"


def _section(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    """What the parser's `--help` says, as typer writes it. argparse has no public way to ask."""
    its_help, *actions = parser._actions
    groups = [each for each in actions if isinstance(each, argparse._SubParsersAction)]
    options = [each for each in actions if each.option_strings]
    usage = " ".join([parser.prog, "[OPTIONS]", *(f"{group.metavar} [ARGS]..." for group in groups)])
    yield from (f"{heading} `{parser.prog}`", "", f"{parser.description}", "")
    yield from ("**Usage**:", "", "```console", f"$ {usage}", "```", "", "**Options**:", "")
    for option in [*options, its_help]:
        yield f"* `{_signature(option)}`: {option.help}"
    yield ""
    for group in groups:
        yield from ("**Verbs**:", "")
        yield from (f"* `{each.dest}`: {each.help}" for each in group._choices_actions)
        yield ""
        for verb in group.choices.values():
            if len(verb._actions) > 1:
                yield from _section(verb, heading + "#")


def _signature(option: argparse.Action) -> str:
    value = "" if option.nargs == 0 else f" {option.metavar}"
    return ", ".join(option.option_strings) + value


def api_markdown() -> str:
    """The page `docs/api.md`: what the wire types say of every route and field."""
    return reference.markdown(operation for operation, _ in ROUTES)


PAGES = {
    "configuration.md": config_pages.reference_markdown,
    "cli.md": commands_markdown,
    "api.md": api_markdown,
}


def main(check: bool) -> int:
    stale = 0
    for name, render in PAGES.items():
        page = Path(__file__).with_name(name)
        text = render()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.stderr.write(f"docs/{name} is out of date; run `make docs`\n")
            stale = 1
        else:
            page.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
