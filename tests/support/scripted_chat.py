"""The chat with a scripted model: `python -c "import scripted_chat; scripted_chat.main()" FILE`.

FILE holds a JSON list of replies, each a list of steps: ["text", TEXT], ["reasoning", TEXT],
["progress", DONE, TOTAL], ["wait", NAME] (until the file NAME appears beside FILE, or a stop),
["end", REASON], ["error", MESSAGE] (after the text), ["fail", MESSAGE] (before any),
["notice", TEXT] and ["loaded", TOKENS] (of the cached ones). The sent messages are written to
messages.json beside FILE, and "warm\n" for each call of `warm()` to warmed. A file before.json
there describes the session to resume: its "turns" as [ROLE, TEXT, FINISH_REASON], "residence" as
[DEVICE, HOST, DISK], and optionally "title", "unanswered" and "notices".
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import conftest  # noqa: F401 - maps cli/ where nothing is installed
from lmchat.cli.chat.repl import Repl
from lmchat.cli.chat.session_choice import NEW, Choice
from lmchat.errors import Error, InternalError, InvalidRequest
from lmchat.generation.generation import Delta, Progress, Reply
from lmchat.generation.state import State
from lmchat.store.turns import Timings, Turn, Usage
from lmchat.text.template_class import TemplateInfo

CONTEXT = 4096


class ScriptedStream:
    """A stream like that of `Session.stream()`, with the steps of the script."""

    def __init__(self, session: ScriptedSession, steps: list[list[Any]], before: str) -> None:
        self._session = session
        self._steps = steps
        self._before = before
        self.reply: Reply | None = None

    def __enter__(self) -> ScriptedStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> Iterator[Delta | Progress]:
        session, text, thought, reason = self._session, self._before, "", "stop"
        notices: list[str] = []
        loaded = 0
        error: Error | None = None
        for name, *values in self._steps:
            if name == "text":
                text += values[0]
                yield Delta("text", values[0])
            elif name == "reasoning":
                thought += values[0]
                yield Delta("reasoning", values[0])
            elif name == "progress":
                yield Progress(*values)
            elif name == "end":
                reason = values[0]
            elif name == "notice":
                notices.append(values[0])
            elif name == "loaded":
                loaded = values[0]
            elif name == "error":
                reason, error = "error", InternalError(values[0])
            elif name == "fail":
                session.running = False
                raise InvalidRequest(values[0])
            elif name == "wait" and session.wait(values[0]):
                reason = "cancelled"
                break
        words, count = len(text.split()), len(session.turns)
        if reason == "cancelled" and not words:  # the session is as it was
            session.turns, session.running = session.turns[:-1], False
            usage = Usage(prompt_tokens=12)
            self.reply = Reply("", "", [], reason, usage, Timings(ttft=0.09))
            return
        turn = Turn(count, count - 1, "assistant", text, {}, reasoning=thought,
                    token_ids=tuple(range(words)), finish_reason=reason)  # fmt: skip
        session.turns = (*session.turns, turn)
        session.length += 12 + words
        session.running = False
        self.reply = Reply(
            text, thought, list(turn.token_ids), reason,
            Usage(prompt_tokens=session.length - words, cached_tokens=session.length - 12 - words,
                  completion_tokens=words, loaded_tokens=loaded),
            Timings(ttft=0.09, tpot=0.032), error=error, turn=turn, notices=tuple(notices),
        )  # fmt: skip


class ScriptedSession:
    """The part of a session that sending and continuing need."""

    template_variables: ClassVar[dict[str, Any]] = {}
    name, owner, system, history = "chat-1", "local", None, "append"
    title, tags, pinned = "", (), False
    overflow = "refuse"
    dropped = ()
    state = State.IDLE

    def __init__(self, file: Path) -> None:
        self._folder = file.parent
        self._replies = iter(json.loads(file.read_text(encoding="utf-8")))
        self._stop = threading.Event()
        self.running = False
        self.turns: tuple[Turn, ...] = ()
        self.length = 0
        self.unanswered: str | None = None
        self.notices: tuple[str, ...] = ()
        self.residence = SimpleNamespace(device=0, host=0, disk=0)
        if (before := self._folder / "before.json").exists():
            self._go_on(json.loads(before.read_text(encoding="utf-8")))

    def _go_on(self, before: dict[str, Any]) -> None:
        for role, text, reason in before["turns"]:
            turn = Turn(len(self.turns), None, role, text, {}, finish_reason=reason)
            self.turns = (*self.turns, turn)
            self.length += len(text.split())
        self.unanswered = before.get("unanswered")
        self.notices = tuple(before.get("notices", ()))
        self.title = before.get("title", "")
        device, host, disk = before["residence"]
        self.residence = SimpleNamespace(device=device, host=host, disk=disk)

    def warm(self) -> None:
        with (self._folder / "warmed").open("a") as file:
            file.write("warm\n")

    def branches(self, _turn: int) -> list[Any]:
        return []

    def delete(self) -> None:
        (self._folder / "deleted").touch()

    def refresh(self) -> None:
        """Does nothing: no other process changes the session."""

    def stream(self, text: str) -> ScriptedStream:
        turn = Turn(len(self.turns), None, "user", text, {})
        self.turns = (*self.turns, turn)
        sent = [turn.text for turn in self.turns if turn.role == "user"]
        (self._folder / "messages.json").write_text(json.dumps(sent), encoding="utf-8")
        return self._begin("")

    def stream_continue(self) -> ScriptedStream:
        *turns, last = self.turns
        self.turns = tuple(turns)
        return self._begin(last.text)

    def _begin(self, before: str) -> ScriptedStream:
        self._stop.clear()
        self.running = True
        return ScriptedStream(self, next(self._replies), before)

    def stop(self) -> None:
        if self.running:
            self._stop.set()

    def wait(self, name: str) -> bool:
        """Waits for the file `name`; returns True if the reply is stopped first."""
        while not (self._folder / name).exists():
            if self._stop.wait(0.01):
                return True
        return False


class ScriptedEngine:
    """The part of an engine that the chat needs."""

    max_context = CONTEXT
    template_info = TemplateInfo("append", "yes")

    def __init__(self, session: ScriptedSession) -> None:
        self._session = session

    def sessions(self, owner: str | None = None, **_: Any) -> list[Any]:
        used = datetime.now(timezone.utc)
        return [SimpleNamespace(name="chat-1", title="", last_used=used, busy="")]


def main() -> None:
    """Runs the chat over the script; options after FILE: --plain, --private."""
    session = ScriptedSession(Path(sys.argv[1]))
    engine: Any = ScriptedEngine(session)
    chat: Any = session
    repl = Repl(engine, chat, name="scripted", plain="--plain" in sys.argv,
                private="--private" in sys.argv)  # fmt: skip
    sys.exit(repl.run(Choice(None, "trip", found=True) if session.turns else NEW))
