"""One request and its response: its status, its duration, its line in the log."""

from __future__ import annotations

import logging
import time

from starlette.types import Message, Scope, Send

from lmchat.server.state import OWNER, ServerState

log = logging.getLogger("lmchat.server.access")

EXCHANGE = "lmchat.exchange"
"""Name in an ASGI scope of the request's `Exchange`."""

CLIENT_CLOSED = 499
"""Status in the log and the metrics of a request whose client disconnected before the answer."""


class Exchange:
    """Watches the messages of a response.

    Args:
        scope: the request.
        send: sends the messages.
        state: the state of the server.
        method: the method that the client has sent. HEAD gets the head of the answer to GET.
        is_routine: whether a program repeats it without end, as a proxy asks for the server's
            health several times per second. Then 200, and 401 of a page whose login has ended,
            are logged for debugging only.
    """

    def __init__(
        self, scope: Scope, send: Send, state: ServerState, method: str, is_routine: bool = False
    ) -> None:
        self.status = CLIENT_CLOSED
        """Status of the response."""
        self.is_complete = False
        """Whether the whole response was sent."""
        self.is_routine = is_routine
        """Whether it is logged for debugging only. An app that gets the request may set it."""
        scope[EXCHANGE] = self
        self._scope = scope
        self._send = send
        self._state = state
        self._method = method
        self._begun = time.perf_counter()
        self._is_logged = False

    async def send(self, message: Message) -> None:
        """Sends a message of the response."""
        if self.is_complete:  # the rest of the body of an answer to HEAD
            return
        kind = message["type"]
        if kind == "http.response.start":
            self.status = message["status"]
            if self._state.draining:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif kind == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)
        if kind == "http.response.start" and self._method == "HEAD":
            self.is_complete = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        if self.is_complete:
            self.end()

    def end(self) -> None:
        """Counts and logs the request. Nothing that the client has sent is in the line: the path is
        the route's. Idempotent."""
        if self._is_logged:
            return
        self._is_logged = True
        self._state.metrics.responded(self.status)
        level = logging.DEBUG if self.is_routine and self.status in (200, 401) else logging.INFO
        if log.isEnabledFor(level):
            scope = self._scope
            path = getattr(scope.get("route"), "path", None) or "-"
            method = self._method if self._method in _METHODS else "-"
            log.log(
                level,
                "%s %s %d %.3f s owner=%s",
                method,
                path,
                self.status,
                time.perf_counter() - self._begun,
                scope.get(OWNER, "-"),
            )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
