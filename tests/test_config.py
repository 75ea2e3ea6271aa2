from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal import config, config_pages
from vllm_metal.errors import ConfigError
from vllm_metal.settings import SETTINGS, ServerConfig
from vllm_metal.toml_document import dotted


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def load(file: Path, text: str | bytes = "", *, flags: dict[str, object] | None = None, **environ: str):
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return config.load(path=file, flags=flags, environ=environ)


def refusal(file: Path, text: str | bytes = "", *, flags: dict[str, object] | None = None, **environ: str):
    with pytest.raises(ConfigError) as caught:
        load(file, text, flags=flags, **environ)
    return caught.value


LAYERS = {
    "flag": ({"flags": {"server.port": 4}}, 4, "flag --port"),
    "environment": ({"METAL_SERVER_PORT": "3"}, 3, "environment METAL_SERVER_PORT"),
    "file": ({"text": "# mine\n\n[server]\nport = 2\n"}, 2, "config.toml line 4"),
    "default": ({}, 8000, "default"),
}


@pytest.mark.parametrize("given_layers", list(itertools.product([True, False], repeat=3)))
def test_precedence(file: Path, given_layers: tuple[bool, ...]) -> None:
    present = [name for name, there in zip(LAYERS, (*given_layers, True), strict=True) if there]
    arguments = {key: value for name in present for key, value in LAYERS[name][0].items()}
    loaded = load(file, **arguments)
    _, port, text = LAYERS[present[0]]
    assert loaded.server.port == port
    assert loaded.origins["server.port"] == config.Origin(present[0], text)


@pytest.mark.parametrize(
    ("environ", "key", "value"),
    [
        ({"VLLM_API_KEY": "a,b"}, "server.api_keys", ("a,b",)),
        ({"VLLM_API_KEY": "a", "METAL_SERVER_API_KEYS": "b, c,"}, "server.api_keys", ("b", "c")),
        ({"VLLM_MLX_DEVICE": "cpu"}, "engine.device", "cpu"),
        ({"VLLM_MLX_DEVICE": "cpu", "METAL_ENGINE_DEVICE": "gpu"}, "engine.device", "gpu"),
        ({"VLLM_METAL_USE_MLX": "0"}, "engine.device", "cpu"),
        ({"VLLM_METAL_USE_MLX": "1"}, "engine.device", "auto"),
        ({"VLLM_METAL_USE_MLX": "0", "VLLM_MLX_DEVICE": "gpu"}, "engine.device", "gpu"),
        ({"VLLM_METAL_MEMORY_FRACTION": "0.5"}, "engine.gpu_memory_utilization", 0.5),
        ({"VLLM_METAL_MEMORY_FRACTION": "auto"}, "engine.gpu_memory_utilization", 0.9),
        ({"METAL_ENGINE_SEED": "7"}, "engine.seed", 7),
        ({"METAL_ENGINE_SEED": ""}, "engine.seed", None),
        ({"METAL_ENGINE_DTYPE": "half"}, "engine.dtype", "float16"),
        ({"METAL_SERVER_DRAIN_TIMEOUT": "5"}, "server.drain_timeout", 5.0),
        ({"METAL_LOG_LEVEL": "debug"}, "log.level", "debug"),
        ({"METAL_MODELS_SERVED_NAMES": "a,b"}, "models.served_names", ("a", "b")),
        ({"METAL_MODELS_ALIASES": "a=o/x, b=o/y"}, "models.aliases", {"a": "o/x", "b": "o/y"}),
    ],
)
def test_environment(file: Path, environ: dict[str, str], key: str, value: object) -> None:
    assert load(file, **environ).value(key) == value


def test_every_key_has_its_variable(file: Path) -> None:
    environ = {each.environment: each.text(each.example).strip('[]{}"') for each in SETTINGS.values()}
    origins = load(file, **environ).origins
    for key, each in SETTINGS.items():
        assert each.environment == "METAL_" + key.replace(".", "_").upper()
        assert (origins[key].layer == "environment") == bool(environ[each.environment])


def test_file_types(file: Path) -> None:
    loaded = load(
        file,
        '[server]\napi_keys = "one"\nallowed_hosts = ["a"]\ndrain_timeout = 60\n[engine]\ndtype = "float"',
    )
    assert loaded.server.api_keys == ("one",)
    assert loaded.server.allowed_hosts == ("a",)
    assert type(loaded.server.drain_timeout) is float
    assert loaded.engine.dtype == "float32"


@pytest.mark.parametrize(
    "text",
    [
        "[models.aliases]\nfast = 'org/x'",
        "[models]\naliases.fast = 'org/x'",
        "models.aliases = {fast='org/x'}",
    ],
)
def test_a_table_may_be_written_as_toml_allows(file: Path, text: str) -> None:
    assert load(file, text).models.aliases == {"fast": "org/x"}


SECTIONS = """
[engine]
max_model_len = 1000
[models]
default = "o/main"
revision = "v1"
temperature = 0.5
top_k = 7
[models."o/main"]
max_model_len = 2000
chat_template = "~/main.jinja"
[models.'o/other']
revision = "v2"
temperature = 0
ttl = 60
pinned = true
"""


def test_a_model_has_what_its_section_sets(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    loaded = load(file, SECTIONS)
    assert (loaded.models.default, loaded.models.chat_template) == ("o/main", "")
    main, other, third = (loaded.for_model(name) for name in ("o/main", "o/other", "o/third"))
    assert [each.models.default for each in (main, other, third)] == ["o/main", "o/other", "o/third"]
    assert [each.engine.max_model_len for each in (main, other, third)] == [2000, 1000, 1000]
    assert [each.models.temperature for each in (main, other, third)] == [0.5, 0.0, 0.5]
    assert [each.models.top_k for each in (main, other, third)] == [7, 7, 7]
    assert [each.models.revision for each in (main, other, third)] == ["v1", "v2", ""]
    assert main.models.chat_template == "/home/me/main.jinja"
    assert other.origins["models.ttl"].text == "config.toml line 15"
    assert main.origins["models.revision"].text == "config.toml line 6"
    assert third.origins["models.revision"].text == "default"


def test_who_stays_and_who_goes(file: Path) -> None:
    loaded = load(file, SECTIONS)
    kept = [
        (each.models.preload, each.models.pinned, each.models.ttl)
        for each in map(loaded.for_model, ("o/main", "o/other", "o/third"))
    ]
    assert kept == [(True, False, 0), (False, True, 60), (False, False, 1800)]
    everybody = load(file, "[models]\ndefault = 'o/x'\nttl = 5\npinned = true\npreload = false")
    x, y = everybody.for_model("o/x").models, everybody.for_model("o/y").models
    assert ((x.ttl, x.pinned, x.preload), (y.ttl, y.pinned, y.preload)) == (
        (5, True, False),
        (5, False, False),
    )


def test_flags_and_variables_win_over_a_section(file: Path) -> None:
    flags = {"engine.max_model_len": 30, "models.revision": "v3", "models.served_names": ["s"]}
    loaded = load(file, SECTIONS, flags=flags, METAL_MODELS_TEMPERATURE="1")
    main, other = loaded.for_model("o/main"), loaded.for_model("o/other")
    assert (main.engine.max_model_len, main.models.revision, main.models.temperature) == (30, "v3", 1)
    # A revision or names that are given to `metal serve` are those of the model it serves.
    assert (other.engine.max_model_len, other.models.revision, other.models.temperature) == (30, "v2", 1)
    assert (main.models.served_names, other.models.served_names) == (("s",), ())


def test_a_model_is_found_under_another_of_its_names(file: Path) -> None:
    loaded = load(file, SECTIONS)
    assert loaded.for_model("alias", synonyms=["o/other"]).models.ttl == 60
    default = loaded.for_model("alias", synonyms=["o/main"])
    assert (default.models.default, default.models.revision) == ("o/main", "v1")


def test_of_two_sections_of_one_model_the_first_holds(file: Path) -> None:
    loaded = load(file, "[models.b]\nttl = 1\n[models.a]\nttl = 2")
    names = ("a", "b", "c")
    assert [loaded.for_model(name, synonyms=frozenset(names)).models.ttl for name in names] == [1, 1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "[models.x]\nttl = 5",
        "[models]\nx.ttl = 5",
        "[models]\nx = { ttl = 5 }",
        "models.x.ttl = 5",
    ],
)
def test_a_section_may_be_written_as_toml_allows(file: Path, text: str) -> None:
    assert load(file, text).for_model("x").models.ttl == 5


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name.strip()))
def test_a_key_is_found_as_it_is_shown(model: str) -> None:
    if f"models.{model}" not in SETTINGS:
        table = ("models", model)
        assert config.find(f"{dotted(table)}.ttl").table == table


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("models.ttl", ("models",)),
        ('models."o/Qwen2.5".ttl', ("models", "o/Qwen2.5")),
        ("models.'o/Qwen2.5'.ttl", ("models", "o/Qwen2.5")),
        ("models.o/Qwen2.5.ttl", ("models", "o/Qwen2.5")),
        ("models.smollm2.ttl", ("models", "smollm2")),
    ],
)
def test_find(key: str, table: tuple[str, ...]) -> None:
    found = config.find(key)
    assert (found.table, found.name) == (table, "ttl")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("models.tll", "did you mean `models.ttl`?"),
        ("models.o/x.tll", 'did you mean `models."o/x".ttl`?'),
        ("models.aliases.fast", "did you mean `models.aliases`?"),
        ("models..ttl", 'name the model, as in `[models."org/name"]`'),
        ("zzz", "`metal config show` lists every key"),
    ],
)
def test_keys_that_are_not_found(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="is not a known key") as caught:
        config.find(key)
    assert caught.value.hint == hint


def test_flags(file: Path) -> None:
    flags = {"server.api_keys": ["a"], "models.default": "org/name", "server.host": None}
    loaded = load(file, flags=flags)
    assert loaded.server == dataclasses.replace(ServerConfig(), api_keys=("a",))
    assert loaded.origins["server.api_keys"].text == "flag --api-key"
    assert loaded.origins["models.default"].text == "argument MODEL"
    assert loaded.origins["server.host"].layer == "default"


def test_adapters(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = "[models]\ndefault = 'o/x'\nadapters = { a = '~/a' }\n[models.'o/y'.adapters]\nb = '/b'"
    loaded = load(file, text)
    assert loaded.models.adapters == {"a": "/home/me/a"}
    assert loaded.for_model("o/y").models.adapters == {"b": "/b"}
    assert loaded.for_model("o/z").models.adapters == {}
    assert load(file, text, METAL_MODELS_ADAPTERS="c=/c").models.adapters == {"c": "/c"}
    flags = {"models.adapters": ["d=/d=d,d", "e=~/e"]}
    assert load(file, text, flags=flags).models.adapters == {"d": "/d=d,d", "e": "/home/me/e"}


def test_tilde_is_filled_in_paths_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    template = "{{ a }}//{{ b }}"
    loaded = load(
        file,
        f'[models]\ndir = "~/models"\ntokenizer = "~x"\nchat_template = "{template}"\n[log]\nfile = "~/l"',
    )
    assert loaded.models.store == Path("/home/me/models")
    assert (loaded.models.tokenizer, loaded.models.chat_template) == ("~x", template)
    assert loaded.log.file == "/home/me/l"


def test_config_is_frozen_and_slotted(file: Path) -> None:
    loaded = load(file)
    assert not hasattr(loaded, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.server.port = 1
    with pytest.raises(TypeError):
        loaded.origins["server.port"] = "me"
    assert loaded == config.Config()


def test_which_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[server]\nport = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2\n")
    assert config.load(environ={"METAL_CONFIG": str(file)}).server.port == 1
    assert config.load(path=other, environ={"METAL_CONFIG": str(file)}).server.port == 2
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.delenv("METAL_CONFIG", raising=False)
    assert config.load(environ={}) == config.Config()


def test_the_home_of_an_unknown_user_is_no_config_file() -> None:
    with pytest.raises(ConfigError, match="no config file `~nobody-here/config.toml`"):
        config.load(environ={"METAL_CONFIG": "~nobody-here/config.toml"})


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_named_file_must_exist(file: Path, by_variable: bool) -> None:
    path, environ = (None, {"METAL_CONFIG": str(file)}) if by_variable else (file, {})
    with pytest.raises(ConfigError, match=re.escape(f"there is no config file `{file}`")) as caught:
        config.load(path=path, environ=environ)
    assert caught.value.hint == f"`metal config init --config {file}` writes one"


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("\n[server]\nport = = 1", "3, column 8", "invalid value", "in TOML text needs quotes"),
        ("[server]\nhost = 0.0.0.0", "2, column 11", "expected newline", "in TOML text needs quotes"),
        ("[server]\n[log]\n[server]\n", "3, column 8", "cannot declare `[server]` twice", "only once"),
        ("[server]\nport = 1\nport = 2\n", "3", "cannot overwrite a value", "only once"),
        ("[server]\nhost = 'a", "2", 'expected "\'"', "in TOML"),
        ("a = [\n1,\n", "3", "invalid value", "in TOML"),
        (f"a = {'[' * 20000}", "1", "", "in TOML"),
        (f"a = {'1' * 5000}", "1", "exceeds the limit", "in TOML"),
        (b"[server]\nhost = '\xff'", "2", "not UTF-8 text", "save the file as UTF-8"),
        ("[server]\n".encode("utf-16"), "1", "not UTF-8 text", "save the file as UTF-8"),
        ("[sever]\nport = 1", "1", "`[sever]` is not a known section", "did you mean `[server]`?"),
        ("\n[zzz]", "2", "`[zzz]` is not", "the sections are `[server]`, `[engine]`, `[models]`, `[log]`"),
        ("port = 1", "1", "`port` is in no section", "did you mean `server.port`?"),
        ("\nserver = 1", "2", "`server` must be a section", "write it as `[server]`"),
        ("[[server]]\nport = 1", "1", "`server` must be a section", "write it as `[server]`"),
        ("[server]\nprot = 1", "2", "`server.prot` is not a known key", "did you mean `server.port`?"),
        ("[server]\n\nmax_num_seqs = 1", "3", "`server.max_num_seqs`", "did you mean `engine.max_num_seqs`?"),
        ("[server]\nqqqqqqqq = 1", "2", "`server.qqqqqqqq`", "`metal config show` lists every key"),
        ("server = { prot = 1 }", "1", "`server.prot` is not", "did you mean `server.port`?"),
        ("[server.port]\nx = 1", "1", "from 0 to 65535, got a table", "`server.port`: "),
        ("[server]\n\nport = 65536", "3", "a whole number from 0 to 65535, got 65536", "`server.port`: "),
        ("[server]\nport = true", "2", "a whole number from 0 to 65535, got true", "`server.port`: "),
        ("[server]\nport = 80.0", "2", "got 80.0", "`server.port`: "),
        ("[server]\nport = 1979-05-27", "2", "got 1979-05-27", "`server.port`: "),
        ("[server]\nhost = ''", "2", '`server.host` must be a non-empty string, got ""', "`server.host`: "),
        ("[server]\nuds = 1", "2", "must be a string, got 1", "`server.uds`: "),
        (
            "[server]\nallowed_hosts = [1]",
            "2",
            "a list of non-empty strings, got [1]",
            "`server.allowed_hosts`: ",
        ),
        ("[server]\nallowed_hosts = ['']", "2", 'got [""]', "`server.allowed_hosts`: "),
        ("[server]\nallowed_hosts = [{a=1}]", "2", "got [", "`server.allowed_hosts`: "),
        ("[server]\nmax_queued = 0", "2", "a whole number, 1 or more, got 0", "`server.max_queued`: "),
        ("[server]\nssl_cert_reqs = 3", "2", "from 0 to 2, got 3", "`server.ssl_cert_reqs`: "),
        ("[server]\ndrain_timeout = 61", "2", "from 0 to 60, since launchd", "`server.drain_timeout`: "),
        ("[server]\ndrain_timeout = nan", "2", "got nan", "`server.drain_timeout`: "),
        ("[server]\ndrain_timeout = false", "2", "got false", "`server.drain_timeout`: "),
        ("[models]\nttl = inf", "2", "`models.ttl` must be a number, 0 or more, got inf", "`models.ttl`: "),
        (f"[models]\nttl = {'9' * 400}", "2", "`models.ttl` must be a number", "`models.ttl`: "),
        ("'' = 1", "1", '`""` is in no section', "`metal config show`"),
        ("['']\na = 1", "1", '`[""]` is not a known section', "the sections are"),
        ("[engine]\ndevice = 'tpu'", "2", 'must be "auto", "gpu" or "cpu", got "tpu"', "`engine.device`: "),
        ("[engine]\ngpu_memory_utilization = 0", "2", "above 0 and at most 1, got 0", "`engine.gpu"),
        ("[engine]\nmax_num_seqs = 1025", "2", "from 1 to 1024, got 1025", "`engine.max_num_seqs`: "),
        ("[engine]\nmax_model_len = 1", "2", "2 or more, or 0, got 1", "`engine.max_model_len`: "),
        ("[engine]\nseed = -1", "2", "got -1", "`engine.seed`: "),
        ("[models.aliases]\na = 1", "1", "a table of non-empty strings, got a table", "`models.aliases`: "),
        ("[models]\naliases = 'a'", "2", 'a table of non-empty strings, got "a"', "`models.aliases`: "),
        (f"[log]\nlevel = '{'x' * 500}'", "2", "x…", "`log.level`: "),
        (
            '[models."o/x"]\ntll = 1',
            "2",
            '`models."o/x".tll` is not a known key',
            'did you mean `models."o/x".ttl`?',
        ),
        ('[models."o/x"]\nport = 1', "2", '`models."o/x".port`', "a model's section may set max_model_len, "),
        ('[models."o/x"]\n\nttl = -1', "3", '`models."o/x".ttl` must be a number, 0 or more, got -1', "ttl"),
        ("models = { x = { ttl = -1 } }", "1", "`models.x.ttl` must be", "`models.x.ttl`: "),
        ("[models]\n[models.Qwen2.5]\nttl = 1", "2", "`models.Qwen2.5`", "a dot in it needs quotes"),
        ("[models.alias]\nfast = 'o/x'", "2", "`models.alias.fast`", "did you mean `[models.aliases]`?"),
        ("[models.adapter]\na = '/a'", "2", "`models.adapter.a`", "did you mean `[models.adapters]`?"),
        ("[models.org/x]\nttl = 1", "1, column 12", "expected ']'", 'as in `[models."org/name"]`'),
        ("[models]\n'o/x' = 1", "2", '`models."o/x"` is not', 'as in `models."o/x".ttl`'),
        ("['o/x']\nttl = 1", "1", '`["o/x"]` is not a known section', 'did you mean `[models."o/x"]`?'),
        ('[models." "]\nttl = 1', "2", '`models." ".ttl`', "name the model, as in"),
        ("[models.dir]\nttl = 1", "1", "`models.dir` must be a string, got a table", "`models.dir`: "),
        ('[server."o/x"]\nttl = 1', "1", '`server."o/x"` is not', "`metal config show`"),
    ],
)
def test_file_errors(file: Path, text: str | bytes, line: str, message: str, hint: str) -> None:
    error = refusal(file, text)
    assert error.message.startswith(f"`{file}` line {line}")
    assert message in error.message
    assert "\n" not in error.message
    assert len(error.message) < 300
    assert error.hint is not None
    assert hint in error.hint


def test_drain_timeout_error_names_the_ceiling(file: Path) -> None:
    assert "its `ExitTimeOut` of 60 s" in refusal(file, "[server]\ndrain_timeout = 61").message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"METAL_SERVER_PORT": "x"}, '`METAL_SERVER_PORT` must be a whole number from 0 to 65535, got "x"'),
        ({"METAL_SERVER_PORT": "x", "flags": {"server.port": 1}}, "`METAL_SERVER_PORT` must be"),
        ({"METAL_MODELS_ALIASES": "x"}, '`METAL_MODELS_ALIASES` must be like `name=value`, got "x"'),
        ({"METAL_MODELS_ALIASES": "a=o/x,=y"}, '`METAL_MODELS_ALIASES` must be like `name=value`, got "=y"'),
        ({"METAL_MODELS_ALIASES": "a=o/x, a =o/y"}, "`METAL_MODELS_ALIASES` names `a` twice"),
        ({"METAL_MODELS_ADAPTERS": "a=/a,b=/b,a=/a"}, "`METAL_MODELS_ADAPTERS` names `a` twice"),
        ({"VLLM_MLX_DEVICE": "tpu"}, '`VLLM_MLX_DEVICE` must be "auto", "gpu" or "cpu", got "tpu"'),
        ({"VLLM_METAL_USE_MLX": "no"}, '`VLLM_METAL_USE_MLX` must be 0 or 1, got "no"'),
        ({"VLLM_METAL_MEMORY_FRACTION": "lots"}, "`VLLM_METAL_MEMORY_FRACTION` must be a number above 0"),
        ({"VLLM_METAL_MEMORY_FRACTION": "1.1"}, "`VLLM_METAL_MEMORY_FRACTION` must be a number above 0"),
        ({"flags": {"server.port": 70000}}, "`--port` must be a whole number from 0 to 65535, got 70000"),
        ({"flags": {"engine.max_num_seqs": 0}}, "`--max-num-seqs` must be"),
        ({"flags": {"models.default": ""}}, "`MODEL` must be a non-empty string"),
        (
            {"flags": {"models.adapters": ["a=/a", "/b"]}},
            '`--lora-modules` must be like `name=path`, got "/b"',
        ),
        (
            {"flags": {"models.adapters": ["a=/a", "b=/b", "a=/c"]}},
            "`--lora-modules` names `a` twice",
        ),
    ],
)
def test_flag_and_environment_errors(file: Path, arguments: dict[str, object], message: str) -> None:
    assert refusal(file, **arguments).message.startswith(message)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        config.load(path=tmp_path, environ={})


def test_unreadable_file(file: Path) -> None:
    file.symlink_to(file)
    with pytest.raises(ConfigError, match=re.escape(f"cannot read `{file}`: Too many levels")):
        config.load(path=file, environ={})


def test_byte_order_mark_is_accepted(file: Path) -> None:
    loaded = load(file, b"\xef\xbb\xbf[server]\r\nport = 1\r\n")
    assert (loaded.server.port, loaded.origins["server.port"].text) == (1, "config.toml line 2")


def test_keys_are_never_shown(file: Path) -> None:
    loaded = load(file, '[server]\napi_keys = ["sesame"]')
    assert "sesame" not in repr(loaded)
    assert "sesame" not in SETTINGS["server.api_keys"].text(loaded.server.api_keys)
    error = refusal(file, '[server]\napi_keys = [["sesame"]]')
    assert "sesame" not in f"{error.message}{error.hint}"


@given(st.binary() | st.text().map(str.encode))
def test_any_file_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    try:
        outcome = config.load(path=file, environ={})
    except ConfigError as error:
        outcome = error.message
    assert outcome == config.Config() or outcome.startswith(f"`{file}` line ")


def test_default_file_sets_nothing(file: Path) -> None:
    assert load(file, config_pages.default_file()) == config.Config()


def test_default_file_with_every_line_taken_in_is_the_default(file: Path) -> None:
    text = re.sub(r"(?m)^# (?=\w+ = )", "", config_pages.default_file())
    assert {f"{section}.{name}" for section, table in tomllib.loads(text).items() for name in table} == set(
        SETTINGS
    )
    loaded = load(file, text)
    for key, each in SETTINGS.items():
        assert loaded.value(key) == (each.example if each.default is None else each.default), key


def test_reference_has_a_row_for_every_key() -> None:
    rows = [line for line in config_pages.reference_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(SETTINGS)
    for row, each in zip(rows, SETTINGS.values(), strict=True):
        name, default, meaning, variables = (cell.strip() for cell in row.strip("|").split("|"))
        assert (name, default) == (f"`{each.name}`", f"`{each.text(each.default)}`")
        assert meaning.startswith(each.doc)
        assert variables.split(", ") == [f"`{name}`" for name in (each.environment, *each.variables)]


def test_imports_nothing_heavy() -> None:
    program = "import sys, vllm_metal.config, vllm_metal.cli.config; print(*sys.modules)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("METAL_")}
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environ
    ).stdout.split()
    assert "typer" in loaded
    heavy = {"aiohttp", "mlx", "mlx_lm", "transformers", "pydantic", "rich", "huggingface_hub", "msgspec"}
    assert not heavy & {name.partition(".")[0] for name in loaded}
