"""The frame of the command: imports, versions, errors and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server_process import METAL

HEAVY = ("aiohttp", "mlx", "mlx_lm", "transformers", "tokenizers", "pydantic", "huggingface_hub", "numpy")


def _metal(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([METAL, *args], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["serve", "--help"],
        ["chat", "--help"],
        ["pull", "--help"],
        ["config", "show"],
    ],
    ids=" ".join,
)
def test_commands_that_need_no_model_import_nothing_heavy(args):
    program = (
        "import sys\n"
        "from vllm_metal.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    sys.stderr.write('\\n'.join(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    imported = {name.split(".")[0] for name in done.stderr.split()}
    assert "vllm_metal" in imported
    assert not imported & set(HEAVY)


def test_an_unknown_option_names_the_nearest():
    done = _metal("serve", "--prot", "8001")
    assert done.returncode == 2
    assert "--port" in done.stderr


def test_a_users_error_is_one_line_and_a_hint():
    done = _metal("pull", "smolm2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: there is no model `smolm2`\n\nhint: did you mean `smollm2`?\n"


def test_an_error_of_ours_has_no_traceback_and_its_own_exit_code():
    program = (
        "import sys\n"
        "from vllm_metal.cli import main\n"
        "sys.argv = ['metal']\n"
        "def broken(): raise ZeroDivisionError('by nought')\n"
        "main.app = broken\n"
        "main.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 3
    assert done.stderr.startswith("error: internal error: ZeroDivisionError: by nought")
    assert "Traceback" not in done.stderr


needs_a_full_device = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")


@needs_a_full_device
def test_output_that_cannot_be_written_is_the_users_to_mend():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [METAL, "config", "path"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "standard output" in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [("config path", 0), ("pull smolm2", 1), ("chat --url http://127.0.0.1:1", 1)]
)
def test_streams_may_be_closed(arguments, code, tmp_path):
    program = (
        "import sys\n"
        "from vllm_metal.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as exc:\n"
        f"    open({str(tmp_path / 'code')!r}, 'w').write(str(exc.code))\n"
    )
    subprocess.run(
        f"exec '{sys.executable}' -c \"$PROGRAM\" {arguments} <&- >&- 2>&-",
        shell=True,
        env={**os.environ, "PROGRAM": program},
        check=True,
        timeout=60,
    )
    assert (tmp_path / "code").read_text() == str(code)


@needs_a_full_device
def test_talk_that_nobody_hears_changes_nothing(tmp_path):
    file = tmp_path / "config.toml"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([METAL, "config", "init", "--config", file], stderr=full, check=False)
    assert done.returncode == 0
    assert file.exists()


def test_characters_that_the_locale_lacks_are_written_all_the_same(tmp_path):
    done = subprocess.run(
        [METAL, "config", "path"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "METAL_CONFIG": "/caf\xe9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "/caf\\xe9\n")
