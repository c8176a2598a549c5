"""What a client has read of a session: its properties and the turns of its conversation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from lmchat.client.http import Connection
from lmchat.client.values import settings_of, turn_of
from lmchat.errors import NotFound
from lmchat.generation.state import State
from lmchat.store.turns import Turn, transcript

DETAILS = {"details": "true"}


class RemoteRecord:
    """The properties of a session, as the last request of this client left or found it.

    `refresh()` reads what others have changed. Any thread may use it.

    Args:
        connection: the server.
        owner: the owner that the API key names.
        data: the session as the server sends it, with details.
    """

    fresh = False
    """Whether this process created the session: the server did."""

    def __init__(self, connection: Connection, owner: str, data: Mapping[str, Any]) -> None:
        self._connection, self._owner = connection, owner
        self._lock = threading.Lock()
        self._turns: tuple[Turn, ...] = ()
        self._data: Mapping[str, Any] = data
        self._is_closed = False
        self.take(data)

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self._data['id']}"

    # --- reading ---------------------------------------------------------------------------------

    def take(self, data: Mapping[str, Any]) -> None:
        """Takes the session as the server has sent it, whole or with its last turns."""
        with self._lock:
            if data["revision"] < self._data["revision"]:  # an older answer that came later
                return
            kept: tuple[Turn, ...] = ()
            after = data.get("turns_after")
            if after is not None:
                ids = [turn.id for turn in self._turns]
                kept = self._turns[: ids.index(after) + 1] if after in ids else ()
            self._turns = kept + tuple(turn_of(one) for one in data["turns"])
            self._data = {name: value for name, value in data.items() if name != "turns"}

    def _reload(self) -> None:
        """Reads the session after a change of its last round."""
        known = self._turns[-3].id if len(self._turns) > 2 else None
        query = DETAILS if known is None else {**DETAILS, "known": str(known)}
        self.take(self._connection.call("GET", self._path, query=query))

    def _call(
        self, verb: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """Posts to a route of the session."""
        self._check_open()
        return self._connection.call("POST", f"{self._path}/{verb}", body or {}, query)

    def _patch(self, **changes: Any) -> None:
        self._check_open()
        self.take(self._connection.call("PATCH", self._path, changes, DETAILS))

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotFound(f"session {self.name!r} is closed")

    def refresh(self) -> None:
        """Reads changes that others have made.

        Raises:
            NotFound: the session was deleted.
        """
        self._check_open()
        headers = {"If-None-Match": f'"{self.revision}"'}
        query = {**DETAILS, "refresh": "true"}
        answer = self._connection.request("GET", self._path, query=query, headers=headers)
        if answer.status_code != 304:
            self.take(answer.json())

    # --- what it is ------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Id of the session."""
        return str(self._data["id"])

    @property
    def name(self) -> str:
        """Name, unique among the sessions of its owner."""
        return str(self._data["name"])

    @property
    def owner(self) -> str:
        """The owner that the API key names."""
        return self._owner

    @property
    def created(self) -> datetime:
        """Time of creation, in UTC."""
        return datetime.fromisoformat(self._data["created"])

    @property
    def title(self) -> str:
        """Title: the one that was set, else the start of the first user message."""
        return str(self._data["title"])

    @title.setter
    def title(self, title: str) -> None:
        self._patch(title=title)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags, in the order given."""
        return tuple(self._data["tags"])

    @property
    def revision(self) -> int:
        """Number that rises with every stored change of the session."""
        return int(self._data["revision"])

    @property
    def metadata(self) -> dict[str, str]:
        """A copy of the metadata."""
        return dict(self._data["metadata"])

    @property
    def overflow(self) -> str:
        """Policy for a turn that does not fit the context: "refuse" or "drop"."""
        return str(self._data["overflow"])

    @property
    def history(self) -> str:
        """The rule for earlier turns: "append" or "template"."""
        return str(self._data["history"])

    @property
    def interrupted(self) -> bool:
        """Whether the server's process ended during the last reply."""
        return bool(self._data["interrupted"])

    @property
    def unanswered(self) -> str | None:
        """Text of a turn that was stopped before the first token of its reply, else None."""
        return self._data["unanswered"] or None

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices that the next reply will start with."""
        return tuple(self._data["notices"])

    @property
    def pinned(self) -> bool:
        """Whether its pages are retained longer than those of other sessions."""
        return bool(self._data["pinned"])

    @property
    def settings(self) -> dict[str, Any]:
        """A copy of the session's own generation settings."""
        return settings_of(self._data["settings"])

    @property
    def template_variables(self) -> dict[str, Any]:
        """A copy of the variables that the template gets beside the messages."""
        return dict(self._data["template_variables"])

    @property
    def system(self) -> str | None:
        """System prompt, or None."""
        first = next(iter(self._turns), None)
        return first.text if first is not None and first.role == "system" else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns of the current conversation: the system prompt, if any, then users and replies."""
        return self._turns

    @property
    def dropped(self) -> tuple[Turn, ...]:
        """Users and replies before `turns` that were dropped from the prompt because the context
        was full, the oldest first. Asks the server where there are any."""
        first = next((turn for turn in self._turns if turn.role == "user"), None)
        if first is None or first.dropped_before is None:
            return ()
        query = {**DETAILS, "dropped": "true", "known": str(self._turns[-1].id)}
        found = self._connection.call("GET", self._path, query=query)
        return tuple(turn_of(one) for one in found["dropped"])

    @property
    def token_ids(self) -> list[int]:
        """Transcript: all tokens of the current conversation."""
        return transcript(self._turns)

    @property
    def length(self) -> int:
        """Length of the transcript, in tokens."""
        turns = self._turns
        return turns[-1].length if turns else 0

    @property
    def state(self) -> State:
        """Current activity. Asks the server."""
        if self._is_closed:
            return State.CLOSED
        return State(self._connection.call("GET", self._path, query={"state": "true"})["state"])
