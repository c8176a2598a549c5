"""Which session of the store a chat goes on with, and which model it takes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmchat.bundled import NAME, find_model
from lmchat.errors import Error, InvalidRequest, StoreError
from lmchat.sessions.state import State
from lmchat.store.base import SessionRecord, Store, Summary, check_name

from ..terminal.texts import excerpt

if TYPE_CHECKING:
    import lmchat
    from lmchat.store.sqlite.sqlite_store import SqliteStore

OWNER = "local"
NO_STORE = "--no-store"


@dataclass(frozen=True)
class Choice:
    """What to open: `model` as `find_model` takes it, `name` of the session (None: a new one).

    `found` says that the store has the session, `remembered` that the model is the one it was last
    with and not one that was named; `imported`, that it is an archive which says so. `history` and
    `overflow` are the rules of one that was found, `system` its prompt. `note` is to be told, where
    there is something.
    """

    model: str | None
    name: str | None = None
    found: bool = False
    remembered: bool = False
    imported: bool = False
    history: str = ""
    overflow: str = ""
    system: str | None = None
    note: str = ""


NEW = Choice(None)
"""A new session."""


def choose(model: str | None, name: str | None, latest: bool, private: bool) -> Choice:
    """What `--session NAME` or (`latest`) `--continue` mean. Looks into the store only where one
    of them is given and the chat is not `private`. Raises InvalidRequest, StoreError."""
    if name is not None and latest:
        raise InvalidRequest("--session and --continue are given, expected one")
    if latest and private:
        raise InvalidRequest(f"--continue and {NO_STORE} are given: without a store nothing lasts")
    if name is not None:
        check_name(name)
    if private or not (latest or name is not None):
        return Choice(model, name)
    store = open_store()
    try:
        return last_used(store, model) if name is None else named(store, model, name)
    finally:
        store.close()


def open_store() -> SqliteStore:
    """The store of the person's home. StoreError says how to chat without one."""
    from lmchat.store.data_directory import data_dir
    from lmchat.store.sqlite.sqlite_store import SqliteStore

    with saying_how():
        return SqliteStore(data_dir())


@contextlib.contextmanager
def saying_how() -> Iterator[None]:
    """A StoreError that leaves the block also says how to chat without a store."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{error}; {NO_STORE} chats without keeping anything") from error


def named(store: Store, model: str | None, name: str) -> Choice:
    """The session of that name, which may be new, with the model or the one it was last with."""
    record = store.find(OWNER, name)
    if record is None:
        return Choice(model, name)
    return _with_its_model(model, record)


def last_used(store: Store, model: str | None) -> Choice:
    """The last used session with something in it: of those that were with the model if there are
    any, else of all."""
    found = [s for s in store.summaries(OWNER) if _has_something(store, s)]
    if not found:
        return Choice(model, note="there is no session to continue: a new one begins")
    if model is None:
        return named(store, None, found[0].name)
    for one in found:
        if same_model(one.model, model):
            return named(store, model, one.name)
    last = found[0]
    was = f" (it was with {last.model})" if last.model else ""
    note = f"no session was with {model}; {last.name}, the last one, goes on{was}"
    return replace(named(store, model, last.name), note=note)


def _with_its_model(model: str | None, record: SessionRecord) -> Choice:
    name, last = record.name, record.model
    first = next(iter(record.tree.path(record.leaf)), None)
    there = Choice(
        model,
        name,
        True,
        history=record.history,
        overflow=record.overflow,
        system=first.text if first is not None and first.role == "system" else None,
    )
    if model is None:
        own = last in ("", NAME)  # not a folder of that name, which is kept with its whole path
        imported = record.imported and not own
        return replace(there, model=None if own else last, remembered=bool(last), imported=imported)
    if not last or same_model(last, model):
        return there
    return replace(there, note=f"{name} was with {last}; now it goes on with {model}")


def check_rules(chosen: Choice, history: str | None, overflow: str | None) -> None:
    """InvalidRequest where one answer is asked for under rules that the session does not have: they
    would be its rules from there on."""
    for option, given, own in (
        ("history", history, chosen.history),
        ("overflow", overflow, chosen.overflow),
    ):
        if chosen.found and given is not None and given != own:
            name = chosen.name or ""
            raise InvalidRequest(
                f"--{option} is {given!r}, expected {own!r}, which session {name!r} has: an answer "
                "does not change that; in a terminal "
                f"lmchat chat --session {shlex.quote(name)} --{option} {given} does"
            )


def check_system(chosen: Choice, system: str | None) -> None:
    """InvalidRequest for another system prompt than that of the session that was found."""
    if chosen.found and system is not None and system != chosen.system:
        own = "none" if chosen.system is None else repr(excerpt(chosen.system))
        raise InvalidRequest(
            f"--system is {excerpt(system)!r}, but session {chosen.name!r} has {own}; /system in "
            "its chat changes it"
        )


def check_imported(chosen: Choice, ask: Callable[[str], bool] | None) -> None:
    """A model that only an archive names is opened when the person says so; `ask` is None where
    nobody can be asked. InvalidRequest says how to go on otherwise."""
    if not chosen.imported or chosen.name is None or chosen.model is None:
        return
    what = f"session {chosen.name!r} was imported, and its archive names the model {chosen.model!r}"
    if ask is None:
        model = shlex.quote(chosen.model) if chosen.model.isprintable() else "MODEL"
        how = command_line(model, chosen.name)
        raise InvalidRequest(f"{what}, which nobody has asked for here; {how} opens it")
    if not ask(f"{what}. Open it?"):
        how = command_line("MODEL", chosen.name)
        raise InvalidRequest(f"nothing was opened; {how} takes another model")


def command_line(model: str, session: str) -> str:
    """What to type to go on with a session on a model."""
    return f"lmchat chat {model} --session {shlex.quote(session)}"


def _has_something(store: Store, one: Summary) -> bool:
    """Whether anything was asked in it, be it that it was taken back."""
    if one.turns:
        return True
    try:
        record = store.find(OWNER, one.name)
    except StoreError:  # damaged
        return False
    return record is not None and (len(record.tree) > 1 or bool(record.unanswered))


def drop_if_empty(session: lmchat.Session) -> None:
    """Deletes a session in which nothing was ever asked or noted."""
    with contextlib.suppress(Error):
        if session.state is State.IDLE:
            session.refresh()  # another process may have gone on with it, or named it
        if (
            session.state is State.IDLE  # first: what is under way is not among the turns
            and re.fullmatch(r"chat-\d+", session.name)
            and not any(turn.role == "user" for turn in session.turns)
            and not session.branches(0)
            and not (session.title or session.tags or session.pinned or session.unanswered)
        ):
            session.delete()


def same_model(one: str, other: str) -> bool:
    """Whether two names of models, as they are opened, mean the same one."""
    return _place(one) == _place(other)


def _place(model: str) -> str:
    place = os.fspath(find_model(model or None))
    return str(Path(place).resolve()) if Path(place).exists() else place
