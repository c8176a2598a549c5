"""What the commands of the chat do. Each gets the chat and what was typed behind its name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest
from lmchat.store.data_directory import data_dir

from ..sessions.export import write
from ..terminal.line_input import QUOTES, can_prefill, quote, unquote
from ..terminal.texts import counted
from . import views
from .resume import same_model
from .setting_text import explanation, parse_value, thinking_variables
from .status import clean

if TYPE_CHECKING:
    import lmchat

    from .repl import Repl

SHOWN = 3  # rounds that /show and /tokens show unless told otherwise
NAMED = 8  # sessions that a message names
_EXPORT_OPTIONS = ("--force", "--pages")
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
    _begin(repl, argument)
    repl.screen.note(f"session {repl.session.name} begins; /switch {old.name} goes back")
    kept = ["the system prompt"] if old.system is not None else []
    kept += ["the settings"] if old.settings or old.template_variables else []
    if kept:
        repl.screen.note(f"it keeps {' and '.join(kept)}")


def _begin(repl: Repl, name: str = "") -> None:
    """Another session, as this one but for what was said."""
    old = repl.session
    session = repl.engine.session(
        name or None,
        system=old.system,
        history=old.history,
        settings=old.settings,
        template_variables=old.template_variables,
        overflow=old.overflow,
    )
    repl.go(session, begun=not name)


def sessions(repl: Repl, argument: str) -> None:
    """/sessions [all]"""
    if argument not in ("", "all"):
        raise InvalidRequest(f"/sessions {argument}: expected nothing behind it, or all")
    views.sessions(repl, everything=argument == "all")


def search(repl: Repl, argument: str) -> None:
    """/search WORDS"""
    if not argument:
        raise InvalidRequest("/search needs the words to look for")
    views.found(repl, argument)


def switch(repl: Repl, argument: str) -> None:
    """/switch NAME"""
    if not argument:
        raise InvalidRequest(f"/switch needs the name of a session: {_some_names(repl)}")
    info = _info(repl, argument)
    repl.go(repl.engine.session(argument, owner=info.owner))
    views.place(repl)
    _tell_of_model(repl, info.model)


def undo(repl: Repl, _argument: str) -> None:
    """/undo"""
    if not repl.is_seen():
        return
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
    if not repl.is_seen():
        return
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
    if not repl.is_seen():
        return
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
    if not repl.is_seen():
        return
    before = last_reply(repl.session)
    if before is None:
        _nothing_to(repl, "continue")
        return
    if before.finish_reason == "stop":
        repl.screen.note("The reply was complete; there is nothing to continue.")
        return
    repl.answer(lambda: repl.session.continue_(stream=True), before.text)


def fork(repl: Repl, argument: str) -> None:
    """/fork [NAME [N]]"""
    name, _, at = argument.partition(" ")
    old = repl.session
    kept = question_index(old, at.strip()) + 1 if at else None
    repl.go(old.fork(name or None, kept))
    repl.screen.note(f"session {repl.session.name} goes on from here; {old.name} stays as it is")


def branches(repl: Repl, argument: str) -> None:
    """/branches [N [K]]"""
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
        size = counted(session.length, "token")
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
    repl.session.refresh()  # another terminal may have gone on with it
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


def pin(repl: Repl, argument: str) -> None:
    """/pin [off]"""
    if argument not in ("", "on", "off"):
        raise InvalidRequest(f"/pin {argument}: expected nothing behind it, or off")
    pinned = argument != "off"
    repl.session.pin(pinned)
    stays = "stays in memory and on disk before others" if pinned else "goes as any other"
    repl.screen.note(f"session {repl.session.name} is {'' if pinned else 'not '}pinned: what is "
                     f"computed for it {stays}")  # fmt: skip


def title(repl: Repl, argument: str) -> None:
    """/title [TEXT]"""
    if argument:
        repl.session.set_title(argument)
    said = repl.session.title or "none yet, it will be the beginning of the first question"
    repl.screen.note(f"title: {clean(said)}")


def tag(repl: Repl, argument: str) -> None:
    """/tag [WORD|-WORD ...]"""
    tags = list(repl.session.tags)
    for word in argument.split():
        name = word.removeprefix("-")
        if not name:
            raise InvalidRequest(f"/tag {argument}: expected words, or -WORD to take one away")
        if word.startswith("-") and name not in tags:
            raise InvalidRequest(f"there is no tag {name!r}, expected {_listed(tags)}")
        tags = [other for other in tags if other != name] + ([] if word.startswith("-") else [name])
    if argument:
        repl.session.set_tags(tags)
    repl.screen.note(f"tags: {_listed(list(repl.session.tags))}")


def delete(repl: Repl, argument: str) -> None:
    """/delete [NAME]"""
    name, owner = argument or repl.session.name, repl.session.owner
    info = _info(repl, name)
    rounds = counted(info.turns, "round")
    if not repl.confirm(f"Delete session {name} with {rounds} for good?"):
        repl.screen.note("nothing is deleted")
        return
    current = name == repl.session.name
    repl.engine.delete(name, owner)
    if current:
        _begin(repl)
    repl.forget(name)
    goes_on = f"; session {repl.session.name} begins" if current else ""
    repl.screen.note(f"session {name} is deleted{goes_on}")


def save(repl: Repl, _argument: str) -> None:
    """/save"""
    if repl.private:
        repl.screen.note("nothing of this chat is kept; /export FILE writes it")
        return
    repl.screen.note(
        f"Not needed: every message is in {data_dir()} before you see it. "
        f"lmchat chat --session {shlex.quote(repl.session.name)} goes on with it."
    )


def export(repl: Repl, argument: str) -> None:
    """/export FILE [--force] [--pages]"""
    options: set[str] = set()
    while found := next((o for o in _EXPORT_OPTIONS if argument.endswith(" " + o)), None):
        options.add(found)
        argument = argument.removesuffix(found).rstrip()
    force, pages = "--force" in options, "--pages" in options
    write(repl.session, argument, force=force, pages=pages, say=repl.screen.note)


def import_(repl: Repl, argument: str) -> None:
    """/import FILE [NAME]"""
    path, name = argument, None
    if not argument:
        raise InvalidRequest("/import needs the file, one that /export FILE.zip wrote")
    if not Path(path).expanduser().exists() and " " in argument:
        path, _, name = argument.rpartition(" ")
    file = Path(path.strip()).expanduser()
    try:
        session = repl.engine.import_(file, name, owner=repl.session.owner, say=repl.screen.note)
    except InvalidRequest as error:
        hint = "; /import FILE NAME gives another" if "is taken" in str(error) else ""
        raise InvalidRequest(f"{error}{hint}") from None
    repl.go(session)
    views.place(repl)
    _tell_of_model(repl, _info(repl, repl.session.name).model)


def _tell_of_model(repl: Repl, last: str) -> None:
    """Where the session has been with another model so far."""
    if last and not same_model(last, repl.engine.model):
        repl.screen.note(f"it was with {clean(last)}; now it goes on with {repl.name}")


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


def _info(repl: Repl, name: str) -> lmchat.SessionInfo:
    """What a list says of the session; InvalidRequest where there is none of that name."""
    for info in repl.engine.sessions(repl.session.owner):
        if info.name == name:
            return info
    raise InvalidRequest(f"there is no session {name!r}, expected one of {_some_names(repl)}")


def _some_names(repl: Repl) -> str:
    names = session_names(repl)
    more = ["..."] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])


def _listed(words: list[str]) -> str:
    return ", ".join(words) or "none"
