"""HTTP/1.1 on one connection: uvicorn's protocol with bounds of size, time and number.

A client that sends a head or body too slowly, does not read, sends a head that is too large or
opens too many connections is disconnected. One timer looks at all connections of a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import re
import socket
import sys
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from h11._state import MIGHT_SWITCH_PROTOCOL
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lmchat.server.config import Limits
from lmchat.server.errors import HttpError, error_object
from lmchat.server.http.event_stream import ABORT, CONNECTION
from lmchat.server.http.guard import PROBES

log = logging.getLogger("lmchat.server")

BODY_PART = 64 << 10
"""Bytes of a body that arrive within `Limits.receive_seconds`."""

LINGER_SECONDS = 5.0
"""Time in which the rest of a body is read and dropped after its request was answered. Closing at
once would reset the connection, and the client would not see the answer."""

RESERVE = 64
"""Connections above their limit, on each of which only one of `PROBES` is answered."""

RECEIPT_SECONDS = 2.0
"""Time in which a connection that breaks after a response shows that the client did not get it."""

ASK_SECONDS, ASK_AGAIN_SECONDS, ASK_TIMES = 10, 5, 3
"""Silence after which the system asks whether the client is still there, time between two such
questions, and after how many without an answer the connection ends (tcp(7))."""

_SCHEME = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*")
_AUTHORITY = re.compile(rb"([^/?#]*)(.*)", re.DOTALL)

_OTHER_PROTOCOLS = (
    ("TLS", re.compile(rb"[\x14-\x17]\x03[\x00-\x04]")),
    ("HTTP/2", re.compile(rb"PRI \* HTTP/2")),
    ("the PROXY protocol", re.compile(rb"PROXY |\r\n\r\n\0\r\nQUIT\n")),
)
_LONGEST_PREFACE = 12  # bytes by which another protocol is recognized

_WHOLE = (h11.DONE, h11.MUST_CLOSE, MIGHT_SWITCH_PROTOCOL)

_TEXTS = {
    400: "the request is not valid HTTP/1.1",
    408: "the request did not arrive in time",
    431: "the head of the request is too large",
    501: "the Transfer-Encoding is not supported, expected chunked",
    503: "too many connections are open",
    505: "the version of HTTP is not supported, expected HTTP/1.1",
}


def vanish_seconds(limits: Limits) -> float:
    """Returns after how many seconds without an answer to what was sent a client has vanished. The
    system counts those of a client that does not read, too: `send_seconds` bounds these."""
    return max(1.0, limits.send_seconds * 5 / 6)


def _notice_end(connection: socket.socket, limits: Limits) -> None:
    """Makes the system end a connection whose client has vanished without closing it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, ASK_SECONDS),
        (socket.TCP_KEEPINTVL, ASK_AGAIN_SECONDS),
        (socket.TCP_KEEPCNT, ASK_TIMES),
        (socket.TCP_USER_TIMEOUT, round(1000 * vanish_seconds(limits))),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Connections:
    """The connections of one server, and the timer that looks at all of them.

    Args:
        limits: bounds of sizes, times and their number.
        refused: called with the status of each answer that the app does not give.
        root_path: the path of a proxy below which the server is.
    """

    def __init__(
        self,
        limits: Limits,
        refused: Callable[[int], object] = lambda status: None,
        root_path: str = "",
    ) -> None:
        self.limits = limits
        roots = {"", root_path}
        self.probes = frozenset(f"{root}{path}".encode() for root in roots for path in PROBES)
        self.refused = refused
        self._all: set[HttpProtocol] = set()
        self._timer: asyncio.TimerHandle | None = None
        shortest = min(limits.receive_seconds, limits.send_seconds, LINGER_SECONDS)
        self._interval = min(1.0, max(0.01, shortest / 4))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: HttpProtocol) -> None:
        """Adds a connection, which the timer looks at from now on."""
        self._all.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def remove(self, connection: HttpProtocol) -> None:
        """Removes a connection that has been closed."""
        self._all.discard(connection)

    def make_room(self) -> None:
        """Closes the connection that has been without a request for longest, if there is one."""
        by_time = sorted(self._all, key=lambda connection: connection.idle_since)
        if found := next((one for one in by_time if one.is_vacant), None):
            self.remove(found)
            found.transport.close()

    def close_idle(self) -> None:
        """Closes connections without a request."""
        for connection in list(self._all):
            if connection.is_vacant:
                connection.transport.close()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._all):
            connection.check(now)
        self._timer = loop.call_later(self._interval, self._look) if self._all else None


class _H11(h11.Connection):
    """A parser that bounds whole heads, also such that arrive in one piece, and that refuses what
    two programs could read in two ways."""

    def __init__(self, most: int, probes: frozenset[bytes]) -> None:
        super().__init__(h11.SERVER, most)
        self._most, self._probes = most, probes
        self.is_reserved = False
        """Whether only probes are accepted, since too many connections are open."""
        self._preface: bytes | None = b""  # the first bytes, until there was a request
        self._may_skip = True  # an empty line before the next request line
        self.status = 400
        """Status of the answer to invalid input."""
        self.protocol = ""
        """Name of the protocol that the client speaks instead of HTTP/1.1, if it is known."""

    def receive_data(self, data: bytes) -> None:
        if self._preface is not None:
            self._preface = (self._preface + data)[:_LONGEST_PREFACE]
        super().receive_data(data)

    def next_event(self) -> Any:
        try:
            if self.their_state is h11.IDLE and not self._skip_empty_line():
                return h11.NEED_DATA
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._preface, self._may_skip = None, True
                self._check(event)
                event = _in_origin_form(event)
                if self.is_reserved and not self._is_probe(event):
                    raise h11.RemoteProtocolError("connections", error_status_hint=503)
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        return event

    def _skip_empty_line(self) -> bool:
        """Drops one empty line, which some clients send after a body (RFC 9112 2.2). Returns False
        if the next byte shows whether the line is empty."""
        for name, pattern in _OTHER_PROTOCOLS:
            if self._preface is not None and pattern.match(self._preface):
                self.protocol = name
                raise h11.RemoteProtocolError(f"these bytes are {name}")
        start = self.trailing_data[0][:2]
        if self._may_skip and start == b"\r\n":
            self._receive_buffer.maybe_extract_at_most(2)
            self._may_skip = False
        return not (self._may_skip and start == b"\r")

    def _is_probe(self, request: h11.Request) -> bool:
        path = request.target.partition(b"?")[0]
        return request.method in (b"GET", b"HEAD") and path in self._probes

    def _check(self, request: h11.Request) -> None:
        """Refuses a request that is too large, of another version, or whose body has two ends. A
        proxy that takes the other end would see another request next (RFC 9112 6.1)."""
        size = len(request.target) + sum(len(n) + len(v) + 4 for n, v in request.headers)
        if size > self._most:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        if not request.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError("the version is not 1.x", error_status_hint=505)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            raise h11.RemoteProtocolError("the length of the body is given twice")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Returns a request whose target is a path. That of one in absolute form, as clients send it to
    proxies, names the host, whatever the header says (RFC 9112 3.2.2).

    Raises:
        RemoteProtocolError: the target is a URL of another scheme, or has no host.
    """
    scheme, colon, rest = request.target.partition(b"://")
    if not colon or not _SCHEME.fullmatch(scheme):
        return request
    host, path = _AUTHORITY.fullmatch(rest).groups()  # type: ignore[union-attr]
    if scheme.lower() not in (b"http", b"https") or not host or b"@" in host:
        raise h11.RemoteProtocolError("the target is not a URL of this server")
    if not path and request.method == b"OPTIONS":
        path = b"*"
    elif not path.startswith(b"/"):
        path = b"/" + path
    headers = [(b"host", host)] + [pair for pair in request.headers if pair[0] != b"host"]
    return h11.Request(
        method=request.method, target=path, headers=headers, http_version=request.http_version
    )


class HttpProtocol(H11Protocol):
    """One connection.

    Args:
        config: uvicorn's configuration.
        server_state: uvicorn's state.
        app_state: the state of the app's lifespan.
        _loop: the loop.
        group: the connections of the server.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        group: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _H11(group.limits.head, group.probes)
        self._group = group
        self._limits = group.limits
        self._state: Any = None  # of the parser, when data arrived last
        self._deadline: float | None = None  # of the part that the client sends now
        self._part = 0  # bytes of this part
        self._early = bytearray()  # of requests that follow the running one
        self._lost: tuple[float, Callable[[], object]] | None = None  # of `when_lost()`
        self._unsent = 0  # bytes in the transport's buffer at the last look
        self._unsent_since = 0.0
        self.idle_since = 0.0
        """When it was opened, or its last response was complete."""

    # --- what the event loop calls ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time in which the first head must arrive."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does not set it where a socket names no protocol; each event waits 40 ms then.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_end(connection, self._limits)
        most = self._limits.connections
        if len(self._group) >= most:
            self._group.make_room()
        self.idle_since = self.loop.time()
        self._group.add(self)
        cast(_H11, self.conn).is_reserved = len(self._group) > most
        if len(self._group) > most + RESERVE:
            self._refuse(503)
            return
        self._expect(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wakes the request of this connection, which sees the disconnect."""
        self._group.remove(self)
        super().connection_lost(exc)
        lost, self._lost = self._lost, None
        if lost is not None and exc is not None and self.loop.time() < lost[0]:
            lost[1]()

    def eof_received(self) -> None:
        """Takes the end of what the client sends. A client that closed before it had received the
        last response did not get that."""
        lost, self._lost = self._lost, None
        if lost is not None and self.loop.time() < lost[0] and self._count_of(termios.TIOCOUTQ):
            lost[1]()

    def _count_of(self, request: int) -> int:
        """Returns a number of bytes: TIOCOUTQ, that the client's system has not acknowledged, or
        FIONREAD, that have arrived and were not read yet."""
        count = bytearray(4)
        with contextlib.suppress(OSError, ValueError):
            connection = self.transport.get_extra_info("socket")
            fcntl.ioctl(connection.fileno(), request, count)
        return int.from_bytes(count, sys.byteorder)

    @property
    def is_open(self) -> bool:
        """Whether the client has not closed the connection, as far as is known."""
        return not self.transport.is_closing()

    def when_lost(self, call: Callable[[], object]) -> None:
        """Calls `call` if it turns out that the client did not get the response that was just
        written: its system refuses it, or the client closes without having read it."""
        self._lost = (self.loop.time() + RECEIPT_SECONDS, call)

    def data_received(self, data: bytes) -> None:
        """Takes the next bytes. Those of requests that follow the running one wait for its end."""
        if self.transport.is_closing():
            return
        if self._has_whole_request:
            self._early += data
            if len(self._early) > self._limits.head:
                # A client that has all of Content-Length sends its next request, although the app
                # has still to end the response.
                if self.cycle.response_started:
                    self.flow.pause_reading()
                else:
                    self.transport.abort()
            return
        if len(self._group) <= self._limits.connections:
            cast(_H11, self.conn).is_reserved = False
        self._part += len(data)
        self._lost = None  # a client that sends its next request has read the last response
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Starts requests, and gives each the function that drops the connection."""
        before = self.scope
        super().handle_events()
        if self.scope is not None and self.scope is not before:
            scope = cast(dict[str, Any], self.scope)
            scope[ABORT], scope[CONNECTION] = self.transport.abort, self
            if cast(_H11, self.conn).is_reserved:
                self.cycle.keep_alive = False
        if self._has_whole_request:  # uvicorn stops to read here, and would miss a disconnect
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Continues with the bytes that have arrived early."""
        self.idle_since = self.loop.time()
        early = bytes(self._early)
        self._early.clear()
        if early and not self.transport.is_closing():
            self.conn.receive_data(early)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.is_idle and self.conn.their_state is h11.SEND_BODY:
            self._deadline = self.loop.time() + LINGER_SECONDS
        elif early:
            self._watch()

    def shutdown(self) -> None:
        """Closes the connection now, or after the running response."""
        if self.is_idle:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # --- refusals ---------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no request with an error object, and closes."""
        parser, text = cast(_H11, self.conn), ""
        if parser.protocol:
            text = f"the client speaks {parser.protocol}, expected HTTP/1.1"
            log.info("%s: %s", self.client[0] if self.client else "-", text)
        self._refuse(parser.status, text)

    def _refuse(self, status: int, text: str = "") -> None:
        """Answers without the app, and closes the connection."""
        if self._is_answering and self.cycle.response_started:
            self.transport.abort()  # the running response cannot go on
            return
        text = text or _TEXTS.get(status, _TEXTS[400])
        body = json.dumps(error_object(HttpError(status, text))).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._deadline = None
        self._group.refused(status)
        self.transport.write(head.encode() + body)
        self.transport.close()

    # --- time -------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return not self._is_answering

    @property
    def is_vacant(self) -> bool:
        """Whether nothing of a request has arrived since the last response, which was sent."""
        return (
            self.is_idle
            and self.conn.their_state is h11.IDLE
            and not (self.conn.trailing_data[0] or self.transport.get_write_buffer_size())
            and not self._count_of(termios.FIONREAD)
        )

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_whole_request(self) -> bool:
        return self._is_answering and self.conn.their_state in _WHOLE

    def _expect(self, state: Any) -> None:
        """Starts the time in which the next part must arrive."""
        self._state, self._part = state, 0
        is_awaited = state in (h11.IDLE, h11.SEND_BODY)
        self._deadline = self.loop.time() + self._limits.receive_seconds if is_awaited else None

    def _watch(self) -> None:
        """Starts the time again at each part: a head, and each `BODY_PART` bytes of a body."""
        state = self.conn.their_state
        is_lingering = state is h11.SEND_BODY and self.cycle is not None and self.is_idle
        if is_lingering:
            return
        if state is not self._state or (state is h11.SEND_BODY and self._part >= BODY_PART):
            self._expect(state)
        elif self._deadline is None and state is h11.IDLE:
            self._expect(state)  # the first bytes after a pause

    def check(self, now: float) -> None:
        """Disconnects the client if it does not send or read in time."""
        if self._deadline is not None and now >= self._deadline:
            if self.flow.read_paused:  # the app is slow, not the client
                self._deadline = now + self._limits.receive_seconds
            elif self._is_answering or self.conn.their_state is h11.IDLE:
                self._refuse(408)
            else:
                self.transport.abort()
        self._check_sending(now)

    def _check_sending(self, now: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        # While the app writes, the buffer may grow although the client reads.
        is_complete = self.transport.is_closing() or self.is_idle
        is_waiting = unsent > 0 and (is_complete or self.flow.write_paused)
        if not is_waiting or not self._unsent or unsent < self._unsent:
            self._unsent_since = now
        elif now - self._unsent_since >= self._limits.send_seconds:
            self.transport.abort()
        self._unsent = unsent if is_waiting else 0
