"""Scripted chats in terminals of their own, and what a person does there."""

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
    """Starts chats whose replies are those of `scripted_chat`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.json"
        self.env = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
            "LMCHAT_HOME": str(folder / "home"),
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
        """Writes the script alone."""
        self.script.write_text(json.dumps(replies), encoding="utf-8")

    def before(self, *turns: list[str], **facts: Any) -> None:
        """The chat goes on with a session of these [role, text, finish reason]."""
        text = json.dumps({"turns": turns, **facts})
        (self.folder / "before.json").write_text(text, encoding="utf-8")

    def go(self, name: str) -> None:
        """Lets a reply pass its "wait" step of that name."""
        (self.folder / name).touch()

    def messages(self) -> list[str]:
        """What the session got."""
        found: list[str] = json.loads((self.folder / "messages.json").read_text(encoding="utf-8"))
        return found


def send(terminal: Terminal, text: str) -> None:
    """Sends a line from an empty prompt; nothing more is waited for."""
    terminal.wait_prompt()
    terminal.type(text)
    terminal.key("enter")


def wait_replies(terminal: Terminal, count: int) -> None:
    """Until that many replies have ended and the prompt is back."""
    terminal.wait(lambda: terminal.everything.count("TTFT") == count)
    terminal.wait_prompt()


def leave(terminal: Terminal) -> None:
    """Ctrl-D at the prompt; the terminal must be as it was."""
    terminal.wait_prompt()
    terminal.key("ctrl-d")
    assert terminal.wait_end() == 0
    check_restored(terminal)


def check_restored(terminal: Terminal) -> None:
    """The terminal is as it was before the chat."""
    assert not terminal.cursor_hidden
    assert terminal.wraps
    assert terminal.settings == terminal.settings_before
    assert terminal.raw.rfind(b"\x1b[?2004l") >= terminal.raw.rfind(b"\x1b[?2004h")  # paste mode
    assert not re.search(r"\x1b|\[\?|\[0m", terminal.everything)
