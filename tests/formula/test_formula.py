"""The formula says what brew wants to hear, agrees with the rest of the project, and its keg works alone."""

from __future__ import annotations

import plistlib
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from brew_prefix import ROOT, STUB, BrewPrefix, require
from vllm_metal.service import plist, requirements

FORMULA = ROOT / "Formula" / "vllm-metal.rb"

#: What brew's service block knows.
SERVICE_KEYS = re.compile(
    "cron|environment_variables|error_log_path|input_path|interval|keep_alive|launch_only_once|log_path"
    "|macos_legacy_timers|name|nice|process_type|require_root|restart_delay|root_dir|run|run_at_load|run_type"
    "|sockets|stop_timeout|throttle_interval|working_dir"
)

#: In the order that brew's style wants.
STANZAS = re.compile("desc homepage (url sha256 )?license (head )?(depends_on )+install caveats service test")


@pytest.fixture(scope="module")
def brew(tmp_path_factory) -> BrewPrefix:
    require("ruby")
    brew = BrewPrefix(tmp_path_factory.mktemp("brew"))
    brew.install()
    return brew


@pytest.fixture(scope="module")
def formula(brew) -> dict[str, Any]:
    return brew.describe()


@pytest.fixture
def metal(brew, tmp_path):
    """Runs the keg's `metal` with nothing but a home."""

    def run(*arguments: str) -> str:
        command = [str(brew.metal), *arguments]
        env = {"HOME": str(tmp_path)}
        return subprocess.run(command, env=env, cwd="/", stdout=subprocess.PIPE, text=True, check=True).stdout

    return run


def test_ruby_parses_the_formula():
    subprocess.run([require("ruby"), "-wc", FORMULA], check=True, capture_output=True)


def test_style():
    config = ROOT / "tests" / "formula" / "rubocop.yml"
    command = [require("rubocop"), "--config", config, "--cache", "false", FORMULA, STUB]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stanzas_are_in_brews_order():
    found = re.findall(r"^  (?:def )?(?!end$)([a-z]\w*)", FORMULA.read_text(), re.MULTILINE)
    assert STANZAS.fullmatch(" ".join(found))


def test_description_is_as_brew_wants_it(formula):
    ((description,),) = formula["desc"]
    assert len(description) <= 80
    assert description[0].isupper()
    assert not re.match(r"(?i)(an?|the|vllm-metal)\b", description)
    assert not description.endswith(".")


def test_needs_a_mac_that_mlx_runs_on(formula):
    assert formula["depends_on"] == [[{"arch": "arm64"}], [{"macos": "sonoma"}], ["python@3.12"]]


def test_head_is_the_taps_own_checkout(brew, formula):
    assert formula["head"] == [[f"file://{brew.tap}", {"using": "git", "branch": "main"}]]


def test_licence_and_description_are_the_projects(formula):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert formula["license"] == [[project["license"]]]
    assert formula["desc"] == [[project["description"]]]


def test_brew_knows_all_keys_of_the_service(formula):
    assert all(map(SERVICE_KEYS.fullmatch, formula["service"]))


def test_service_is_that_of_metal_service(brew, formula):
    ours = plistlib.loads(plist.render(brew.metal))
    service = formula["service"]
    assert service["name"] == {"macos": ours["Label"]}
    assert service["run"] == ours["ProgramArguments"]
    assert service.get("run_at_load", True) is ours["RunAtLoad"]
    assert service["keep_alive"] == {"successful_exit": ours["KeepAlive"]["SuccessfulExit"]}
    assert service["process_type"] == ours["ProcessType"].lower()
    assert service["throttle_interval"] == ours["ThrottleInterval"]
    assert service["stop_timeout"] == ours["ExitTimeOut"]
    for path in (service["environment_variables"]["PATH"], ours["EnvironmentVariables"]["PATH"]):
        assert path.startswith(f"{brew.path}/bin:")
        assert path.endswith("/usr/bin:/bin:/usr/sbin:/sbin")


def test_both_streams_of_the_service_go_to_one_log_file(brew, formula):
    service = formula["service"]
    assert service["log_path"] == service["error_log_path"] == f"{brew.path}/var/log/vllm-metal.log"


def test_caveats_name_only_commands_that_exist(formula, metal):
    commands = set(re.findall(r"\bmetal (\w+)", formula["caveats"]))
    assert commands == {"serve", "setup", "uninstall"}
    for command in commands:
        assert re.search(rf"^ +{command}\b", metal("--help"), re.MULTILINE)


def test_launcher_stays_right_when_python_and_formula_are_upgraded(brew):
    shebang, *rest = brew.metal.read_text().splitlines()
    assert shebang == f"#!{brew.path}/opt/python@3.12/bin/python3.12 -I"
    assert "Cellar" not in "".join(rest)


def test_keg_holds_nothing_but_code_tables_locks_and_the_launcher(brew):
    keg = brew.opt.resolve()
    files = [path.relative_to(keg) for path in keg.rglob("*") if path.is_file()]
    assert {str(path.parent) for path in files if path.parts[0] != "libexec"} == {"bin"}
    kinds = {path.suffix for path in files if path.parts[0] == "libexec"}
    # The tables of GGUF's types are the one .safetensors.
    assert kinds - {".pyc"} == {".py", ".lock", ".template", ".toml", ".typed", ".safetensors"}


def test_keg_prints_its_version_and_help(metal):
    assert re.fullmatch(r"vllm-metal \d+\.\d+\.\d+\n", metal("--version"))
    assert "serve" in metal("--help")


def test_keg_prints_the_lock(metal):
    assert metal("setup", "--print-lock") == requirements.lock().text


def test_keg_prints_its_plist(brew, metal):
    arguments = plistlib.loads(metal("service", "plist").encode())["ProgramArguments"]
    assert arguments == [str(brew.metal), "serve"]


def test_formulas_own_test(brew):
    brew.test()


def test_keg_has_no_use_for_packages(brew, tmp_path):
    """Without `site` there are none."""
    python = Path(brew.metal.read_text().splitlines()[0].removeprefix("#!").split()[0])
    for arguments in (["--help"], ["setup", "--help"], ["service", "--help"], ["uninstall", "--help"]):
        subprocess.run([python, "-IS", brew.metal, *arguments], env={"HOME": str(tmp_path)}, check=True)
