"""The commands of the README do what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from server_process import METAL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _steps(block: str) -> list[tuple[str, str]]:
    """The commands of a `console` block, each with the output shown below it."""
    # A command goes on in indented lines until its quotes are closed.
    found = re.finditer(r"^\$ ([^\n]*(?:\n    [^\n]*)*)\n((?:(?!\$ )[^\n]*\n)*)", block, re.MULTILINE)
    return [(command, output) for command, output in (match.groups() for match in found)]


STEPS = [step for block in _blocks("console") for step in _steps(block)]


def _run(command: list[str], server_url: str) -> str:
    """Output and errors together. What would go to port 8000 goes to the server of the tests."""
    port = server_url.rsplit(":", 1)[1]
    env = os.environ | {
        "PATH": f"{Path(METAL).parent}:{os.environ['PATH']}",
        "METAL_SERVER_PORT": port,
    }
    command = [part.replace("localhost:8000", f"localhost:{port}") for part in command]
    result = subprocess.run(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    return result.stdout


def _settled(text: str) -> str:
    """What differs from run to run, made alike."""
    return re.sub(r'"(id|created)": [^,]+', r'"\1": …', text)


@pytest.mark.parametrize(("command", "shown"), STEPS, ids=[command.split("\n")[0] for command, _ in STEPS])
def test_console(command, shown, server):
    output = _run(["bash", "-c", command], server.url)
    if shown:
        assert _settled(output) == _settled(shown)
    else:
        assert "error:" not in output


def test_the_console_blocks_were_read():
    assert len(STEPS) == 8
    assert sum(bool(shown) for _, shown in STEPS) == 4


def test_python(server):
    (program,) = _blocks("python")
    assert _run([sys.executable, "-c", program], server.url) == "The capital of France is Paris.\n"


def _lines(program: str) -> list[list[str]]:
    """The words of each line of the `sh` blocks that calls `program`."""
    lines = [shlex.split(line, comments=True) for block in _blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line[0] == program]


def test_make_commands_exist():
    commands = _lines("make")
    assert commands
    for command in commands:
        subprocess.run([*command, "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("line", _lines("metal"), ids=" ".join)
def test_metal_commands_exist(line):
    words = [word for word in line[1:] if not word.startswith("-")]
    text = subprocess.run([METAL, *words, "--help"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert all(word in text for word in line[1:] if word not in words)


def test_brew_commands_name_the_formula_and_one_tap():
    lines = _lines("brew")
    verbs = [line[1] for line in lines]
    assert verbs == ["tap", "install", "update", "upgrade", "uninstall", "untap"]
    named = {word for line in lines for word in line[2:] if re.fullmatch(r"[\w/-]+", word) and word[0] != "-"}
    assert named == {"local/metal", "local/metal/vllm-metal", "vllm-metal"}
    assert (ROOT / "Formula" / "vllm-metal.rb").exists()


def test_linked_files_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
