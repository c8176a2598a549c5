"""What a client has read of a session: its properties and the turns of its conversation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from typing_extensions import override

from lmchat.client.http import Connection
from lmchat.client.values import settings_of, turn_of
from lmchat.errors import NotFound
from lmchat.generation.state import State
from lmchat.interface.session import SessionApi
from lmchat.store.turns import Turn, transcript

DETAILS = {"details": "true"}


class RemoteRecord(SessionApi):
    """The properties of a session, as the last request of this client left or found it.

    `refresh()` reads what others have changed. Any thread may use it.

    Args:
        connection: the server.
        owner: the owner that the API key names.
        data: the session as the server sends it, with details.
    """

    def __init__(self, connection: Connection, owner: str, data: Mapping[str, Any]) -> None:
        super().__init__()
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

    @override
    def refresh(self) -> None:
        self._check_open()
        headers = {"If-None-Match": f'"{self.revision}"'}
        query = {**DETAILS, "refresh": "true"}
        answer = self._connection.request("GET", self._path, query=query, headers=headers)
        if answer.status_code != 304:
            self.take(answer.json())

    # --- what it is ------------------------------------------------------------------------------

    @property
    @override
    def id(self) -> str:
        return str(self._data["id"])

    @property
    @override
    def name(self) -> str:
        return str(self._data["name"])

    @property
    @override
    def owner(self) -> str:
        return self._owner

    @property
    @override
    def created(self) -> datetime:
        return datetime.fromisoformat(self._data["created"])

    @override
    def _shown_title(self) -> str:
        return str(self._data["title"])

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return tuple(self._data["tags"])

    @property
    @override
    def revision(self) -> int:
        return int(self._data["revision"])

    @property
    @override
    def metadata(self) -> dict[str, str]:
        return dict(self._data["metadata"])

    @property
    @override
    def overflow(self) -> str:
        return str(self._data["overflow"])

    @property
    @override
    def history(self) -> str:
        return str(self._data["history"])

    @property
    @override
    def interrupted(self) -> bool:
        return bool(self._data["interrupted"])

    @property
    @override
    def unanswered(self) -> str | None:
        return self._data["unanswered"] or None

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        return tuple(self._data["notices"])

    @property
    @override
    def pinned(self) -> bool:
        return bool(self._data["pinned"])

    @property
    @override
    def settings(self) -> dict[str, Any]:
        return settings_of(self._data["settings"])

    @property
    @override
    def template_variables(self) -> dict[str, Any]:
        return dict(self._data["template_variables"])

    @property
    @override
    def turns(self) -> tuple[Turn, ...]:
        return self._turns

    @property
    @override
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
    @override
    def token_ids(self) -> list[int]:
        return transcript(self._turns)

    @property
    @override
    def length(self) -> int:
        turns = self._turns
        return turns[-1].length if turns else 0

    @property
    @override
    def state(self) -> State:
        """Current activity. Asks the server."""
        if self._is_closed:
            return State.CLOSED
        return State(self._connection.call("GET", self._path, query={"state": "true"})["state"])
