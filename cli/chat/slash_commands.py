"""The table of the chat's slash commands: names, actions, help texts and completions."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS
from turbomind.near import nearest

from ..terminal.texts import clean, excerpt, human_bytes
from . import actions, message_files, views
from .context import ChatContext, Leave, SlashCommand

COMPLETED = 200  # most recently used sessions that Tab completes


def run(chat: ChatContext, text: str) -> SlashCommand:
    """Runs one line that begins with a slash.

    Args:
        chat: The running chat.
        text: The line.

    Returns:
        The command that was run.

    Raises:
        InvalidRequest: The command is unknown or its arguments are wrong.
        Error: The session cannot run it.
        Leave: The user leaves the chat.
    """
    name = re.split(r"\s", text[1:], maxsplit=1)[0]  # a line end may come first
    command, argument = find(name), text[1 + len(name) :].strip()
    if argument and not command.arguments:
        raise InvalidRequest(f"/{name} is followed by {argument!r}, expected nothing after it")
    command.run(chat, argument)
    return command


def find(name: str) -> SlashCommand:
    """Returns the command of that name.

    Raises:
        InvalidRequest: There is none; the message names the nearest one.
    """
    if found := NAMES.get(name):
        return found
    near = nearest(name, (known for known in NAMES if known not in _NOT_SUGGESTED))
    hint = f"did you mean /{near}?" if near else "/help lists all."
    raise InvalidRequest(
        f'there is no command /{name}; {hint} A message may begin with a slash in """ quotes.'
    )


def complete(chat: ChatContext, text: str) -> Iterable[tuple[str, int, str]]:
    """Yields completions of a line up to the cursor.

    Yields:
        (text, its start relative to the cursor, meaning).
    """
    *before, word = text.split(" ")
    if not before:
        for name, command in NAMES.items():
            if name.startswith(word[1:]):
                yield "/" + name, -len(word), command.help
    elif found := NAMES.get(before[0][1:]):
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
    return () if words else ((name, command.help) for name, command in NAMES.items())


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
    "on": "the model reasons before it answers",
    "off": "the model answers at once",
    "show": "reasoning is shown, dimmed",
    "hide": "only its length is shown",
}

_TABLE = (
    SlashCommand(
        "help", "[COMMAND]", "list the commands, or explain one", _help,
        complete=_complete_commands, aliases=("?",),
    ),
    SlashCommand(
        "exit", "", "leave; Ctrl-D does the same", _exit, aliases=("quit", "bye", "q"),
    ),
    SlashCommand(
        "new", "[NAME]", "start another session", actions.new,
        "It starts with the system prompt and the settings of this one. /switch goes back.",
    ),
    SlashCommand(
        "clear", "", "start a new chat, after a question", actions.clear,
        "As /new. Nothing is deleted: /switch goes back.",
    ),
    SlashCommand(
        "sessions", "[all]", "list the sessions", actions.sessions,
        f"Without all: the {views.LISTED} most recently used ones.",
        lambda _chat, words: () if words else [("all", "every session, not only the most recent")],
    ),
    SlashCommand(
        "search", "WORDS", "find sessions by the words in them", actions.search,
        "A session matches if it has all the words. A word that ends in * matches as a prefix.",
    ),
    SlashCommand(
        "switch", "NAME", "continue another session", actions.switch,
        "Its conversation and KV cache are still there, also from earlier chats.",
        _complete_sessions, takes_all=True,
    ),
    SlashCommand(
        "undo", "", "take back the last question and its reply", actions.undo,
        "The question appears on the next input line, to be changed or deleted. Nothing is "
        "lost: /branches lists the old branch.",
    ),
    SlashCommand(
        "retry", "", "answer the last question again", actions.retry,
        "The previous reply stays as a branch. Greedy settings (temperature 0) give the same "
            "reply.",
    ),
    SlashCommand(
        "edit", "[N] [TEXT]", "replace question N and answer it again", actions.edit,
        "Without N it is the last question (give N where TEXT begins with a number). Without TEXT "
        "the question appears on the next input line, to be changed there; Ctrl-X Ctrl-E opens an "
        "editor. The questions after N and the old replies stay as a branch.",
        _complete_questions,
    ),
    SlashCommand(
        "edit_reply", "[N] [TEXT]", "replace the reply to question N", actions.edit_reply,
        "As /edit, but nothing is generated: the next question follows this reply.",
        _complete_questions,
    ),
    SlashCommand(
        "continue", "", "extend the last reply from where it ended", actions.continue_,
        "After Ctrl-C or a length limit, the whole reply is the same as without the stop. A reply "
        "that the model ended is complete.",
    ),
    SlashCommand(
        "fork", "[NAME [N]]", "continue in a copy of the session", actions.fork,
        "With N the copy ends after question N and its reply. The copy shares the KV cache. A NAME "
        "that ends in a number is quoted.",
    ),
    SlashCommand(
        "title", "[TEXT]", "show or change the title of the session", actions.title,
        "The default title is the start of the first question.",
    ),
    SlashCommand(
        "tag", "[WORD|-WORD ...]", "show, add or remove tags of the session", actions.tag,
    ),
    SlashCommand(
        "pin", "[off]", "evict the KV cache of this session last", actions.pin,
        complete=lambda _chat, words: () if words else [("off", "evict it like any other")],
    ),
    SlashCommand(
        "delete", "[NAME]", "delete this session, or another, permanently", actions.delete,
        "Asks first. KV cache that no other session shares is freed.",
        _complete_sessions, takes_all=True,
    ),
    SlashCommand(
        "branches", "[N [K]]", "list the branches at question N, or switch to branch K",
        actions.branches,
        "Without N: all questions with several branches. * marks the current one. /edit, "
        "/edit_reply, /retry and /undo create branches.",
        _complete_branches,
    ),
    SlashCommand(
        "system", "[TEXT|off]", "show, change or remove the system prompt", actions.system,
        "After a change, the next question computes the whole conversation again.",
    ),
    SlashCommand(
        "set", "[NAME [VALUE]]", "show or change the settings of the session", actions.set_,
        'VALUE is a number, a text, or JSON such as ["a", "b"]; default restores the '
        "model's own value.",
        _complete_settings, SETTINGS,
    ),
    SlashCommand(
        "show", "[N|all]", f"show the last N rounds, {actions.SHOWN} by default", actions.show
    ),
    SlashCommand(
        "copy", "", "copy the last reply to the clipboard", actions.copy,
        "The terminal is asked to (OSC 52), also over ssh; some have to be told to allow it.",
    ),
    SlashCommand(
        "file", "PATH|off", "put a text file into the next message", actions.file,
        f"It has at most {human_bytes(message_files.MOST_BYTES)} and follows what is typed, under "
        "its name. Several may be given; off removes them.",
        lambda _chat, words: () if words else [("off", "the next message carries no file")],
    ),
    SlashCommand(
        "info", "", "show the model, its format, the device, threads and context", actions.info,
        "Another model answers in this session after lmchat chat MODEL --session NAME.",
        aliases=("model",),
    ),
    SlashCommand("stats", "", "show counters of the engine and the context in use", actions.stats),
    SlashCommand(
        "tokens", "[N|all]", f"show the tokens of the last N rounds, {actions.SHOWN} by default",
        actions.tokens,
        "Each token is shown as its id and its text; special tokens are spelled out.",
    ),
    SlashCommand(
        "think", "[on|off|show|hide]", "switch reasoning on or off, show or hide it",
        actions.think,
        "on and off apply from the next reply; /retry answers the last question again with them.",
        _complete_think, _THINK,
    ),
    SlashCommand(
        "export", "FILE [--force] [--pages]",
        "write the conversation to FILE.md or FILE.json, all branches to FILE.zip", actions.export,
        "An existing file is replaced only with --force. A .zip can be imported elsewhere; with "
        "--pages it includes the KV cache. FILE may have spaces, or be quoted as for a shell.",
    ),
    SlashCommand(
        "import", "FILE [NAME]", "open a session that /export FILE.zip wrote", actions.import_,
        "Without NAME the session has the name in the file.",
    ),
    SlashCommand("save", "", "not needed: every message is stored at once", actions.save),
)  # fmt: skip

COMMANDS = {command.name: command for command in _TABLE}

NAMES = COMMANDS | {alias: command for command in _TABLE for alias in command.aliases}
"""The commands by all their names."""

_NOT_SUGGESTED = ("delete",)  # a typing error does not lead there

SHOWING = frozenset(
    ("new", "clear", "switch", "undo", "retry", "edit", "edit_reply", "continue", "fork", "delete",
     "branches", "system", "show", "import")
)  # fmt: skip
"""Commands after which the screen shows the end of the conversation."""
