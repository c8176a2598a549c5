"""Responses while a generation runs: server-sent events, and waiting for a whole reply.

Both end the generation when the client disconnects. An event stream also ends when the client does
not take what was sent, and sends a comment when there was nothing to send for some time, so that
proxies keep the connection.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lmchat.server.state import state_of

Result = TypeVar("Result")

COMMENT = b": keep-alive\n\n"
ABORT = "lmchat.abort"
"""Name in an ASGI scope of a function that drops the connection at once."""
CONNECTION = "lmchat.connection"
"""Name in an ASGI scope of the `Connection` of the request, where the ASGI server has one."""


class Disconnected(Exception):
    """The client has closed the connection. Nothing can be answered."""


class EventStream(Response):
    """Sends server-sent events as an asynchronous iterator yields them.

    Args:
        events: encoded events, each with its empty line at the end. It is closed in any case, so
            its `finally` can end a generation.
        keep_alive_seconds: silence after which a comment is sent.
        send_seconds: time that a client may take for one event.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        keep_alive_seconds: float,
        send_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._keep_alive = keep_alive_seconds
        self._send_seconds = send_seconds
        self._last = 0.0  # time of the last event or comment
        self._is_sending = False
        self.init_headers(
            {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )

    @classmethod
    def of(
        cls,
        request: Request,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
    ) -> EventStream:
        """Returns a stream with the intervals of the request's server."""
        config = state_of(request).config
        return cls(
            events,
            keep_alive_seconds=config.keep_alive_seconds,
            send_seconds=config.limits.send_seconds,
            headers=headers,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client is gone."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        producer = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            while not (producer.done() or gone.done() or self._is_stuck()):
                await self._pause({producer, gone})
                if not self._is_sending and self._silence() >= self._keep_alive:
                    await self._send(send, COMMENT)
        finally:
            finished = producer.done()
            for task in (producer, gone):
                task.cancel()
            await asyncio.wait({producer, gone})
            if not gone.cancelled():
                gone.exception()  # such as of a body that is too large, which no route reads
            if not finished and self._is_stuck() and ABORT in scope:
                scope[ABORT]()
        if finished and not producer.cancelled():
            producer.result()

    async def _produce(self, send: Send) -> None:
        self._last = time.monotonic()
        try:
            async for event in self._events:
                await self._send(send, event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()

    async def _send(self, send: Send, data: bytes) -> None:
        self._is_sending, self._last = True, time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending, self._last = False, time.monotonic()

    async def _pause(self, tasks: set[asyncio.Future[None]]) -> None:
        most = self._send_seconds if self._is_sending else self._keep_alive
        wait = max(0.01, min(most - self._silence(), self._send_seconds))
        await asyncio.wait(tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED)

    def _silence(self) -> float:
        return time.monotonic() - self._last

    def _is_stuck(self) -> bool:
        return self._is_sending and self._silence() >= self._send_seconds


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work`, and cancels it when the client disconnects.

    Raises:
        Disconnected: the client has closed the connection.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})
        with contextlib.suppress(BaseException):
            gone.exception()


def event(data: str, name: str | None = None, number: int | None = None) -> bytes:
    """Returns one server-sent event. `data` must be one line, as JSON is."""
    head = "" if number is None else f"id: {number}\n"
    if name is not None:
        head += f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()
