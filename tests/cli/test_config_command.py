from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from vllm_metal import config, config_pages
from vllm_metal.cli.config import app
from vllm_metal.errors import ConfigError
from vllm_metal.settings import SETTINGS


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("METAL_", "VLLM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "config.toml"


def metal_config(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exception is None, result.exception
    return result


def refused(*arguments: str | Path) -> ConfigError:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert isinstance(result.exception, ConfigError)
    assert result.stdout == ""
    return result.exception


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_show(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, '[server]\nport = 9000\napi_keys = ["sesame"]\n')
    monkeypatch.setenv("METAL_LOG_LEVEL", "debug")
    rows = [line.split(maxsplit=1) for line in metal_config("show", "--config", file).stdout.splitlines()]
    shown = {key: " ".join(rest.split()) for key, rest in rows}
    assert list(shown) == list(SETTINGS)
    assert shown["server.port"] == "9000 config.toml line 2"
    assert shown["server.api_keys"] == '["***"] config.toml line 3'
    assert shown["server.host"] == '"127.0.0.1" default'
    assert shown["engine.seed"] == "unset default"
    assert shown["log.level"] == '"debug" environment METAL_LOG_LEVEL'


def test_show_json(file: Path) -> None:
    write(file, '[server]\nport = 9000\napi_keys = ["sesame", "b"]\n')
    shown = json.loads(metal_config("show", "--json", "--config", file).stdout)
    assert list(shown) == list(SETTINGS)
    assert shown["server.port"] == {"value": 9000, "origin": "config.toml line 2"}
    assert shown["server.api_keys"]["value"] == ["***", "***"]
    assert shown["engine.seed"] == {"value": None, "origin": "default"}


def test_check_warns_of_sections_that_are_of_no_model(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    names = ("smolm2", "smollm2", "mine", "own", "org/anything")
    sections = "".join(f"[models.'{name}']\nttl = 5\n" for name in names)
    write(file, f"[models]\ndir = '{tmp_path}'\naliases = {{ own = 'org/x' }}\n{sections}")
    done = metal_config("check", "--config", file)
    assert done.stdout == f"ok: {file}\n"
    assert done.stderr == "warning: `[models.smolm2]` is of no model known here: did you mean `smollm2`?\n"


def test_check_warns_of_two_sections_of_one_model(file: Path) -> None:
    write(file, "[models]\naliases = { own = 'o/x' }\n[models.own]\nttl = 5\n[models.'o/x']\nttl = 6\n")
    done = metal_config("check", "--config", file)
    assert (
        done.stderr == 'warning: `[models."o/x"]` does nothing: it is of the same model as `[models.own]`\n'
    )


def test_models_sections_are_shown_last(file: Path) -> None:
    write(file, '[models."o/x"]\nttl = 5\nmax_model_len = 9\n')
    *_, ttl, length = metal_config("show", "--config", file).stdout.splitlines()
    assert ttl.split() == ['models."o/x".ttl', "5.0", "config.toml", "line", "2"]
    assert length.split() == ['models."o/x".max_model_len', "9", "config.toml", "line", "3"]
    shown = json.loads(metal_config("show", "--json", "--config", file).stdout)
    assert shown['models."o/x".ttl'] == {"value": 5.0, "origin": "config.toml line 2"}


@pytest.mark.parametrize("key", ["models.o/Qwen2.5.ttl", 'models."o/Qwen2.5".ttl', "models.'o/Qwen2.5'.ttl"])
def test_set_of_one_model(file: Path, key: str) -> None:
    write(file, "# mine\n[models]\ndir = '/m' # here\n")
    metal_config("set", key, "600", "--config", file)
    expected = "# mine\n[models]\ndir = '/m' # here\n\n[models.\"o/Qwen2.5\"]\nttl = 600.0\n"
    assert file.read_text() == expected
    metal_config("set", "models.o/Qwen2.5.pinned", "true", "--config", file)
    assert file.read_text() == f"{expected}pinned = true\n"
    assert config.load(path=file, environ={}).for_model("o/Qwen2.5").models.pinned


def test_set_of_one_model_after_init(file: Path) -> None:
    metal_config("init", "--config", file)
    metal_config("set", "models.smollm2.temperature", "0.5", "--config", file)
    assert file.read_text() == config_pages.default_file() + "\n[models.smollm2]\ntemperature = 0.5\n"
    metal_config("set", "models.dir", "/m", "--config", file)
    assert config.load(path=file, environ={}).models.dir == "/m"


def test_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metal_config("path", "--config", file).stdout == f"{file}\n"
    monkeypatch.setenv("METAL_CONFIG", str(file))
    assert metal_config("path").stdout == f"{file}\n"


def test_init(file: Path) -> None:
    result = metal_config("init", "--config", file)
    assert (result.stdout, result.stderr) == ("", f"wrote `{file}`\n")
    assert file.read_text() == config_pages.default_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("# mine\n")
    assert refused("init", "--config", file).hint == "`--force` overwrites it"
    assert file.read_text() == "# mine\n"
    metal_config("init", "--config", file, "--force")
    assert file.read_text() == config_pages.default_file()


def test_init_says_why_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "folder" / "config.toml"
    assert refused("init", "--config", path).message == f"cannot write `{path}`: Not a directory"


def test_a_failed_write_leaves_nothing_behind(file: Path) -> None:
    (file / "inside").mkdir(parents=True)
    assert "cannot write" in refused("init", "--config", file, "--force").message
    assert list(file.parent.iterdir()) == [file]


def test_set_uncomments_the_default(file: Path) -> None:
    metal_config("init", "--config", file)
    result = metal_config("set", "server.port", "9000", "--config", file)
    assert (result.stdout, result.stderr) == ("", f"set `server.port` to 9000 in `{file}`\n")
    assert file.read_text() == config_pages.default_file().replace("# port = 8000", "port = 9000")


def test_set_does_not_show_keys(file: Path) -> None:
    assert "sesame" not in metal_config("set", "server.api_keys", "sesame", "--config", file).output
    assert file.read_text() == '[server]\napi_keys = ["sesame"]\n'


def test_set_keeps_mode_and_link(file: Path, tmp_path: Path) -> None:
    write(file, "[server]\nport = 1 # one\n")
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    metal_config("set", "server.port", "2", "--config", link)
    assert link.is_symlink()
    assert file.read_text() == "[server]\nport = 2 # one\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


def test_set_keeps_line_endings_and_byte_order_mark(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"\xef\xbb\xbf[server]\r\nport = 1\r\n")
    metal_config("set", "server.host", "::1", "--config", file)
    assert file.read_bytes() == b'\xef\xbb\xbf[server]\r\nport = 1\r\nhost = "::1"\r\n'


def test_set_mends_a_bad_value_beside_another(file: Path) -> None:
    write(file, '[server]\nport = "x"\nmax_queued = 0\n')
    metal_config("set", "server.port", "1", "--config", file)
    assert file.read_text() == "[server]\nport = 1\nmax_queued = 0\n"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("server.port", "x", '`server.port` must be a whole number from 0 to 65535, got "x"'),
        ("server.drain_timeout", "61", "`server.drain_timeout` must be a number from 0 to 60"),
        ("server.prot", "1", "`server.prot` is not a known key"),
        ("log.file", "a\udcff", "cannot set `log.file`"),
        ("models.aliases", "a=o/x,a=o/y", "`models.aliases` names `a` twice"),
        ("models.default", "", "`models.default` must be a non-empty string"),
        ("engine.seed", "1", "cannot set `engine.seed` in"),
    ],
)
def test_set_refuses_and_writes_nothing(file: Path, key: str, value: str, message: str) -> None:
    text = "engine = { seed = 2 }\n"
    write(file, text)
    assert refused("set", key, value, "--config", file).message.startswith(message)
    assert file.read_text() == text


def test_set_refuses_a_broken_file(file: Path) -> None:
    write(file, "[server\n")
    assert refused("set", "server.port", "1", "--config", file).message.startswith(f"`{file}` line 1")
    assert file.read_text() == "[server\n"


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda word: word[0] != "-")


def numbers(each: config.Setting) -> st.SearchStrategy[float]:
    if each.kind is float:
        least = each.minimum if each.above is None else each.above
        return st.floats(least, each.maximum, exclude_min=each.above is not None, allow_infinity=False)
    whole = st.integers(int(each.minimum or 0), int(each.maximum or 2**40))
    return whole | st.just(0) if each.or_zero else whole


INPUTS = {
    **{key: numbers(each) for key, each in SETTINGS.items() if each.kind in (int, float)},
    **{key: st.booleans() for key, each in SETTINGS.items() if each.kind is bool},
    "models.aliases": st.from_regex(r"a[\w.]*=[\w/.]+(, ?b[\w.]*=[\w/.]+)?", fullmatch=True),
    "models.adapters": st.from_regex(r"[\w.]+=~?[\w/.]+", fullmatch=True),
    "engine.device": st.sampled_from(SETTINGS["engine.device"].choices),
    "engine.dtype": st.sampled_from(SETTINGS["engine.dtype"].choices),
    "log.level": st.sampled_from(SETTINGS["log.level"].choices),
}


@settings(max_examples=30)
@given(st.data())
def test_set_then_load(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.getbasetemp() / "round-trip.toml"
    file.unlink(missing_ok=True)
    if data.draw(st.booleans()):
        file.write_text(config_pages.default_file())
    expected = {key: each.default for key, each in SETTINGS.items()}
    for key in data.draw(st.lists(st.sampled_from(list(SETTINGS)), min_size=1, max_size=4)):
        each = SETTINGS[key]
        text = str(data.draw(INPUTS.get(key, WORDS)))
        expected[key] = each.resolve(each.check(each.read(text), key))
        metal_config("set", key, text, "--config", file)
    loaded = config.load(path=file, environ={})
    assert {key: loaded.value(key) for key in SETTINGS} == expected
    explanations = {line for line in config_pages.default_file().splitlines() if " = " not in line}
    assert not file.read_text().startswith("# Conf") or explanations <= set(file.read_text().split("\n"))


def test_check(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, "[server]\nport = 1\n")
    assert metal_config("check", "--config", file).stdout == f"ok: {file}\n"
    monkeypatch.setenv("METAL_SERVER_PORT", "x")
    assert "`METAL_SERVER_PORT`" in refused("check", "--config", file).message


def test_check_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert metal_config("check").stdout.startswith("ok: no file at ")


def test_check_fails(file: Path) -> None:
    write(file, "[server]\nprot = 1\n")
    result = CliRunner().invoke(app, ["check", "--config", str(file)])
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "it is not a file" in refused("init", "--force", "--config", pipe).message
    assert pipe.is_fifo()
