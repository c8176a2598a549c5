"""The commands of the chat: what they are called, what they do, how their arguments complete."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS

from ..terminal.texts import excerpt
from . import verbs, views
from .status import clean

if TYPE_CHECKING:
    from .repl import Repl


COMPLETED = 200  # sessions that the Tab key knows: those that were used last


class Leave(Exception):
    """The person leaves the chat."""


@dataclass(frozen=True)
class Command:
    """`run` gets what stands behind the name; `complete` gives (argument, meaning) pairs for the
    words before the one being typed; with `takes_all`, what is typed may have spaces in it.
    `details` and `table` are for `/help NAME`."""

    name: str
    arguments: str
    help: str
    run: Callable[[Repl, str], None]
    details: str = ""
    complete: Callable[[Repl, list[str]], Iterable[tuple[str, str]]] = lambda _repl, _words: ()
    table: Mapping[str, str] = field(default_factory=dict)
    takes_all: bool = False


def run(repl: Repl, text: str) -> Command:
    """Obeys one line that begins with a slash, and returns what it was. Raises InvalidRequest and
    what the session does."""
    name = re.split(r"\s", text[1:], maxsplit=1)[0]  # a line end may be the first blank
    command, argument = find(name), text[1 + len(name) :].strip()
    if argument and not command.arguments:
        raise InvalidRequest(f"/{name} is followed by {argument!r}, expected nothing behind it")
    command.run(repl, argument)
    return command


def find(name: str) -> Command:
    """The command; InvalidRequest with the nearest one when there is none of that name."""
    if found := COMMANDS.get(name):
        return found
    near = difflib.get_close_matches(name.lower(), COMMANDS, 1, 0.5)
    near = near or [other for other in COMMANDS if name and other.startswith(name.lower())][:1]
    hint = f"did you mean /{near[0]}?" if near else "/help lists them."
    raise InvalidRequest(
        f'there is no command /{name}; {hint} A message may begin with a slash in """ quotes.'
    )


def complete(repl: Repl, text: str) -> Iterable[tuple[str, int, str]]:
    """Completions of a line up to the cursor: (text, where it starts, meaning)."""
    *before, word = text.split(" ")
    if not before:
        for command in COMMANDS.values():
            if command.name.startswith(word[1:]):
                yield "/" + command.name, -len(word), command.help
    elif found := COMMANDS.get(before[0][1:]):
        words = before[1:]
        if found.takes_all:
            words, word = [], text.partition(" ")[2]
        for value, meaning in found.complete(repl, words):
            if value.startswith(word):
                yield value, -len(word), meaning


def _help(repl: Repl, argument: str) -> None:
    if argument:
        views.command_help(repl.screen, find(argument.removeprefix("/").split()[0]))
    else:
        views.all_help(repl.screen, COMMANDS.values())


def _exit(_repl: Repl, _argument: str) -> None:
    raise Leave


def _complete_commands(_repl: Repl, words: list[str]) -> Iterable[tuple[str, str]]:
    return () if words else ((command.name, command.help) for command in COMMANDS.values())


def _complete_sessions(repl: Repl, words: list[str]) -> Iterable[tuple[str, str]]:
    if words:
        return ()
    found = repl.engine.sessions(repl.session.owner, limit=COMPLETED)
    return ((i.name, clean(i.title)) for i in found)


def _complete_settings(_repl: Repl, words: list[str]) -> Iterable[tuple[str, str]]:
    return () if words else SETTINGS.items()


def _complete_questions(repl: Repl, words: list[str]) -> Iterable[tuple[str, str]]:
    if words:
        return ()
    return ((str(i), excerpt(t.text)) for i, t in enumerate(verbs.users(repl.session), 1))


def _complete_branches(repl: Repl, words: list[str]) -> Iterable[tuple[str, str]]:
    if not words:
        yield from _complete_questions(repl, words)
    elif (
        len(words) == 1
        and words[0].isdecimal()
        and 1 <= int(words[0]) <= len(verbs.users(repl.session))
    ):
        for branch in repl.session.branches(int(words[0]) - 1):
            text = branch.reply.text if branch.reply else branch.turn.text
            yield str(branch.index + 1), excerpt(text)


def _complete_think(_repl: Repl, words: list[str]) -> Iterable[tuple[str, str]]:
    return () if words else _THINK.items()


_THINK = {
    "on": "the model thinks before it answers",
    "off": "it answers at once",
    "show": "reasoning is shown, dim",
    "hide": "only its length is shown",
}

_TABLE = (
    Command(
        "help", "[COMMAND]", "list the commands, or explain one", _help,
        complete=_complete_commands,
    ),
    Command("exit", "", "leave; Ctrl-D does the same", _exit),
    Command(
        "new", "[NAME]", "begin another session", verbs.new,
        "It has the system prompt and the settings of this one, which stays: /switch goes back.",
    ),
    Command(
        "sessions", "[all]", "list the sessions", verbs.sessions,
        f"The {views.LISTED} that were used last, unless it is followed by all.",
        lambda _repl, words: () if words else [("all", "every one, not only the last used")],
    ),
    Command(
        "search", "WORDS", "find sessions by what was said in them", verbs.search,
        "All words have to be there; one that ends in * stands for all that begin like it.",
    ),
    Command(
        "switch", "NAME", "go to another session", verbs.switch,
        "Every session keeps its place and what the model has computed for it, those of earlier "
        "chats too.",
        _complete_sessions, takes_all=True,
    ),
    Command(
        "undo", "", "take back the last question and its reply", verbs.undo,
        "The question is put on the next input line, to be changed or deleted. Nothing is lost: "
        "/branches shows what was taken back.",
    ),
    Command(
        "retry", "", "answer the last question once more", verbs.retry,
        "The reply before stays as a branch. Without randomness (temperature 0) it is the same.",
    ),
    Command(
        "edit", "[N] [TEXT]", "ask something else in the place of question N", verbs.edit,
        "Without N it is the last question (give N where TEXT begins with a number). Without TEXT "
        "the question is put on the next input line, to be changed there; Ctrl-X Ctrl-E opens an "
        "editor. The questions after N and the old replies stay as a branch.",
        _complete_questions,
    ),
    Command(
        "continue", "", "extend the last reply where it ended", verbs.continue_,
        "After Ctrl-C or a limit it becomes what it would have been without. A reply that ended by "
        "itself is complete.",
    ),
    Command(
        "fork", "[NAME [N]]", "go on in a copy of the session", verbs.fork,
        "With N the copy ends after question N and its reply. It shares what is computed.",
    ),
    Command(
        "title", "[TEXT]", "show or change the title of the session", verbs.title,
        "Without one of its own a session is called by the beginning of its first question.",
    ),
    Command(
        "tag", "[WORD|-WORD ...]", "show, add or take away tags of the session", verbs.tag,
    ),
    Command(
        "pin", "[off]", "keep what is computed for the session before others'", verbs.pin,
        complete=lambda _repl, words: () if words else [("off", "no longer")],
    ),
    Command(
        "delete", "[NAME]", "delete this session, or another, for good", verbs.delete,
        "Asks first. What is computed for it goes too, as far as no other session shares it.",
        _complete_sessions, takes_all=True,
    ),
    Command(
        "branches", "[N [K]]", "list the ways the talk went at question N, or go to the Kth",
        verbs.branches,
        "Without N: all questions with more than one. The current one is marked with *. /edit, "
        "/retry and /undo make them.",
        _complete_branches,
    ),
    Command(
        "system", "[TEXT|off]", "show, change or remove the system prompt", verbs.system,
        "A change is computed with the next question: the whole conversation then is read anew.",
    ),
    Command(
        "set", "[NAME [VALUE]]", "show or change the settings of the session", verbs.set_,
        'VALUE is a number, a text, or JSON such as ["a", "b"]; default takes the setting '
        "back to the model's own.",
        _complete_settings, SETTINGS,
    ),
    Command(
        "show", "[N|all]", f"show the last N rounds, {verbs.SHOWN} by default", verbs.show
    ),
    Command("stats", "", "what the engine has done, and this session's context", verbs.stats),
    Command(
        "tokens", "[N|all]", f"the tokens of the last N rounds, {verbs.SHOWN} by default",
        verbs.tokens,
        "Each with its number; special tokens are spelled out.",
    ),
    Command(
        "think", "[on|off|show|hide]", "whether the model thinks, and whether it shows",
        verbs.think,
        "on and off count from the next reply on; /retry asks the last question again with them.",
        _complete_think, _THINK,
    ),
    Command(
        "export", "FILE [--force] [--pages]",
        "write the conversation to FILE.md or FILE.json, all branches to FILE.zip", verbs.export,
        "A file that exists is left alone without --force. A .zip can be imported elsewhere; with "
        "--pages what is computed goes with it.",
    ),
    Command(
        "import", "FILE [NAME]", "go to a session that /export FILE.zip wrote", verbs.import_,
        "Without NAME it is called as it was there.",
    ),
    Command("save", "", "not needed: everything is kept as it comes", verbs.save),
)  # fmt: skip

COMMANDS = {command.name: command for command in _TABLE}

SHOWING = frozenset(
    ("new", "switch", "undo", "retry", "edit", "continue", "fork", "delete", "branches", "system",
     "show", "import")
)  # fmt: skip
"""Behind these a person knows where the conversation is."""
