"""What the commands of the chat do. Each gets the chat and what was typed behind its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest

from . import views
from .export import write
from .line_input import QUOTES, can_prefill, quote, unquote
from .setting_text import explanation, parse_value, thinking_variables

if TYPE_CHECKING:
    import lmchat

    from .repl import Repl

SHOWN = 3  # rounds that /show and /tokens show unless told otherwise
_NUMBER_AND_TEXT = re.compile(r"(\d+)(?:\s+(.*))?$", re.DOTALL)


def users(session: lmchat.Session) -> list[lmchat.Turn]:
    """The questions of the conversation. People count them from 1."""
    return [turn for turn in session.turns if turn.role == "user"]


def question_index(session: lmchat.Session, text: str, more: int = 0) -> int:
    """The index from 0 of the question with that number; `more` may follow the last one."""
    count = len(users(session)) + more
    if not count:
        raise InvalidRequest("there is no question yet")
    if not text.isdecimal() or not 1 <= int(text) <= count:
        raise InvalidRequest(f"there is no question {text}, expected {_one_to(count)}")
    return int(text) - 1


def last_reply(session: lmchat.Session) -> lmchat.Turn | None:
    """The reply at the conversation's end; None before there is one."""
    turns = session.turns
    return turns[-1] if turns and turns[-1].role == "assistant" else None


def new(repl: Repl, argument: str) -> None:
    """/new [NAME]"""
    old = repl.session
    if argument and argument in session_names(repl):
        raise InvalidRequest(
            f"session {argument!r} exists, expected a new name; /switch goes to it"
        )
    repl.session = repl.engine.session(
        argument or None,
        system=old.system,
        history=old.history,
        settings=old.settings,
        template_variables=old.template_variables,
    )
    repl.screen.note(f"session {repl.session.name} begins; /switch {old.name} goes back")
    kept = ["the system prompt"] if old.system is not None else []
    kept += ["the settings"] if old.settings or old.template_variables else []
    if kept:
        repl.screen.note(f"it keeps {' and '.join(kept)}")


def sessions(repl: Repl, _argument: str) -> None:
    """/sessions"""
    views.sessions(repl)


def switch(repl: Repl, argument: str) -> None:
    """/switch NAME"""
    names = ", ".join(session_names(repl))
    if not argument:
        raise InvalidRequest(f"/switch needs the name of a session: {names}")
    if argument not in session_names(repl):
        raise InvalidRequest(f"there is no session {argument!r}, expected one of {names}")
    repl.session = repl.engine.session(argument)
    views.place(repl)


def undo(repl: Repl, _argument: str) -> None:
    """/undo"""
    if not users(repl.session):
        _nothing_to(repl, "undo")
        return
    text, again = repl.session.undo(), ""
    if can_prefill():
        repl.next_text, again = quote(text), "Enter sends it again, "
    repl.screen.note(f"taken back; {again}/branches shows what there was")


def retry(repl: Repl, _argument: str) -> None:
    """/retry"""
    session = repl.session
    before = last_reply(session)
    if before is None:
        _nothing_to(repl, "retry")
        return
    repl.answer(lambda: session.retry(stream=True))
    again = session.turns[-1]
    same = again.token_ids and again.token_ids == before.token_ids[: len(again.token_ids)]
    if same and again.settings.get("temperature") == 0:
        off = session.settings.get("do_sample") is False
        varied = "/set do_sample on" if off else "/set temperature 0.8"
        repl.screen.note(f"greedy settings give the same reply; {varied} varies it")


def edit(repl: Repl, argument: str) -> None:
    """/edit [N] [TEXT]"""
    session = repl.session
    if not users(session):
        _nothing_to(repl, "edit")
        return
    given = _NUMBER_AND_TEXT.match(argument)
    number, text = given.groups() if given else (None, argument)
    index = question_index(session, number or str(len(users(session))))
    old = users(session)[index].text
    if not text or not text.strip(QUOTES):
        if not can_prefill():
            raise InvalidRequest("this terminal cannot show the old text, expected /edit N TEXT")
        repl.next_text = f"/edit {index + 1} {quote(old)}"
        repl.screen.note("Enter asks what you make of it, Ctrl-C leaves it as it was")
        return
    new = unquote(text)
    if not new.strip() or new == old:
        raise InvalidRequest("the question is unchanged or empty; /retry answers it once more")
    repl.answer(lambda: session.edit(index, new, stream=True))


def continue_(repl: Repl, _argument: str) -> None:
    """/continue"""
    before = last_reply(repl.session)
    if before is None:
        _nothing_to(repl, "continue")
        return
    if before.finish_reason == "stop":
        repl.screen.note("The reply was complete; there is nothing to continue.")
        return
    repl.answer(lambda: repl.session.continue_(stream=True), before.text)


def fork(repl: Repl, argument: str) -> None:
    """/fork [NAME] [N]"""
    name, _, at = argument.partition(" ")
    old = repl.session
    kept = question_index(old, at.strip()) + 1 if at else None
    repl.session = old.fork(name or None, kept)
    repl.screen.note(f"session {repl.session.name} goes on from here; {old.name} stays as it is")


def branches(repl: Repl, argument: str) -> None:
    """/branches [N] [K]"""
    session = repl.session
    if not argument:
        views.all_branches(repl)
        return
    number, _, which = argument.partition(" ")
    taken_back = bool(session.branches(len(users(session))))
    index = question_index(session, number, more=taken_back)
    branches = session.branches(index)
    if not which:
        views.branches(repl, index, branches)
        return
    if not which.strip().isdecimal() or not 1 <= int(which) <= len(branches):
        raise InvalidRequest(
            f"question {number} has no branch {which}, expected {_one_to(len(branches))}"
        )
    session.switch(index, int(which) - 1)
    views.place(repl)


def system(repl: Repl, argument: str) -> None:
    """/system [TEXT|off]"""
    session = repl.session
    before = session.system
    if argument:
        session.set_system(None if argument == "off" else unquote(argument))
    system = session.system
    repl.screen.note("no system prompt" if system is None else f"system prompt: {system}")
    if system != before and users(session):
        size = views.counted(session.length, "token")
        repl.screen.note(f"the next question computes the whole chat again ({size})")


def set_(repl: Repl, argument: str) -> None:
    """/set [NAME [VALUE]]"""
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    if name and value.strip():
        repl.session.set(**{name: parse_value(value.strip())})
    elif name:
        explanation(name)  # refuses a name that is none
    views.settings(repl, name or None)


def show(repl: Repl, argument: str) -> None:
    """/show [N|all]"""
    views.conversation(repl, _count(argument, len(users(repl.session))))


def tokens(repl: Repl, argument: str) -> None:
    """/tokens [N|all]"""
    views.tokens(repl, _count(argument, len(users(repl.session))))


def stats(repl: Repl, _argument: str) -> None:
    """/stats"""
    views.stats(repl)


def think(repl: Repl, argument: str) -> None:
    """/think [on|off|show|hide]"""
    if argument in ("show", "hide"):
        repl.show_reasoning = argument == "show"
    elif argument in ("on", "off"):
        repl.session.set_variables(**thinking_variables(repl.engine, argument == "on"))
    elif argument:
        raise InvalidRequest(f"/think {argument}: expected on, off, show or hide")
    views.thinking(repl)


def export(repl: Repl, argument: str) -> None:
    """/export FILE [--force]"""
    force = argument.endswith(" --force")
    path = argument.removesuffix(" --force").strip()
    repl.screen.note(write(repl.session, path, force=force))


def _nothing_to(repl: Repl, verb: str) -> None:
    repl.screen.note(f"There is nothing to {verb}.")


def _one_to(count: int) -> str:
    return "1, the only one" if count == 1 else f"1 to {count}"


def _count(argument: str, default: int) -> int:
    """How many rounds to show; all by default."""
    if not argument:
        return min(default, SHOWN)
    if argument == "all":
        return default
    if not argument.isdecimal() or not int(argument):
        raise InvalidRequest(f"number of rounds is {argument!r}, expected 1 or more, or all")
    return int(argument)


def session_names(repl: Repl) -> list[str]:
    """The sessions of the person, the last used first."""
    return [info.name for info in repl.engine.sessions(repl.session.owner)]
