"""A response with a reply, which records whether the client got it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lmchat.server.http.event_stream import CONNECTION
from lmchat.server.retries.entry import Entry


class Connection(Protocol):
    """A client's connection, as `HttpProtocol` has it."""

    @property
    def is_open(self) -> bool:
        """Whether the client has not closed it, as far as is known."""

    def when_lost(self, call: Callable[[], object]) -> None:
        """Calls `call` if the client did not get the response that was just written."""


class Receipt(Response):
    """Sends a response, and then leaves its entry.

    Args:
        response: the response.
        entry: the entry of its request, to which the client is attached.
        has_reply: whether the response has the reply. One of a reply in the background has its id.
    """

    def __init__(self, response: Response, entry: Entry, has_reply: bool = True) -> None:
        self.background = None
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        self._response = response
        self._entry = entry
        self._has_reply = has_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        connection = cast(Connection | None, scope.get(CONNECTION))
        is_sent = False

        async def watched(message: Message) -> None:
            nonlocal is_sent
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            is_sent = is_last and (connection is None or connection.is_open)
            await send(message)

        entry = self._entry
        try:
            await self._response(scope, receive, watched)
        finally:
            reply = None if entry.answer is None else entry.answer.reply
            is_good = not self._has_reply or (reply is not None and reply.error is None)
            entry.leave(is_sent and is_good)
            if is_sent and is_good and connection is not None:
                connection.when_lost(entry.lose)
