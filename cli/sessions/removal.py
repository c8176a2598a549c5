"""`lmchat sessions rm`: which sessions are deleted, the question before it, and the deletion."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import typer

from lmchat.errors import Error, InvalidRequest, NotFound, SessionBusy, StoreError
from lmchat.store.records import HIDDEN_TAG, now

from ..errors import note
from ..terminal.texts import clean, counted
from . import maintenance
from .lookup import find

if TYPE_CHECKING:
    from lmchat.store.protocol import Store
    from lmchat.store.records import Summary

    from .disk_pages import DiskPages

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"([1-9]\d{0,5})([hdw])")
_NAMED = 10  # sessions that a question names, at most


def parse_age(text: str) -> timedelta:
    """Returns the time that a text such as 12h, 30d or 8w stands for.

    Raises:
        InvalidRequest: It has another form.
    """
    age = _AGE.fullmatch(text)
    if age is None:
        raise InvalidRequest(
            f"--older-than is {text!r}, expected a number of hours, days or weeks: 12h, 30d or 8w"
        )
    return timedelta(**{_UNITS[age[2]]: int(age[1])})


@dataclass
class Removal:
    """The sessions to delete, and those that are not.

    Attributes:
        sessions: Sessions to delete.
        skipped: Name of a session -> why it is not deleted.
        before: The last use of all that are deleted was not after this; None: of any time.
    """

    sessions: list[Summary]
    skipped: dict[str, str] = field(default_factory=dict)
    before: datetime | None = None

    @property
    def names(self) -> list[str]:
        """Names of the sessions to delete."""
        return [one.name for one in self.sessions]


def by_name(store: Store, owner: str, names: Sequence[str]) -> Removal:
    """Chooses the owner's sessions of these names or ids."""
    return Removal(
        [*{one.id: one for one in (find(store, owner, name) for name in names)}.values()]
    )


def by_age(store: Store, owner: str, age: timedelta) -> Removal:
    """Chooses the owner's sessions that were not used for a time, the longest unused first.

    Only those that `sessions list` shows are chosen. Pinned ones are skipped, and those in which a
    reply is being generated. A clock that went back makes no session younger: the newest use in the
    store counts as now then.
    """
    newest = store.summaries(limit=1)
    try:
        before = max(now(), *(one.last_used for one in newest)) - age
    except OverflowError:  # older than any date
        return Removal([])
    chosen = Removal([], before=before)
    for one in reversed(store.summaries(owner, without_tag=HIDDEN_TAG)):
        if one.last_used > before:
            continue
        if one.pinned:
            chosen.skipped[one.name] = "it is pinned"
        elif one.busy:
            chosen.skipped[one.name] = f"{one.busy} is generating in it"
        else:
            chosen.sessions.append(one)
    return chosen


def is_confirmed(chosen: Removal) -> bool:
    """Asks the user to confirm. Raises InvalidRequest where stdin is not a terminal."""
    if not (sys.stdin and sys.stdin.isatty()):
        raise InvalidRequest("stdin is not a terminal to confirm on, expected --yes")
    named = [f"{clean(one.name)} ({counted(one.turns, 'turn')})" for one in chosen.sessions]
    if chosen.before is not None and len(named) > _NAMED:
        named[_NAMED:] = [f"and {len(named) - _NAMED:,} more"]
    return typer.confirm(f"Delete {', '.join(named)}?", err=True)


def remove(store: Store, pages: DiskPages, chosen: Removal) -> int:
    """Deletes the sessions, and leaves in `chosen.sessions` those that were deleted.

    Of sessions that were chosen by age, those that are used meanwhile are skipped.

    Returns:
        The freed bytes.

    Raises:
        Error: A session that the user named cannot be deleted.
    """
    freed = 0
    gone: list[Summary] = []
    for one in chosen.sessions:
        try:
            if chosen.before is not None and _is_used_since(store, one, chosen.before):
                chosen.skipped[one.name] = "it was used just now"
                continue
            freed += maintenance.remove(store, pages, one)
        except (SessionBusy, NotFound) as error:
            if chosen.before is None:
                _note_gone(gone)
                raise
            chosen.skipped[one.name] = str(error)
        except Error:
            _note_gone(gone)
            raise
        else:
            gone.append(one)
    chosen.sessions = gone
    return freed


def note_skipped(chosen: Removal) -> None:
    """Prints which sessions are not deleted, and why."""
    for name, reason in chosen.skipped.items():
        note(f"session {name} is not deleted: {reason}")


def _is_used_since(store: Store, one: Summary, moment: datetime) -> bool:
    try:
        record = store.find(one.owner, one.name)
    except StoreError:  # damaged
        return False
    return record is not None and record.id == one.id and record.last_used > moment


def _note_gone(gone: Sequence[Summary]) -> None:
    if gone:
        note(f"already deleted: {', '.join(one.name for one in gone)}")
