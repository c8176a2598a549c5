"""Chooses the session that a chat opens, and its model."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.bundled import NAME, find_model
from lmchat.errors import Error, InvalidRequest, StoreError
from lmchat.generation.state import State
from lmchat.store.protocol import Store, check_name
from lmchat.store.records import HIDDEN_TAG, LOCAL_OWNER, SessionRecord, Summary

from ..terminal.texts import excerpt

if TYPE_CHECKING:
    import lmchat
    from lmchat.store.sqlite.sqlite_store import SqliteStore

NO_STORE = "--no-store"


@dataclass(frozen=True)
class Choice:
    """The session and the model to open.

    Attributes:
        model: The model, as `find_model` takes it.
        name: Name of the session; None: a new one.
        found: The store has the session.
        remembered: The model is the last one of the session; the user named none.
        imported: Only an imported archive names that model.
        history: History rule of an existing session.
        overflow: Overflow rule of an existing session.
        system: System prompt of an existing session.
        loading: The engine options that its model was loaded with, if that model is opened.
        note: Message for the user, empty for none.
    """

    model: str | None
    name: str | None = None
    found: bool = False
    remembered: bool = False
    imported: bool = False
    history: str = ""
    overflow: str = ""
    system: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


NEW = Choice(None)
"""A new session."""


def choose(model: str | None, name: str | None, latest: bool, private: bool) -> Choice:
    """Chooses the session for the options of the command line.

    The store is opened only for --session or --continue without --no-store.

    Args:
        model: MODEL of the command line.
        name: Name given with --session.
        latest: --continue was given.
        private: --no-store was given.

    Raises:
        InvalidRequest: The options contradict each other, or the name is invalid.
        StoreError: The store cannot be read.
    """
    if name is not None and latest:
        raise InvalidRequest("--session and --continue are given, expected one")
    if latest and private:
        raise InvalidRequest(
            f"--continue and {NO_STORE} are given, expected one: without a store there is "
            f"nothing to continue"
        )
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
    """Opens the store of the data directory.

    Raises:
        StoreError: It cannot be opened; the message names --no-store.
    """
    from lmchat.store.data_directory import data_dir
    from lmchat.store.sqlite.sqlite_store import SqliteStore

    with store_hints():
        return SqliteStore(data_dir())


@contextlib.contextmanager
def store_hints() -> Iterator[None]:
    """Adds to a StoreError of the block that --no-store chats without a store."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{error}; {NO_STORE} chats without storing anything") from error


def named(store: Store, model: str | None, name: str) -> Choice:
    """Chooses the session of that name, new or existing.

    Args:
        store: The store to search.
        model: MODEL of the command line; None: the session's last model.
        name: Name of the session.
    """
    record = store.find(LOCAL_OWNER, name)
    if record is None:
        return Choice(model, name)
    return _with_its_model(model, record)


def last_used(store: Store, model: str | None) -> Choice:
    """Chooses the most recently used session that is not empty.

    Sessions whose last model is `model` come first. Without any session, a new one is chosen.
    """
    listed = store.summaries(LOCAL_OWNER, without_tag=HIDDEN_TAG)
    sessions = [s for s in listed if _has_something(store, s)]
    if not sessions:
        return Choice(model, note="there is no session to continue: a new one starts")
    if model is None:
        return named(store, None, sessions[0].name)
    for one in sessions:
        if same_model(one.model, model):
            return named(store, model, one.name)
    last = sessions[0]
    was = f" (its last model was {last.model})" if last.model else ""
    note = f"no session used {model}; {last.name}, the most recent one, continues{was}"
    return replace(named(store, model, last.name), note=note)


def existing(session: lmchat.SessionApi) -> Choice:
    """Returns the choice of an open session, whatever its model was."""
    return Choice(
        None,
        session.name,
        True,
        history=session.history,
        overflow=session.overflow,
        system=session.system,
    )


def _with_its_model(model: str | None, record: SessionRecord) -> Choice:
    name, last = record.name, record.model
    first = next(iter(record.tree.path(record.leaf)), None)
    existing = Choice(
        model,
        name,
        True,
        history=record.history,
        overflow=record.overflow,
        system=first.text if first is not None and first.role == "system" else None,
    )
    if model is None:
        own = last in ("", NAME)  # a folder of that name is stored with its whole path
        imported = record.imported and not own
        return replace(
            existing,
            model=None if own else last,
            remembered=bool(last),
            imported=imported,
            loading=record.loading,
        )
    if not last or same_model(last, model):
        return replace(existing, loading=record.loading)
    return replace(existing, note=f"the last model of {name} was {last}; now it uses {model}")


def loading_note(options: Mapping[str, Any]) -> str:
    """Returns what a user reads about the engine options of a session; empty without any."""
    if not options:
        return ""
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    return f"the model is loaded as before: {words}; other options load it otherwise"


def check_rules(chosen: Choice, history: str | None, overflow: str | None) -> None:
    """Rejects rules that differ from those of an existing session, for one answer.

    They would become the rules of the session.

    Raises:
        InvalidRequest: `history` or `overflow` differs.
    """
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
    """Raises InvalidRequest if `system` differs from the prompt of an existing session."""
    if chosen.found and system is not None and system != chosen.system:
        own = "none" if chosen.system is None else repr(excerpt(chosen.system))
        raise InvalidRequest(
            f"--system is {excerpt(system)!r}, but session {chosen.name!r} has {own}; /system in "
            "its chat changes it"
        )


def check_imported(chosen: Choice, ask: Callable[[str], bool] | None) -> None:
    """Asks before opening a model that only an imported archive names.

    Args:
        chosen: The choice to check.
        ask: Asks a yes/no question; None if the user cannot be asked.

    Raises:
        InvalidRequest: The answer is no, or the user cannot be asked.
    """
    if not chosen.imported or chosen.name is None or chosen.model is None:
        return
    what = f"session {chosen.name!r} was imported, and its archive names the model {chosen.model!r}"
    if ask is None:
        model = shlex.quote(chosen.model) if chosen.model.isprintable() else "MODEL"
        how = command_line(model, chosen.name)
        raise InvalidRequest(f"{what}, which the command line does not name; {how} opens it")
    if not ask(f"{what}. Open it?"):
        how = command_line("MODEL", chosen.name)
        raise InvalidRequest(f"the model was not opened; {how} uses another one")


def command_line(model: str, session: str) -> str:
    """Returns the command line that continues a session with a model."""
    return f"lmchat chat {model} --session {shlex.quote(session)}"


def _has_something(store: Store, one: Summary) -> bool:
    """Returns whether the session has any question, also one on an inactive branch."""
    if one.turns:
        return True
    try:
        record = store.find(LOCAL_OWNER, one.name)
    except StoreError:  # damaged
        return False
    return record is not None and (len(record.tree) > 1 or bool(record.unanswered))


def drop_if_empty(session: lmchat.SessionApi) -> None:
    """Deletes a session under a default name that has no question, title, tag or pin."""
    with contextlib.suppress(Error):
        if session.state is State.IDLE:
            session.refresh()  # another process may have continued or renamed it
        if (
            session.state is State.IDLE  # first, since a turn being generated is not in `turns`
            and re.fullmatch(r"chat-\d+", session.name)
            and not any(turn.role == "user" for turn in session.turns)
            and not session.branches(0)
            and not (session.title or session.tags or session.pinned or session.unanswered)
        ):
            session.delete()


def same_model(one: str, other: str) -> bool:
    """Returns whether two model names, as `find_model` takes them, name the same model."""
    return _place(one) == _place(other)


def _place(model: str) -> str:
    place = os.fspath(find_model(model or None))
    return str(Path(place).resolve()) if Path(place).exists() else place
