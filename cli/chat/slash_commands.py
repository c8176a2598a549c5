"""The commands of the chat: what they are called, what they do, how their arguments complete."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS

from ..terminal.texts import clean, excerpt
from . import actions, views
from .context import ChatContext, Leave, SlashCommand

COMPLETED = 200  # sessions that the Tab key knows: those that were used last


def run(chat: ChatContext, text: str) -> SlashCommand:
    """Obeys one line that begins with a slash, and returns what it was. Raises InvalidRequest and
    what the session does."""
    name = re.split(r"\s", text[1:], maxsplit=1)[0]  # a line end may be the first blank
    command, argument = find(name), text[1 + len(name) :].strip()
    if argument and not command.arguments:
        raise InvalidRequest(f"/{name} is followed by {argument!r}, expected nothing behind it")
    command.run(chat, argument)
    return command


def find(name: str) -> SlashCommand:
    """The command; InvalidRequest with the nearest one when there is none of that name."""
    if found := COMMANDS.get(name):
        return found
    near = difflib.get_close_matches(name.lower(), COMMANDS, 1, 0.5)
    near = near or [other for other in COMMANDS if name and other.startswith(name.lower())][:1]
    hint = f"did you mean /{near[0]}?" if near else "/help lists them."
    raise InvalidRequest(
        f'there is no command /{name}; {hint} A message may begin with a slash in """ quotes.'
    )


def complete(chat: ChatContext, text: str) -> Iterable[tuple[str, int, str]]:
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
        for value, meaning in found.complete(chat, words):
            if value.startswith(word):
                yield value, -len(word), meaning


def _help(chat: ChatContext, argument: str) -> None:
    if argument:
        views.command_help(chat.screen, find(argument.removeprefix("/").split()[0]))
    else:
        views.all_help(chat.screen, COMMANDS.values())


def _exit(_chat: ChatContext, _argument: str) -> None:
    raise Leave


def _complete_commands(_chat: ChatContext, words: list[str]) -> Iterable[tuple[str, str]]:
    return () if words else ((command.name, command.help) for command in COMMANDS.values())


def _complete_sessions(chat: ChatContext, words: list[str]) -> Iterable[tuple[str, str]]:
    if words:
        return ()
    found = chat.engine.sessions(chat.session.owner, limit=COMPLETED)
    return ((i.name, clean(i.title)) for i in found)


def _complete_settings(_chat: ChatContext, words: list[str]) -> Iterable[tuple[str, str]]:
    return () if words else SETTINGS.items()


def _complete_questions(chat: ChatContext, words: list[str]) -> Iterable[tuple[str, str]]:
    if words:
        return ()
    return ((str(i), excerpt(t.text)) for i, t in enumerate(actions.users(chat.session), 1))


def _complete_branches(chat: ChatContext, words: list[str]) -> Iterable[tuple[str, str]]:
    if not words:
        yield from _complete_questions(chat, words)
    elif (
        len(words) == 1
        and words[0].isdecimal()
        and 1 <= int(words[0]) <= len(actions.users(chat.session))
    ):
        for branch in chat.session.branches(int(words[0]) - 1):
            text = branch.reply.text if branch.reply else branch.turn.text
            yield str(branch.index + 1), excerpt(text)


def _complete_think(_chat: ChatContext, words: list[str]) -> Iterable[tuple[str, str]]:
    return () if words else _THINK.items()


_THINK = {
    "on": "the model thinks before it answers",
    "off": "it answers at once",
    "show": "reasoning is shown, dim",
    "hide": "only its length is shown",
}

_TABLE = (
    SlashCommand(
        "help", "[COMMAND]", "list the commands, or explain one", _help,
        complete=_complete_commands,
    ),
    SlashCommand("exit", "", "leave; Ctrl-D does the same", _exit),
    SlashCommand(
        "new", "[NAME]", "begin another session", actions.new,
        "It has the system prompt and the settings of this one, which stays: /switch goes back.",
    ),
    SlashCommand(
        "sessions", "[all]", "list the sessions", actions.sessions,
        f"The {views.LISTED} that were used last, unless it is followed by all.",
        lambda _chat, words: () if words else [("all", "every one, not only the last used")],
    ),
    SlashCommand(
        "search", "WORDS", "find sessions by what was said in them", actions.search,
        "All words have to be there; one that ends in * stands for all that begin like it.",
    ),
    SlashCommand(
        "switch", "NAME", "go to another session", actions.switch,
        "Every session keeps its place and what the model has computed for it, those of earlier "
        "chats too.",
        _complete_sessions, takes_all=True,
    ),
    SlashCommand(
        "undo", "", "take back the last question and its reply", actions.undo,
        "The question is put on the next input line, to be changed or deleted. Nothing is lost: "
        "/branches shows what was taken back.",
    ),
    SlashCommand(
        "retry", "", "answer the last question once more", actions.retry,
        "The reply before stays as a branch. Without randomness (temperature 0) it is the same.",
    ),
    SlashCommand(
        "edit", "[N] [TEXT]", "ask something else in the place of question N", actions.edit,
        "Without N it is the last question (give N where TEXT begins with a number). Without TEXT "
        "the question is put on the next input line, to be changed there; Ctrl-X Ctrl-E opens an "
        "editor. The questions after N and the old replies stay as a branch.",
        _complete_questions,
    ),
    SlashCommand(
        "continue", "", "extend the last reply where it ended", actions.continue_,
        "After Ctrl-C or a limit it becomes what it would have been without. A reply that ended by "
        "itself is complete.",
    ),
    SlashCommand(
        "fork", "[NAME [N]]", "go on in a copy of the session", actions.fork,
        "With N the copy ends after question N and its reply. It shares what is computed.",
    ),
    SlashCommand(
        "title", "[TEXT]", "show or change the title of the session", actions.title,
        "Without one of its own a session is called by the beginning of its first question.",
    ),
    SlashCommand(
        "tag", "[WORD|-WORD ...]", "show, add or take away tags of the session", actions.tag,
    ),
    SlashCommand(
        "pin", "[off]", "keep what is computed for the session before others'", actions.pin,
        complete=lambda _chat, words: () if words else [("off", "no longer")],
    ),
    SlashCommand(
        "delete", "[NAME]", "delete this session, or another, for good", actions.delete,
        "Asks first. What is computed for it goes too, as far as no other session shares it.",
        _complete_sessions, takes_all=True,
    ),
    SlashCommand(
        "branches", "[N [K]]", "list the ways the talk went at question N, or go to the Kth",
        actions.branches,
        "Without N: all questions with more than one. The current one is marked with *. /edit, "
        "/retry and /undo make them.",
        _complete_branches,
    ),
    SlashCommand(
        "system", "[TEXT|off]", "show, change or remove the system prompt", actions.system,
        "A change is computed with the next question: the whole conversation then is read anew.",
    ),
    SlashCommand(
        "set", "[NAME [VALUE]]", "show or change the settings of the session", actions.set_,
        'VALUE is a number, a text, or JSON such as ["a", "b"]; default takes the setting '
        "back to the model's own.",
        _complete_settings, SETTINGS,
    ),
    SlashCommand(
        "show", "[N|all]", f"show the last N rounds, {actions.SHOWN} by default", actions.show
    ),
    SlashCommand("stats", "", "show counters of the engine and the context in use", actions.stats),
    SlashCommand(
        "tokens", "[N|all]", f"the tokens of the last N rounds, {actions.SHOWN} by default",
        actions.tokens,
        "Each with its number; special tokens are spelled out.",
    ),
    SlashCommand(
        "think", "[on|off|show|hide]", "whether the model thinks, and whether it shows",
        actions.think,
        "on and off count from the next reply on; /retry asks the last question again with them.",
        _complete_think, _THINK,
    ),
    SlashCommand(
        "export", "FILE [--force] [--pages]",
        "write the conversation to FILE.md or FILE.json, all branches to FILE.zip", actions.export,
        "A file that exists is left alone without --force. A .zip can be imported elsewhere; with "
        "--pages what is computed goes with it.",
    ),
    SlashCommand(
        "import", "FILE [NAME]", "go to a session that /export FILE.zip wrote", actions.import_,
        "Without NAME it is called as it was there.",
    ),
    SlashCommand("save", "", "not needed: everything is kept as it comes", actions.save),
)  # fmt: skip

COMMANDS = {command.name: command for command in _TABLE}

SHOWING = frozenset(
    ("new", "switch", "undo", "retry", "edit", "continue", "fork", "delete", "branches", "system",
     "show", "import")
)  # fmt: skip
"""Behind these a person knows where the conversation is."""
