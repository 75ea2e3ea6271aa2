"""The interactive side of `metal chat`: reads lines on a terminal, runs /commands, asks the rest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from vllm_metal import paths
from vllm_metal.cli import printer
from vllm_metal.cli.chat_conversation import Conversation, when_ready
from vllm_metal.errors import MetalError


class Command(NamedTuple):
    run: Callable[[str], None]
    argument: str
    help: str


class Repl:
    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands = {
            "/help": Command(self._help, "", "list the commands and keys"),
            "/clear": Command(self._clear, "", "forget the conversation, keep the system prompt"),
            "/system": Command(self._system, "[TEXT]", "show the system prompt, or set it"),
            "/model": Command(self._model, "[NAME]", "show the models, or talk to another one"),
            "/stats": Command(self._stats, "", "tokens and speed of the last answer"),
            "/save": Command(self._save, "FILE", "write the conversation to a `.md` or `.json` file"),
            "/exit": Command(self._exit, "", "leave, as Ctrl-D does"),
        }

    def run(self) -> None:
        """Until Ctrl-D or `/exit`. Errors are printed and the conversation goes on."""
        names = [model["id"] for model in when_ready(self._conversation.client.models)]
        talking_to = self._conversation.model or next(iter(names), "the default model")
        printer.note(f"talking to {talking_to}; `/help` lists commands and keys, Ctrl-D leaves")
        # The prompt is talk: with stdout redirected it goes to stderr.
        session: PromptSession[str] = PromptSession(
            history=_history(),
            output=create_output(always_prefer_tty=True),
            multiline=True,
            key_bindings=_key_bindings(),
            completer=WordCompleter(list(self._commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            prompt_continuation="… ",
        )
        while True:
            try:
                self._handle(session.prompt("> "))
            except EOFError:
                return
            except KeyboardInterrupt:
                # It has cleared the line, or stopped the answer.
                continue
            except MetalError as exc:
                printer.error(exc)

    def _handle(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            self._conversation.ask(line)
            return
        name, *argument = line.split(maxsplit=1)
        if name not in self._commands:
            near = difflib.get_close_matches(name, self._commands, n=1)
            advice = f"did you mean `{near[0]}`?" if near else "`/help` lists the commands"
            raise MetalError(
                f"unknown command `{name}`", hint=f"{advice} (a question may begin with a space, then `/`)"
            )
        self._commands[name].run("".join(argument).strip())

    def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            printer.note(f"  {name + ' ' + command.argument:<16}{command.help}")
        printer.note("  Enter sends; Esc Enter, or a backslash before Enter, begins a new line")
        printer.note("  Ctrl-C stops the answer or clears the line; Ctrl-D leaves")

    def _clear(self, _: str) -> None:
        self._conversation.turns.clear()
        printer.note("the conversation is forgotten")

    def _system(self, text: str) -> None:
        self._conversation.system = text or self._conversation.system
        printer.note(f"system prompt: {self._conversation.system or 'none'}")

    def _model(self, name: str) -> None:
        if name:
            self._conversation.model = name
            printer.note(f"talking to {name}")
            return
        for model in self._conversation.client.models():
            mark = "*" if model["id"] == self._conversation.model else " "
            printer.note(f"{mark} {model['id']}")

    def _stats(self, _: str) -> None:
        if not self._conversation.turns:
            raise MetalError("there is no answer yet", hint="ask something first")
        printer.note(self._conversation.turns[-1].stats())

    def _save(self, name: str) -> None:
        if not self._conversation.turns:
            raise MetalError("there is nothing to save yet", hint="ask something first")
        file = Path(paths.expand_home(name))
        if file.suffix not in _RENDERERS:
            raise MetalError("name a `.md` or `.json` file to save to", hint="for example `/save chat.md`")
        text = _RENDERERS[file.suffix](self._conversation.messages())
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            raise MetalError(f"`{file}` exists already", hint="choose another name") from None
        except OSError as exc:
            raise MetalError(f"cannot write `{file}`: {exc.strerror}") from exc
        printer.note(f"saved to {file}")

    def _exit(self, _: str) -> None:
        raise EOFError


def _markdown(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"## {each['role'].title()}\n\n{each['content']}\n" for each in messages)


def _json(messages: list[dict[str, str]]) -> str:
    return json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"


_RENDERERS = {".md": _markdown, ".json": _json}


def _history() -> History:
    """What was typed in earlier sessions, for the user's eyes only."""
    file = paths.chat_history()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError as exc:
        printer.warning(f"input is not remembered: cannot write `{file}`: {exc.strerror}")
        return InMemoryHistory()
    return FileHistory(str(file))


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end_of_line and buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
