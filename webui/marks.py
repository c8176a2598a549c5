"""Marks, and what the server remembers of the tabs that have them."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from lmchat.errors import NotFound
from lmchat.store.records import SESSION_ID

ROUNDS = LISTED = 20
"""Rounds of a session and sessions in the panel that are shown at first, and further ones later."""

_MARK = re.compile(rf"({SESSION_ID}):(\d{{1,18}}):(\d{{0,18}}):(\d{{1,6}})")


@dataclass(frozen=True)
class Mark:
    """What a tab shows.

    Attributes:
        session: id of the session; empty: a new chat.
        revision: the session's revision.
        reply: id of the turn of the running reply; None: nothing runs.
        rounds: number of the last rounds that are shown.
    """

    session: str = ""
    revision: int = 0
    reply: int | None = None
    rounds: int = ROUNDS

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Returns the mark that a tab has sent. Anything else is a new chat."""
        found = _MARK.fullmatch(text)
        if found is None:
            return cls()
        reply = int(found[3]) if found[3] else None
        return cls(found[1], int(found[2]), reply, max(1, int(found[4])))

    def __str__(self) -> str:
        if not self.session:
            return ""
        return f"{self.session}:{self.revision}:{self.reply or ''}:{self.rounds}"


@dataclass
class Tab:
    """What a tab has been sent. It is a cache: a tab that is forgotten is sent all again.

    Attributes:
        mark: its newest mark.
        shown: the mark that it shows completely.
        question: the question of the last reply that it followed.
        notices: notices of that reply.
        search: words by which its side panel is filtered.
        listed: number of sessions in its side panel.
        form: values of the form that a new chat gets; `due`: values that the tab's form lacks.
        costs: by session, what its next turn costs; `costs_due`: when it is looked up again.
        sent: the last value of each part of the page.
        lock: held while a generator shows the mark.
    """

    mark: str = ""
    shown: str | None = None
    question: str = ""
    notices: tuple[str, ...] = ()
    search: str = ""
    listed: int = LISTED
    form: dict[str, Any] = field(default_factory=dict)
    due: dict[str, Any] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    costs_due: float = 0.0
    sent: dict[str, object] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def changed(self, name: str, value: object) -> bool:
        """Returns whether a part of the page has another value than the last one sent."""
        if name in self.sent and self.sent[name] == value:
            return False
        self.sent[name] = value
        return True


class Tabs:
    """The tabs by the id that Gradio gives each, the last used ones.

    Args:
        most: number of tabs that are remembered.
    """

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._tabs: OrderedDict[str, tuple[str, Tab]] = OrderedDict()

    def of(self, owner: str, tab_id: str) -> Tab:
        """Returns an owner's tab.

        Raises:
            NotFound: it is another owner's.
        """
        found, tab = self._tabs.setdefault(tab_id, (owner, Tab()))
        if found != owner:
            raise NotFound("the tab is unknown, reload the page")
        self._tabs.move_to_end(tab_id)
        while len(self._tabs) > self._most:
            self._tabs.popitem(last=False)
        return tab

    def is_foreign(self, owner: str, tab_id: str) -> bool:
        """Returns whether a tab is another owner's."""
        return tab_id in self._tabs and self._tabs[tab_id][0] != owner
