"""The `metal` of a keg: what it runs itself, and that packages have no part in it."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer.main

from keg import PYTHON, Keg
from server_process import METAL
from vllm_metal import __version__
from vllm_metal.cli import launcher
from vllm_metal.cli.main import app


@pytest.fixture
def keg(tmp_path) -> Keg:
    return Keg(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["setup", "--help"],
        ["setup", "--print-lock"],
        ["service", "--help"],
        ["service", "plist"],
        ["uninstall", "--help"],
        ["uninstall", "--yes"],
    ],
    ids=" ".join,
)
def test_own_commands_need_nothing_but_the_standard_library(keg, arguments):
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(keg.package.parent)!r})\n"
        "from vllm_metal.cli.launcher import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('modules:', *sys.modules, file=sys.stderr)\n"
    )
    command = [PYTHON, "-I", "-S", "-c", program, *arguments]
    done = subprocess.run(command, env=keg.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = done.stderr.rpartition("modules:")[2].split()
    packages = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    assert packages == {"vllm_metal", "__main__"}


def test_it_lists_the_commands_of_the_full_program_in_its_words():
    commands = typer.main.get_command(app).commands
    for name in launcher.OWN_COMMANDS:
        assert commands.pop(name).help == launcher.own_command(name).HELP
    words = {name: command.help.split("\n\n")[0].replace("\n", " ") for name, command in commands.items()}
    assert words == launcher.VENV_COMMANDS


def test_its_help_names_every_command(keg):
    done = keg.run("--help")
    assert done.returncode == 0
    for name in (*launcher.OWN_COMMANDS, *launcher.VENV_COMMANDS):
        assert re.search(rf"^    {name} +\S", done.stdout, re.MULTILINE)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)


@pytest.mark.parametrize("name", launcher.OWN_COMMANDS)
def test_every_word_of_help_is_a_sentence(name):
    for parser in _parsers(launcher.own_parser(name)):
        actions = [action for action in parser._actions if action.option_strings]
        for text in (parser.description, *(action.help for action in actions)):
            assert re.fullmatch(r"[A-Z].*\.", text)


def test_without_a_command_it_helps_and_fails_as_the_full_program_does(keg):
    assert keg.run().returncode == subprocess.run([METAL], capture_output=True, check=False).returncode == 2
    assert keg.run().stdout == keg.run("--help").stdout


@pytest.mark.parametrize("metal", ["keg's", "full"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["setup", "--bogus"], "error: unrecognized arguments: --bogus\n\nhint: see `metal setup --help`\n"),
        (["setup", "--for"], "error: unrecognized arguments: --for\n\nhint: see `metal setup --help`\n"),
        (
            ["setup", "--venv"],
            "error: argument --venv: expected one argument\n\nhint: see `metal setup --help`\n",
        ),
    ],
)
def test_own_commands_have_one_command_line(keg, metal, arguments, words):
    program = str(keg.metal) if metal == "keg's" else METAL
    done = subprocess.run([program, *arguments], env=keg.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", words)


def test_an_unknown_command_makes_no_venv(keg):
    done = keg.run("srve")
    assert done.returncode == 2
    assert "'srve'" in done.stderr
    assert list(keg.home.iterdir()) == []


def test_versions_agree(keg):
    assert keg.run("--version").stdout == f"vllm-metal {__version__}\n"
