"""Compares what a process finds in a data directory with what the one before it reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.stress.chatter import State, digest

Wrong = Callable[[Sequence[int], Sequence[int], Mapping[str, Any]], str | None]

NEW_TURNS = {"send": (0, 2), "edit": (0, 2), "retry": (0, 1, 2), "continue_": (0, 1)}
MOVES = (*NEW_TURNS, "undo", "switch")


@dataclass
class Step:
    """A verb on a session (and perhaps another one), and the text that it showed."""

    verb: str = "none"
    name: str = ""
    other: str | None = None
    shown: str = ""


class Witness:
    """Reads the lines of the processes of one data directory and collects what is wrong.

    `wrong_reply` returns what is wrong with a reply to a prompt. After a kill each session is as it
    was before or after the interrupted step, with all text that was shown.
    """

    def __init__(self, wrong_reply: Wrong) -> None:
        self.problems: list[str] = []
        self.verified = 0  # replies
        self.loaded = 0  # tokens whose KV was loaded from disk for them
        self.looked = False  # whether the last process has looked at all sessions
        self.step = Step()  # under way when the last process was killed
        self._wrong_reply = wrong_reply
        self._good: set[str] = set()  # replies that were verified
        self._states: dict[str, State] = {}  # reported states, by session
        self._judged: set[str] = set()  # sessions that were found after the step under way
        self._found: set[str] = set()  # by this process

    def read(self, printed: bytes) -> None:
        """Reads all lines of one process. The last one may be incomplete."""
        self.looked, self._found = False, set()
        for line in printed.splitlines(keepends=True):
            if line.endswith(b"\n"):
                kind, *values = json.loads(line)
                self._take(kind, values)

    def _take(self, kind: str, values: list[Any]) -> None:
        match kind:
            case "found":
                self._find(values[0], values[1]["state"], values[1]["replies"])
            case "looked":
                self._missing()
                self.looked, self.step, self._judged = True, Step(), set()
            case "is":
                self._states[values[0]] = values[1]
            case "gone":
                self._states.pop(values[0], None)
            case "begins":
                self.step = Step(*values)
            case "shows":
                self.step.shown += values[0]
            case "done":
                self.step = Step()
            case "closed":
                pass
            case _:
                self._blame(f"the process printed {kind} {values}")

    def _blame(self, problem: str) -> None:
        self.problems.append(f"{self.step.verb} on {self.step.name or 'nothing'}: {problem}")

    # --- judging -----------------------------------------------------------------------------

    def _find(self, name: str, state: State, replies: Sequence[Mapping[str, Any]]) -> None:
        old, step = self._states.get(name), self.step
        if name == step.other and name not in self._judged:
            self._judge_fork(name, old, state)
        elif old is None:
            if state["turns"]:
                self._blame(f"session {name} came from nowhere")
        elif name == step.name and name not in self._judged:
            self._judge_step(old, state)
        elif state != old:
            self._blame(f"session {name} is not as it was acknowledged")
        shown = step.shown if name == step.name else ""
        if shown and not any(shown in reply["text"] for reply in replies):
            self._blame(f"{shown!r} was shown and is missing")
        for reply in replies:
            self._judge_reply(name, reply)
        self._states[name] = state
        self._judged.add(name)
        self._found.add(name)

    def _judge_reply(self, name: str, reply: Mapping[str, Any]) -> None:
        given = reply["prompt"], reply["ids"], reply["settings"]
        if digest(given) in self._good:
            return
        self._good.add(digest(given))
        self.verified += 1
        self.loaded += reply["loaded"]
        wrong = self._wrong_reply(*given)
        if wrong is not None:
            self._blame(f"session {name}, a reply that ended by {reply['ended']!r}: {wrong}")

    def _missing(self) -> None:
        for name in set(self._states) - self._found:
            step = self.step
            if name != step.other and (name != step.name or step.verb != "delete"):
                self._blame(f"session {name} is gone")
            elif name in self._judged:
                self._blame(f"session {name} was found once, and is gone now")
            del self._states[name]

    def _judge_fork(self, name: str, old: State | None, new: State) -> None:
        """Checks that the target is unchanged or a copy of the source's turns."""
        source = self._states[self.step.name]
        copied = new["leaf"] == source["leaf"] and new["turns"].items() <= source["turns"].items()
        if new != old and not copied:
            self._blame(f"session {name} is neither what it was nor a copy")

    def _judge_step(self, old: State, new: State) -> None:
        """Checks what an interrupted verb may not have done to its session."""
        verb = self.step.verb
        grown = str(old["leaf"]) if verb == "continue_" else None
        lost = [
            i for i, turn in old["turns"].items()
            if i not in new["turns"] or (i != grown and new["turns"][i] != turn)
        ]  # fmt: skip
        if lost:
            self._blame(f"turns {lost} are lost or changed")
        more = len(new["turns"]) - len(old["turns"])
        if more not in NEW_TURNS.get(verb, (0,)):
            self._blame(f"{more} turns came")
        if grown and new["tokens"] < old["tokens"] - 1:  # a stop token is taken off
            self._blame(f"{old['tokens'] - new['tokens']} tokens are lost")
        if old["rest"] != new["rest"] and verb not in ("set", "pin"):
            self._blame("its settings changed")
        if old["leaf"] != new["leaf"] and verb not in MOVES:
            self._blame(f"it went to turn {new['leaf']}")
