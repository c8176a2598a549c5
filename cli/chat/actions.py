"""Actions of the slash commands. Each takes the chat and the text after the command's name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest
from lmchat.store.data_directory import data_dir

from ..sessions.export import write
from ..terminal.line_input import QUOTES, can_prefill, quote, unquote
from ..terminal.texts import clean, counted
from . import message_files, views
from .context import ChatContext
from .session_choice import same_model
from .setting_values import explanation, parse_value, thinking_variables
from .typed import name_of, path_and_name, path_of

if TYPE_CHECKING:
    import lmchat


SHOWN = 3  # rounds that /show and /tokens show by default
NAMED = 8  # session names in a message, at most
_EXPORT_OPTIONS = ("--force", "--pages")
_NAME_AND_NUMBER = re.compile(r"(.+)\s+(\d+)$", re.DOTALL)
_NUMBER_AND_TEXT = re.compile(r"(\d+)(?:\s+(.*))?$", re.DOTALL)


def users(session: lmchat.SessionApi) -> list[lmchat.Turn]:
    """Returns the questions of the conversation; users count them from 1."""
    return [turn for turn in session.turns if turn.role == "user"]


def question_index(session: lmchat.SessionApi, text: str, more: int = 0) -> int:
    """Returns the index, from 0, of a question that the user names by its number.

    Args:
        session: The session.
        text: The number, from 1.
        more: Numbers after the last question that are also valid.

    Raises:
        InvalidRequest: There is no such question.
    """
    count = len(users(session)) + more
    if not count:
        raise InvalidRequest("there is no question yet")
    if not text.isdecimal() or not 1 <= int(text) <= count:
        raise InvalidRequest(f"there is no question {text}, expected {_one_to(count)}")
    return int(text) - 1


def last_chaty(session: lmchat.SessionApi) -> lmchat.Turn | None:
    """Returns the reply at the end of the conversation; None if there is none."""
    turns = session.turns
    return turns[-1] if turns and turns[-1].role == "assistant" else None


def new(chat: ChatContext, argument: str) -> None:
    """Starts another session: `/new [NAME]`."""
    old, argument = chat.session, name_of(argument)
    if argument and argument in session_names(chat):
        raise InvalidRequest(
            f"session {argument!r} exists, expected a new name; /switch goes to it"
        )
    _begin(chat, argument)
    chat.screen.note(f"session {chat.session.name} begins; /switch {old.name} goes back")
    same = ["system prompt"] if old.system is not None else []
    same += ["settings"] if old.settings or old.template_variables else []
    if same:
        chat.screen.note(f"it has the same {' and '.join(same)}")


def clear(chat: ChatContext, _argument: str) -> None:
    """Starts another session, after a question: `/clear`."""
    name = chat.session.name
    lost = "which is not stored" if chat.private else "which is not deleted"
    if chat.confirm(f"Start a new chat? This one is session {name}, {lost}."):
        new(chat, "")
    else:
        chat.screen.note(f"session {name} continues")


def _begin(chat: ChatContext, name: str = "") -> None:
    """Starts a session with the system prompt and settings of the current one."""
    old = chat.session
    session = chat.engine.session(
        name or None,
        system=old.system,
        history=old.history,
        settings=old.settings,
        template_variables=old.template_variables,
        overflow=old.overflow,
    )
    chat.go(session, begun=not name)


def sessions(chat: ChatContext, argument: str) -> None:
    """Lists the sessions: `/sessions [all]`."""
    if argument not in ("", "all"):
        raise InvalidRequest(f"/sessions {argument}: expected nothing after it, or all")
    views.sessions(chat, everything=argument == "all")


def search(chat: ChatContext, argument: str) -> None:
    """Finds sessions by their words: `/search WORDS`."""
    if not argument:
        raise InvalidRequest("/search needs the words to look for")
    views.found(chat, argument)


def switch(chat: ChatContext, argument: str) -> None:
    """Continues another session: `/switch NAME`."""
    if not argument:
        raise InvalidRequest(f"/switch needs the name of a session: {_some_names(chat)}")
    info = _info(chat, argument)
    chat.go(chat.engine.session(info.name, owner=info.owner))
    views.place(chat)
    _note_model(chat, info.model)


def undo(chat: ChatContext, _argument: str) -> None:
    """Takes the last question back: `/undo`."""
    if not chat.is_seen():
        return
    if not users(chat.session):
        _nothing_to(chat, "undo")
        return
    text, again = chat.session.undo(), ""
    if can_prefill():
        chat.next_text, again = quote(text), "Enter sends it again, "
    chat.screen.note(f"taken back; {again}/branches lists the old branch")


def retry(chat: ChatContext, _argument: str) -> None:
    """Answers the last question again: `/retry`."""
    session = chat.session
    if not chat.is_seen():
        return
    before = last_chaty(session)
    if before is None:
        _nothing_to(chat, "retry")
        return
    chat.answer(lambda: session.stream_retry(), again="/retry")
    again = session.turns[-1]
    if again.id == before.id:  # stopped before its first token
        return
    same = again.token_ids and again.token_ids == before.token_ids[: len(again.token_ids)]
    if same and again.settings.get("temperature") == 0:
        off = session.settings.get("do_sample") is False
        varied = "/set do_sample on" if off else "/set temperature 0.8"
        chat.screen.note(f"greedy settings give the same reply; {varied} varies it")


def edit(chat: ChatContext, argument: str) -> None:
    """Replaces a question and answers it: `/edit [N] [TEXT]`."""
    session = chat.session
    if not chat.is_seen():
        return
    if not users(session):
        _nothing_to(chat, "edit")
        return
    given = _NUMBER_AND_TEXT.match(argument)
    number, text = given.groups() if given else (None, argument)
    index = question_index(session, number or str(len(users(session))))
    old = users(session)[index].text
    if not text or not text.strip(QUOTES):
        if not can_prefill():
            raise InvalidRequest("this terminal cannot show the old text, expected /edit N TEXT")
        chat.next_text = f"/edit {index + 1} {quote(old)}"
        chat.screen.note("edit the question: Enter sends it, Ctrl-C cancels")
        return
    new = unquote(text)
    if not new.strip() or new == old:
        raise InvalidRequest("the question is unchanged or empty; /retry answers it again")
    asks = f"/edit {index + 1} {quote(new)}"
    chat.answer(lambda: session.stream_edit(index, new), again=asks)


def edit_reply(chat: ChatContext, argument: str) -> None:
    """Replaces a reply: `/edit_reply [N] [TEXT]`."""
    session = chat.session
    if not chat.is_seen():
        return
    if not users(session):
        _nothing_to(chat, "edit")
        return
    given = _NUMBER_AND_TEXT.match(argument)
    number, text = given.groups() if given else (None, argument)
    index = question_index(session, number or str(len(users(session))))
    if not text or not text.strip(QUOTES):
        if not can_prefill():
            raise InvalidRequest(
                "this terminal cannot show the old text, expected /edit_reply N TEXT"
            )
        old = [turn for turn in session.turns if turn.role == "assistant"][index].text
        chat.next_text = f"/edit_reply {index + 1} {quote(old)}"
        chat.screen.note("edit the reply: Enter stores it, Ctrl-C cancels")
        return
    session.edit_reply(index, unquote(text))
    chat.screen.note(f"reply {index + 1} is replaced; /branches lists the old one")


def continue_(chat: ChatContext, _argument: str) -> None:
    """Extends the last reply: `/continue`."""
    if not chat.is_seen():
        return
    before = last_chaty(chat.session)
    if before is None:
        _nothing_to(chat, "continue")
        return
    if before.finish_reason == "stop":
        chat.screen.note("The reply was complete; there is nothing to continue.")
        return
    chat.answer(lambda: chat.session.stream_continue(), before.text)


def fork(chat: ChatContext, argument: str) -> None:
    """Continues in a copy: `/fork [NAME [N]]`."""
    named = _NAME_AND_NUMBER.match(argument)
    name, at = named.groups() if named else (argument, None)
    old = chat.session
    questions = question_index(old, at) + 1 if at else None
    chat.go(old.fork(name_of(name) or None, questions))
    chat.screen.note(f"session {chat.session.name} continues from here; {old.name} is unchanged")


def branches(chat: ChatContext, argument: str) -> None:
    """Lists branches or switches to one: `/branches [N [K]]`."""
    session = chat.session
    if not argument:
        views.all_branches(chat)
        return
    number, _, which = argument.partition(" ")
    taken_back = bool(session.branches(len(users(session))))
    index = question_index(session, number, more=taken_back)
    branches = session.branches(index)
    if not which:
        views.branches(chat, index, branches)
        return
    if not which.strip().isdecimal() or not 1 <= int(which) <= len(branches):
        raise InvalidRequest(
            f"question {number} has no branch {which}, expected {_one_to(len(branches))}"
        )
    session.switch(index, int(which) - 1)
    views.place(chat)


def system(chat: ChatContext, argument: str) -> None:
    """Shows or changes the system prompt: `/system [TEXT|off]`."""
    session = chat.session
    before = session.system
    if argument:
        session.set_system(None if argument == "off" else unquote(argument))
    system = session.system
    chat.screen.note("no system prompt" if system is None else f"system prompt: {system}")
    if system != before and users(session):
        size = counted(session.length, "token")
        chat.screen.note(f"the next question computes the whole conversation again ({size})")


def set_(chat: ChatContext, argument: str) -> None:
    """Shows or changes settings: `/set [NAME [VALUE]]`."""
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    if name and value.strip():
        chat.session.set(**{name: parse_value(value.strip())})
    elif name:
        explanation(name)  # refuses a name that is none
    views.settings(chat, name or None)


def show(chat: ChatContext, argument: str) -> None:
    """Shows the conversation: `/show [N|all]`."""
    chat.session.refresh()  # another process may have continued it
    dropped = sum(turn.role == "user" for turn in chat.session.dropped)
    views.conversation(chat, _count(argument, dropped + len(users(chat.session))))


def tokens(chat: ChatContext, argument: str) -> None:
    """Shows the tokens of the conversation: `/tokens [N|all]`."""
    views.tokens(chat, _count(argument, len(users(chat.session))))


def stats(chat: ChatContext, _argument: str) -> None:
    """Shows counters of the engine: `/stats`."""
    views.stats(chat)


def think(chat: ChatContext, argument: str) -> None:
    """Switches reasoning: `/think [on|off|show|hide]`."""
    if argument in ("show", "hide"):
        chat.show_reasoning = argument == "show"
    elif argument in ("on", "off"):
        chat.session.set_variables(**thinking_variables(chat.engine, argument == "on"))
    elif argument:
        raise InvalidRequest(f"/think {argument}: expected on, off, show or hide")
    views.thinking(chat)


def pin(chat: ChatContext, argument: str) -> None:
    """Pins or unpins the session: `/pin [off]`."""
    if argument not in ("", "on", "off"):
        raise InvalidRequest(f"/pin {argument}: expected nothing after it, or off")
    pinned = argument != "off"
    chat.session.pin(pinned)
    order = "last" if pinned else "like that of any other session"
    chat.screen.note(f"session {chat.session.name} is {'' if pinned else 'not '}pinned: its "
                     f"KV cache is evicted {order}")  # fmt: skip


def title(chat: ChatContext, argument: str) -> None:
    """Shows or changes the title: `/title [TEXT]`."""
    if argument:
        chat.session.set_title(argument)
    title = chat.session.title or "none yet; the first question will become the title"
    chat.screen.note(f"title: {clean(title)}")


def tag(chat: ChatContext, argument: str) -> None:
    """Shows or changes the tags: `/tag [WORD|-WORD ...]`."""
    tags = list(chat.session.tags)
    for word in argument.split():
        name = word.removeprefix("-")
        if not name:
            raise InvalidRequest(f"/tag {argument}: expected words, or -WORD to remove one")
        if word.startswith("-") and name not in tags:
            raise InvalidRequest(f"there is no tag {name!r}, expected {_listed(tags)}")
        tags = [other for other in tags if other != name] + ([] if word.startswith("-") else [name])
    if argument:
        chat.session.set_tags(tags)
    chat.screen.note(f"tags: {_listed(list(chat.session.tags))}")


def delete(chat: ChatContext, argument: str) -> None:
    """Deletes a session: `/delete [NAME]`."""
    name, owner = argument or chat.session.name, chat.session.owner
    info = _info(chat, name)
    name = info.name
    rounds = counted(info.turns, "round")
    if not chat.confirm(f"Delete session {name} with {rounds} permanently?"):
        chat.screen.note("not deleted")
        return
    current = name == chat.session.name
    chat.engine.delete(name, owner)
    if current:
        _begin(chat)
    chat.forget(name)
    successor = f"; session {chat.session.name} begins" if current else ""
    chat.screen.note(f"session {name} is deleted{successor}")


def copy(chat: ChatContext, _argument: str) -> None:
    """Copies the last reply to the clipboard: `/copy`."""
    reply = last_chaty(chat.session)
    if reply is None or not reply.text:
        chat.screen.note("There is no reply to copy.")
        return
    chat.screen.copy(reply.text)
    chat.screen.note(
        f"{counted(len(reply.text), 'character')} copied, if this terminal supports it (OSC 52)"
    )


def file(chat: ChatContext, argument: str) -> None:
    """Puts a text file into the next message: `/file PATH|off`."""
    if not argument and not chat.files:
        raise InvalidRequest("/file needs the path of a text file")
    if argument == "off":
        chat.files = []
    elif argument:
        chat.files = [*chat.files, message_files.read(argument)]
    listed = ", ".join(f"{clean(each.name)} ({each.size})" for each in chat.files)
    chat.screen.note(f"the next message carries {listed or 'no file'}")


def info(chat: ChatContext, _argument: str) -> None:
    """Shows the model and how it runs: `/info`."""
    views.info(chat)


def save(chat: ChatContext, _argument: str) -> None:
    """Explains that saving is not needed: `/save`."""
    if chat.private:
        chat.screen.note("this chat is not stored; /export FILE writes it to a file")
        return
    if chat.server is not None:
        chat.screen.note(
            f"Not needed: {chat.server.url} stores every message before it is shown. "
            f"{chat.server.command(chat.session.name)} continues the session."
        )
        return
    chat.screen.note(
        f"Not needed: every message is stored in {data_dir()} before it is shown. "
        f"lmchat chat --session {shlex.quote(chat.session.name)} continues the session."
    )


def export(chat: ChatContext, argument: str) -> None:
    """Writes the session to a file: `/export FILE [--force] [--pages]`."""
    options: set[str] = set()
    while found := next((o for o in _EXPORT_OPTIONS if argument.endswith(" " + o)), None):
        options.add(found)
        argument = argument.removesuffix(found).rstrip()
    force, pages = "--force" in options, "--pages" in options
    write(chat.session, path_of(argument), force=force, pages=pages, notify=chat.screen.note)


def import_(chat: ChatContext, argument: str) -> None:
    """Opens a session from a file: `/import FILE [NAME]`."""
    if not argument:
        raise InvalidRequest("/import needs the file, one that /export FILE.zip wrote")
    path, name = path_and_name(argument)
    try:
        session = chat.engine.import_(
            Path(path), name, owner=chat.session.owner, notify=chat.screen.note
        )
    except InvalidRequest as error:
        hint = "; /import FILE NAME gives another" if error.param == "name" else ""
        raise InvalidRequest(f"{error}{hint}") from None
    chat.go(session)
    views.place(chat)
    _note_model(chat, _info(chat, chat.session.name).model)


def _note_model(chat: ChatContext, last: str) -> None:
    """Prints a note if the session's last model was another one."""
    if last and not same_model(last, chat.engine.model):
        chat.screen.note(f"its last model was {clean(last)}; now it uses {chat.name}")


def _nothing_to(chat: ChatContext, verb: str) -> None:
    chat.screen.note(f"There is nothing to {verb}.")


def _one_to(count: int) -> str:
    return "1, the only one" if count == 1 else f"1 to {count}"


def _count(argument: str, default: int) -> int:
    """Returns the number of rounds to show: SHOWN, a number, or all (`default`)."""
    if not argument:
        return min(default, SHOWN)
    if argument == "all":
        return default
    if not argument.isdecimal() or not int(argument):
        raise InvalidRequest(f"number of rounds is {argument!r}, expected 1 or more, or all")
    return int(argument)


def session_names(chat: ChatContext) -> list[str]:
    """Returns the names of the user's sessions, the most recently used first."""
    return [info.name for info in chat.engine.sessions(chat.session.owner)]


def _info(chat: ChatContext, name: str) -> lmchat.SessionInfo:
    """Returns the summary of a session. Raises InvalidRequest if there is none of that name."""
    infos = {info.name: info for info in chat.engine.sessions(chat.session.owner)}
    for spelled in (name, name_of(name)):
        if spelled in infos:
            return infos[spelled]
    raise InvalidRequest(f"there is no session {name!r}, expected one of {_some_names(chat)}")


def _some_names(chat: ChatContext) -> str:
    names = session_names(chat)
    more = ["..."] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])


def _listed(words: list[str]) -> str:
    return ", ".join(words) or "none"
