"""What all routes of one server share, and the request's access to it."""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import cast

from starlette.requests import HTTPConnection

from lmchat.aio import AsyncChatEngine
from lmchat.server.config import Limits, ServerConfig
from lmchat.server.held_bodies import HeldBodies
from lmchat.server.metrics import Metrics
from lmchat.server.session_limit import SessionLimit


class ServerState:
    """The engine and the configuration of one server.

    Args:
        engine: a started engine. The caller closes it.
        config: the configuration.
    """

    def __init__(self, engine: AsyncChatEngine, config: ServerConfig) -> None:
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
        self.session_limit = SessionLimit(engine.sync, config.limits.sessions)
        """Bounds the sessions that clients create."""

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
    return cast(str, connection.scope["lmchat.owner"])
