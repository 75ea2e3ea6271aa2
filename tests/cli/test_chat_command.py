"""`metal chat` as a process: through pipes, and on a pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripted_server import (
    DEADLINE_S,
    Meanwhile,
    Script,
    chunk,
    event,
    refuses,
    replies,
    serving,
    streams,
    streams_raw,
)
from terminal import Terminal, on_terminal

RUN = "from vllm_metal.cli.main import main; main()"

USER = {"role": "user", "content": "Hello"}


@pytest.fixture
def server() -> Iterator[Script]:
    with serving() as script:
        yield script


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    homes = dict.fromkeys(["HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"], str(tmp_path))
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    # The test's terminal answers no questions about its cursor.
    return {**kept, **homes, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONUTF8": "1"}


class Finished:
    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self.code, self.out, self.talk = done.returncode, done.stdout.decode(), done.stderr.decode()


Chat = Callable[..., Finished]


@pytest.fixture
def chat(environment: dict[str, str]) -> Chat:
    """Run `metal chat` with pipes to its end."""

    def run(*arguments: str, stdin: bytes = b"", code: str = RUN, **variables: str) -> Finished:
        done = subprocess.run(
            [sys.executable, "-c", code, "chat", *arguments],
            input=stdin,
            capture_output=True,
            env=environment | variables,
            timeout=60,
            check=False,
        )
        return Finished(done)

    return run


# One question


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [(["-q", "Hello"], b"ignored"), (["--quick", "-"], b"Hello\n"), ([], b"Hello\n")],
)
def test_one_question(server: Script, chat: Chat, arguments: list[str], stdin: bytes) -> None:
    server.on_chat(streams("Good", " day."))
    done = chat("--url", server.url, *arguments, stdin=stdin)
    assert (done.code, done.out, done.talk) == (0, "Good day.\n", "")
    assert server.next_chat().body["messages"] == [USER]


def test_the_wait_for_a_model_that_is_loaded_is_told(server: Script, chat: Chat) -> None:
    loading = {"name": "org/model", "status": "loading", "stage": "loading `org/model`"}
    fetching = loading | {"stage": "fetching `org/model` (9 %)"}
    default = {"name": "default", "status": "ok", "stage": "ready"}
    server.on_chat(Meanwhile(server, [default, fetching], [default, loading]).then(streams("Yes")))
    done = chat("org/model", "--url", server.url, "-q", "Hello")
    assert (done.code, done.out) == (0, "Yes\n")
    assert done.talk == "fetching `org/model`\nloading `org/model`\n"


def test_on_a_terminal_the_wait_is_a_line_that_goes_away(server: Script, environment: dict[str, str]) -> None:
    loading = {"name": "org/model", "status": "loading", "stage": "fetching `org/model` (9 %)"}
    server.on_chat(Meanwhile(server, [loading]).then(streams("Yes")))
    with on_terminal("chat", "--url", server.url, "-q", "Hello", env=environment) as terminal:
        terminal.expect("\r\x1b[Kfetching `org/model` (9 %)")
        terminal.expect("\r\x1b[KYes")
        assert terminal.exit_code() == 0


def test_reasoning_is_talk(server: Script, chat: Chat) -> None:
    pieces = [chunk(reasoning=text, reasoning_content=text) for text in ("Let me", " see\x1b[31m.")]
    answer = [*pieces, chunk("Good"), chunk(" day."), chunk(finish_reason="stop")]
    server.on_chat(streams_raw(*map(event, answer), b"data: [DONE]\n\n"))
    done = chat("--url", server.url, "-q", "Hello")
    assert (done.code, done.out) == (0, "Good day.\n")
    assert done.talk.startswith("Let me see")
    assert done.talk.endswith(".\n\n")
    assert "\x1b" not in done.talk


def test_options_reach_the_server(server: Script, chat: Chat) -> None:
    server.on_chat(streams("Yes"))
    sampling = ["--temperature", "0", "--top-p", "0.5", "--max-tokens", "9", "--seed", "4"]
    chat("smollm2", "--url", server.url, "-q", "Hello", "--system", "Be brief", "--api-key", "k", *sampling)
    request = server.next_chat()
    assert request.headers["Authorization"] == "Bearer k"
    assert request.body == {
        "model": "smollm2",
        "messages": [{"role": "system", "content": "Be brief"}, USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 9,
        "seed": 4,
    }


def test_the_configured_server_and_its_key_are_the_default(
    server: Script, chat: Chat, tmp_path: Path
) -> None:
    server.on_chat(streams("Yes"))
    port = server.url.rpartition(":")[2]
    file = tmp_path / "own.toml"
    file.write_text(f'[server]\nhost = "0.0.0.0"\nport = {port}\napi_keys = ["secret"]\n')
    assert chat("-q", "Hello", "--config", str(file)).out == "Yes\n"
    assert server.next_chat().headers["Authorization"] == "Bearer secret"
    chat("-q", "Hello", "--config", str(file), "--url", server.url)
    assert server.next_chat().headers["Authorization"] is None


def test_a_piped_answer_is_left_as_it_is(server: Script, chat: Chat) -> None:
    server.on_chat(streams("\x1b[31mred", "\r\n"))
    assert chat("--url", server.url, "-q", "Hello").out == "\x1b[31mred\r\n"


def test_an_empty_answer_is_told(server: Script, chat: Chat) -> None:
    server.on_chat(streams())
    done = chat("--url", server.url, "-q", "Hello")
    assert (done.code, done.out, done.talk) == (0, "", "the answer is empty\n")


def test_a_loading_server_is_waited_for(server: Script, chat: Chat) -> None:
    loading = refuses(503, "loading weights", Retry_After="1")
    server.on_chat(loading, loading, streams("Ready"))
    done = chat("--url", server.url, "-q", "Hello")
    assert (done.code, done.out) == (0, "Ready\n")
    assert done.talk == "waiting for the server: loading weights\n"


def test_a_refusal_is_an_error(server: Script, chat: Chat) -> None:
    server.on_chat(refuses(401, "this server needs a key"))
    done = chat("--url", server.url, "-q", "Hello")
    assert (done.code, done.out) == (1, "")
    assert done.talk.startswith("error: this server needs a key\n\nhint: ")


def test_nobody_there(chat: Chat) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        done = chat("-q", "Hello", "--url", url)
    assert (done.code, done.out) == (1, "")
    assert done.talk == (
        f"error: no server answers at {url}\n\n"
        "hint: start it with `metal serve` or `metal service start`; `metal chat --local` needs none\n"
    )


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", "the prompt is empty"),
        (b" \n", "the prompt is empty"),
        (b"\xff\xfe", "the prompt is not UTF-8"),
    ],
)
def test_a_prompt_that_cannot_be_asked(chat: Chat, stdin: bytes, message: str) -> None:
    done = chat("-q", "-", stdin=stdin)
    assert done.code == 1
    assert done.talk.startswith(f"error: {message}")


def test_a_question_is_read_alike_in_every_locale(server: Script, chat: Chat) -> None:
    server.on_chat(streams("caf\xe9"))
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = chat("--url", server.url, "-q", "caf\xe9", **plain)
    assert (done.code, done.out) == (0, "caf\\xe9\n")
    assert server.next_chat().body["messages"] == [{"role": "user", "content": "caf\xe9"}]


def test_an_argument_that_is_not_text_is_told(chat: Chat) -> None:
    done = chat("-q", os.fsdecode(b"caf\xff"))
    assert (done.code, done.talk) == (1, "error: the prompt is not UTF-8 text\n")


def test_local_and_url_exclude_each_other(chat: Chat) -> None:
    assert chat("--local", "--url", "http://localhost:1", "-q", "Hello").code == 2


def test_one_question_imports_nothing_heavy(server: Script, chat: Chat, tmp_path: Path) -> None:
    server.on_chat(streams("Yes"))
    listing = tmp_path / "modules"
    at_exit = f"lambda: pathlib.Path({str(listing)!r}).write_text(' '.join(sys.modules))"
    code = f"import atexit, pathlib, sys; atexit.register({at_exit}); {RUN}"
    assert chat("--url", server.url, "-q", "Hello", code=code).out == "Yes\n"
    loaded = {name.partition(".")[0] for name in listing.read_text().split()}
    assert "vllm_metal" in loaded
    heavy = {
        "mlx",
        "mlx_lm",
        "transformers",
        "aiohttp",
        "pydantic",
        "prompt_toolkit",
        "huggingface_hub",
        "msgspec",
    }
    assert not loaded & heavy


def test_ctrl_c_stops_the_question(server: Script, environment: dict[str, str]) -> None:
    server.on_chat(server.hangs_after("One"))
    arguments = ["chat", "--url", server.url, "-q", "Hello"]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"One"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
    assert server.disconnected.wait(DEADLINE_S)


# A conversation


@pytest.fixture
def talk(environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """Start `metal chat` on a terminal and wait for its first prompt."""
    with ExitStack() as terminals:

        def start(*arguments: str, stdout: int | None = None) -> Terminal:
            return terminals.enter_context(on_terminal("chat", *arguments, env=environment, stdout=stdout))

        yield start


Talk = Callable[..., Terminal]


def run_command(terminal: Terminal, line: str) -> str:
    """What the terminal shows from the command's line to the next prompt."""
    terminal.type(line + "\r")
    return terminal.prompt()


def test_a_conversation(server: Script, talk: Talk) -> None:
    server.on_chat(streams("Good", " day."), streams("Still", " here."))
    terminal = talk("--url", server.url, "--system", "Be brief")
    assert "talking to smollm2; `/help` lists" in terminal.prompt()
    terminal.type("Hello\r")
    terminal.expect("Good day.\r\n")
    terminal.prompt()
    terminal.type("And now?\r")
    terminal.expect("Still here.\r\n")
    terminal.prompt()
    server.next_chat()
    assert server.next_chat().body["messages"] == [
        {"role": "system", "content": "Be brief"},
        USER,
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "And now?"},
    ]
    terminal.type("\x04")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize(
    "keys",
    ["one\x1b\rtwo\r", "one\\\rtwo\r", "\x1b[200~one\rtwo\x1b[201~\r", "\x1b[200~one\r\ntwo\x1b[201~\r"],
    ids=["escape enter", "backslash", "paste", "paste crlf"],
)
def test_several_lines(server: Script, talk: Talk, keys: str) -> None:
    server.on_chat(streams("Both"))
    terminal = talk("--url", server.url)
    terminal.prompt()
    terminal.type(keys)
    terminal.expect("Both\r\n")
    assert server.next_chat().body["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(server: Script, talk: Talk) -> None:
    server.on_chat(server.hangs_after("One", " two"), streams("Three"))
    terminal = talk("--url", server.url)
    terminal.prompt()
    terminal.type("Count\r")
    terminal.expect("One two")
    terminal.type("\x03")
    assert server.disconnected.wait(DEADLINE_S)
    terminal.prompt()
    terminal.type("/stats\r")
    terminal.expect("stopped before its end")
    terminal.prompt()
    terminal.type("Go on\r")
    terminal.expect("Three\r\n")
    server.next_chat()
    assert server.next_chat().body["messages"] == [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One two"},
        {"role": "user", "content": "Go on"},
    ]


def test_ctrl_c_clears_the_line(server: Script, talk: Talk) -> None:
    server.on_chat(streams("Good day."))
    terminal = talk("--url", server.url)
    terminal.prompt()
    terminal.type("Nonsense\x03")
    terminal.prompt()
    terminal.type("Hello\r")
    terminal.expect("Good day.\r\n")
    assert server.next_chat().body["messages"] == [USER]


def test_ctrl_c_ends_the_wait_for_a_loading_server(server: Script, talk: Talk) -> None:
    server.on_chat(refuses(503, "loading weights", Retry_After="600"), streams("Good day."))
    terminal = talk("--url", server.url)
    terminal.prompt()
    terminal.type("Lost\r")
    terminal.expect("waiting for the server: loading weights")
    terminal.type("\x03")
    terminal.prompt()
    terminal.type("Hello\r")
    terminal.expect("Good day.\r\n")
    server.next_chat()
    assert server.next_chat().body["messages"] == [USER]


def test_an_error_is_told_and_its_question_forgotten(server: Script, talk: Talk) -> None:
    broken = streams_raw(event(chunk("Half")), event({"error": {"message": "out of memory"}}))
    server.on_chat(refuses(400, "too long", code="context_length_exceeded"), broken, streams("Good day."))
    terminal = talk("--url", server.url)
    terminal.prompt()
    assert "error: too long\n" in run_command(terminal, "Lost")
    assert "Half\nerror: out of memory\n" in run_command(terminal, "Lost too")
    assert "Good day.\n" in run_command(terminal, "Hello")
    server.next_chat()
    server.next_chat()
    assert server.next_chat().body["messages"] == [USER]


def test_no_server_ends_it_before_a_question_is_typed(talk: Talk) -> None:
    terminal = talk("--url", "http://127.0.0.1:9")
    terminal.expect("no server answers at http://127.0.0.1:9")
    assert terminal.exit_code() == 1


def test_the_answer_cannot_drive_the_terminal(server: Script, talk: Talk) -> None:
    server.on_chat(streams("a\x1b", "]0;owned\x07b", "\x9b2Jc\r\x08\x7f", "\td\n", "e"))
    terminal = talk("--url", server.url)
    terminal.prompt()
    terminal.type("Hello\r")
    assert terminal.expect("e\r\n").endswith("a]0;ownedb2Jc\td\r\n")


def test_redirected_answers_are_without_talk(server: Script, talk: Talk, tmp_path: Path) -> None:
    server.on_chat(streams("Good day."))
    with (tmp_path / "answers").open("w") as answers:
        terminal = talk("--url", server.url, stdout=answers.fileno())
    terminal.prompt()
    terminal.type("Hello\r")
    terminal.prompt()
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert (tmp_path / "answers").read_text() == "Good day.\n"


# Commands


def test_commands(server: Script, talk: Talk, tmp_path: Path) -> None:
    served = [{"id": "smollm2"}, {"id": "qwen"}]
    server.on("/v1/models", replies({"data": served}))
    server.on_chat(streams("Good", " day."))
    terminal = talk("--url", server.url)
    terminal.prompt()
    assert "there is no answer yet" in run_command(terminal, "/stats")
    assert "there is nothing to save yet" in run_command(terminal, f"/save {tmp_path}/chat.md")
    shown = run_command(terminal, "/help")
    for command in ("/help", "/clear", "/system [TEXT]", "/model [NAME]", "/stats", "/save FILE", "/exit"):
        assert f"\n  {command}" in shown
    assert "system prompt: none" in run_command(terminal, "/system")
    assert "system prompt: Be very brief" in run_command(terminal, "/system Be very brief")
    assert "talking to qwen" in run_command(terminal, "/model qwen")
    assert "\n  smollm2\n* qwen\n" in run_command(terminal, "/model")
    run_command(terminal, "Hello")
    body = server.next_chat().body
    assert body["model"] == "qwen"
    assert body["messages"] == [{"role": "system", "content": "Be very brief"}, USER]
    stats = run_command(terminal, "/stats")
    assert re.search(r"9 prompt \+ 2 completion tokens, first after \d+\.\d\d s, .*finished by stop", stats)

    assert f"saved to {tmp_path}/chat.md" in run_command(terminal, f"/save {tmp_path}/chat.md")
    assert (tmp_path / "chat.md").read_text() == (
        "## System\n\nBe very brief\n\n## User\n\nHello\n\n## Assistant\n\nGood day.\n"
    )
    run_command(terminal, "/save ~/chat.json")
    assert json.loads((tmp_path / "chat.json").read_text()) == {
        "messages": [*body["messages"], {"role": "assistant", "content": "Good day."}]
    }
    (tmp_path / "chat.md").write_text("mine")
    assert "exists already" in run_command(terminal, f"/save {tmp_path}/chat.md")
    assert (tmp_path / "chat.md").read_text() == "mine"
    assert "`.md` or `.json`" in run_command(terminal, "/save chat.pdf")
    assert "`.md` or `.json`" in run_command(terminal, "/save")
    assert "No such file" in run_command(terminal, "/save ~nobody-here/chat.md")
    assert "No such file" in run_command(terminal, f"/save {tmp_path}/gone/chat.md")

    run_command(terminal, "/clear")
    run_command(terminal, "Hello")
    assert server.next_chat().body["messages"] == [{"role": "system", "content": "Be very brief"}, USER]

    assert "unknown command `/stat`" in (shown := run_command(terminal, "/stat"))
    assert "did you mean `/stats`?" in shown
    run_command(terminal, " /usr is a folder?")
    assert server.next_chat().body["messages"][-1]["content"] == " /usr is a folder?"
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0


def test_tab_completes_commands(server: Script, talk: Talk) -> None:
    terminal = talk("--url", server.url)
    terminal.prompt()
    assert "system prompt: none" in run_command(terminal, "/sy\t")
    terminal.type("/s\t")
    for command in ("/system", "/stats", "/save"):
        terminal.expect(command)


def test_searching_the_input_history(server: Script, talk: Talk) -> None:
    server.on_chat(streams("Good day."))
    terminal = talk("--url", server.url)
    terminal.prompt()
    run_command(terminal, "Hello")
    run_command(terminal, "/stats")
    terminal.type("\x12Hel\r")
    terminal.type("\r")
    terminal.expect("Good day.\r\n")
    server.next_chat()
    assert server.next_chat().body["messages"][-1] == USER


def test_input_is_remembered_for_its_owner(server: Script, talk: Talk, tmp_path: Path) -> None:
    server.on_chat(streams("Good day."))
    terminal = talk("--url", server.url)
    terminal.prompt()
    run_command(terminal, "Hello")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    (history,) = tmp_path.rglob("chat_history")
    assert history.stat().st_mode & 0o777 == 0o600
    server.next_chat()

    terminal = talk("--url", server.url)
    terminal.prompt()
    terminal.type("\x1b[A")
    terminal.expect("Hello")
    terminal.type("\r")
    terminal.expect("Good day.\r\n")
    assert server.next_chat().body["messages"] == [USER]
