"""Scripted chats in pseudo-terminals, and the actions of a user there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assets import ROOT
from terminal import Terminal

SCRIPTED = [sys.executable, "-c", "import scripted_chat; scripted_chat.main()"]
OK = [["text", "ok"]]


class Chat:
    """Starts chats with the replies of a script, by `scripted_chat`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.json"
        self.env = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
            "LMCHAT_HOME": str(folder / "data"),
        }

    def __call__(
        self,
        *replies: list[list[Any]],
        columns: int = 80,
        rows: int = 24,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        self.write(*replies)
        command = [*SCRIPTED, str(self.script), *options]
        return Terminal(command, columns=columns, rows=rows, env={**self.env, **(env or {})})

    def write(self, *replies: list[list[Any]]) -> None:
        """Writes the script without starting a chat."""
        self.script.write_text(json.dumps(replies), encoding="utf-8")

    def before(self, *turns: list[str], **facts: Any) -> None:
        """Makes the chat resume a session with turns of [role, text, finish reason]."""
        text = json.dumps({"turns": turns, **facts})
        (self.folder / "before.json").write_text(text, encoding="utf-8")

    def go(self, name: str) -> None:
        """Lets a reply pass its "wait" step of that name."""
        (self.folder / name).touch()

    def messages(self) -> list[str]:
        """Returns the messages that the session received."""
        found: list[str] = json.loads((self.folder / "messages.json").read_text(encoding="utf-8"))
        return found


def send(terminal: Terminal, text: str) -> None:
    """Sends a line from an empty prompt, without waiting for its effect."""
    terminal.wait_prompt()
    terminal.type(text)
    terminal.key("enter")


def wait_replies(terminal: Terminal, count: int) -> None:
    """Waits until that many replies have ended and the prompt is back."""
    terminal.wait(lambda: terminal.everything.count("TTFT") == count)
    terminal.wait_prompt()


def leave(terminal: Terminal) -> None:
    """Leaves with Ctrl-D and checks that the terminal is restored."""
    terminal.wait_prompt()
    terminal.key("ctrl-d")
    assert terminal.wait_end() == 0
    check_restored(terminal)


def check_restored(terminal: Terminal) -> None:
    """Checks that the terminal has the settings from before the chat."""
    assert not terminal.cursor_hidden
    assert terminal.wraps
    assert terminal.settings == terminal.settings_before
    assert terminal.raw.rfind(b"\x1b[?2004l") >= terminal.raw.rfind(
        b"\x1b[?2004h"
    )  # bracketed paste is off
    assert not re.search(r"\x1b|\[\?|\[0m", terminal.everything)


class ChatUser:
    """Types at a chat and waits for its output.

    Args:
        terminal: The terminal of the chat.
        prompt: Text before the cursor when the chat waits for input.
    """

    def __init__(self, terminal: Terminal, prompt: str = "> ") -> None:
        self.terminal = terminal
        self.prompt = prompt

    def type(self, line: str, *expected: str, prompt: str | None = None) -> str:
        """Sends a line and returns the output until the next prompt.

        Args:
            line: The line.
            expected: Texts that the output must contain.
            prompt: The next prompt; None: the same as before.
        """
        terminal = self.terminal
        terminal.wait_prompt(self.prompt)
        before = len(terminal.everything)
        terminal.type(line)
        terminal.key("enter")
        self.prompt = prompt or self.prompt
        terminal.wait(lambda: all(text in terminal.everything[before:] for text in expected))
        terminal.wait_prompt(self.prompt)
        return terminal.everything[before:]

    def begin(self, line: str) -> str:
        """Sends a line and returns the start of its reply once it is on the screen."""
        self.terminal.wait_prompt(self.prompt)
        self.terminal.type(line)
        self.terminal.key("enter")
        self.terminal.wait(lambda: len(self.output_of(line)) > 20)
        return self.output_of(line)

    def output_of(self, line: str) -> str:
        """Returns the text after the last such line; empty before it was sent."""
        _, sent, output = self.terminal.everything.rpartition(f"{self.prompt}{line}\n")
        return output if sent else ""

    def leave(self) -> None:
        """Leaves with Ctrl-D and checks that the terminal is restored."""
        self.terminal.wait_prompt(self.prompt)
        self.terminal.key("ctrl-d")
        assert self.terminal.wait_end() == 0
        assert self.terminal.settings == self.terminal.settings_before
        assert not self.terminal.cursor_hidden
