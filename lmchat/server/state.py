"""What all routes of one server share, and the request's access to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TypeVar, cast

from starlette.requests import HTTPConnection

from lmchat.aio.engine import AsyncChatEngine
from lmchat.server.archive_limit import ArchiveLimit
from lmchat.server.config import Limits, ServerConfig
from lmchat.server.held_bodies import HeldBodies
from lmchat.server.keyed_locks import KeyedLocks
from lmchat.server.metrics import Metrics
from lmchat.server.session_limit import SessionLimit

Part = TypeVar("Part")

OWNER = "lmchat.owner"
"""Name in an ASGI scope of the request's owner."""
STATE = "lmchat.state"
"""Name in an ASGI scope of the server's state, for mounted apps that set it."""


class ServerState:
    """The engine and the configuration of one server.

    Args:
        engine: a started engine. The caller closes it.
        config: the configuration.
        make_room: deletes sessions of an owner that has as many as it can have (`SessionLimit`).
    """

    def __init__(
        self,
        engine: AsyncChatEngine,
        config: ServerConfig,
        make_room: Callable[[str, int], int],
    ) -> None:
        self.engine = engine
        self.config = config
        self.started = time.time()
        """Time at which the server was made, in seconds of the epoch."""
        self.draining = False
        """Whether the server is about to end and takes no further generations."""
        self.in_flight = 0
        """Requests being answered, without those of probes."""
        self.bodies = HeldBodies(config.limits.bodies)
        """Bytes of their bodies that are in memory."""
        self.metrics = Metrics(engine, self.model_name)
        """Counters and histograms. The engine reports its generations to them."""
        engine.sync.observe(self.metrics)
        self.session_limit = SessionLimit(engine.sync, config.limits.sessions, make_room)
        """Bounds the sessions that clients create."""
        self.names = KeyedLocks()
        """Locks of the names under which sessions are created, by owner and name."""
        self.archive_limit = ArchiveLimit(config.limits.archives)
        """Bounds the archives that clients export and import."""
        self._parts: dict[type, Any] = {}

    def part(self, kind: type[Part], make: Callable[[], Part] | None = None) -> Part:
        """Returns what the routes of one dialect share. For the event loop's thread.

        Args:
            kind: its class.
            make: makes it at the first call; None: `kind` does.
        """
        if kind not in self._parts:
            self._parts[kind] = (make or kind)()
        return cast(Part, self._parts[kind])

    @property
    def limits(self) -> Limits:
        """Bounds of requests."""
        return self.config.limits

    @property
    def model_name(self) -> str:
        """Name of the model for clients; never a path."""
        return self.config.model_name or PurePath(self.engine.model).name


def state_of(connection: HTTPConnection) -> ServerState:
    """Returns the server's state, from a request to one of its routes."""
    return cast(ServerState, connection.app.state.server)


def owner_of(connection: HTTPConnection) -> str:
    """Returns the owner that the request's API key names.

    Routes pass it to every lookup (`session_by_id(id, owner=...)`, `session(name, owner=...)`).
    Objects of other owners then raise the same `NotFound` as objects that do not exist, and the
    answers are identical.
    """
    return cast(str, connection.scope[OWNER])
