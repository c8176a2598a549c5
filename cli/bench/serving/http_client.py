"""A lean HTTP/1.1 client for event streams, on asyncio's protocols.

The benchmark shares its processors with the server. On 16 streams with 400 events per second, a
client on httpx used 175 to 200 us of processor time per event; this one parses an event in the
callback of the socket and uses 60 to 70.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from turbomind.errors import InvalidRequest

Sink = Callable[[bytes, float], None]
"""Receives a part of an event stream and the time of its arrival on the loop's clock."""

STALE_SECONDS = 1.0
"""Time after a request in which the loss of a kept connection means that it was closed before."""

MAX_HEAD = 1 << 16
MAX_BODY = 64 << 20
EVENT_STREAM = "text/event-stream"


class ConnectionLost(Exception):
    """The connection could not be opened, or ended before the response was complete.

    Args:
        message: What happened.
        unanswered: Whether it was open and no part of a response had arrived.
    """

    def __init__(self, message: str, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered


class InvalidResponse(Exception):
    """The response is not HTTP/1.1 as this client reads it."""


@dataclass
class Response:
    """A response. `body` is empty where the sink received it.

    Attributes:
        status: The HTTP status.
        headers: Header fields; names are in lower case.
        body: The body.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return self.status == 200 and self.headers.get("content-type", "").startswith(EVENT_STREAM)

    def json(self) -> Any:
        """Returns the body as JSON, or None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass
class _Exchange:
    """The request that a connection is waiting for."""

    done: asyncio.Future[Response]
    sink: Sink | None
    response: Response | None = None
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    left: int | None = 0
    """Bytes of the body or of its chunk that are missing; None: until the connection closes."""
    chunked: bool = False
    in_chunk: bool = False
    last_chunk: bool = False


class Connection(asyncio.Protocol):
    """One connection; it serves one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._exchange: _Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self.open = False
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Completes a body that ends with the connection, and fails any other request."""
        self.open = False
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.response is not None and exchange.left is None and exc is None:
            self._finish(exchange)
            return
        before = exchange.response is None
        where = "before" if before else "during"
        message = f"the server closed the connection {where} the response"
        self._fail(ConnectionLost(message, before and not self._buffer))

    def send(self, request: bytes, sink: Sink | None) -> asyncio.Future[Response]:
        """Sends a request and returns its response to come."""
        assert self._exchange is None
        assert self._transport is not None
        self.used = True
        self._exchange = _Exchange(self._loop.create_future(), sink)
        self._transport.write(request)
        return self._exchange.done

    def close(self) -> None:
        """Closes the connection at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived."""
        at = self._loop.time()
        self._buffer += data
        try:
            while (exchange := self._exchange) is not None:
                reads = self._read_head if exchange.response is None else self._read_body
                if not reads(exchange, at):
                    return
        except (InvalidResponse, ValueError) as error:
            self._fail(InvalidResponse(str(error)))
            self.close()

    def _read_head(self, exchange: _Exchange, at: float) -> bool:
        """Reads the status line and the header fields; returns whether more may be read."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise InvalidResponse(f"the head of the response exceeds {MAX_HEAD} bytes")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise InvalidResponse(f"the response starts with {lines[0][:40]!r}, expected HTTP/1.1")
        status = int(rest[:3])
        if status < 200:
            return True  # an interim response
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        exchange.response = Response(status, headers)
        exchange.chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if exchange.chunked or status in (204, 304):
            exchange.left = 0
        else:
            length = headers.get("content-length")
            exchange.left = None if length is None else int(length)
        if exchange.left == 0 and not exchange.chunked:
            self._finish(exchange)
        return True

    def _read_body(self, exchange: _Exchange, at: float) -> bool:
        """Reads a part of the body; returns whether more may be read."""
        if exchange.chunked and not exchange.in_chunk:
            return self._read_chunk_head(exchange)
        if not self._buffer:
            return False
        if exchange.left is None:
            part = bytes(self._buffer)
        else:
            part = bytes(self._buffer[: exchange.left])
            exchange.left -= len(part)
        del self._buffer[: len(part)]
        self._deliver(exchange, part, at)
        if exchange.left == 0:
            if exchange.chunked:
                exchange.in_chunk = False
            else:
                self._finish(exchange)
        return True

    def _read_chunk_head(self, exchange: _Exchange) -> bool:
        """Reads the line with a chunk's size, or a line of the trailer."""
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        if exchange.last_chunk:
            if not line:
                self._finish(exchange)
        elif line:  # the empty line is the end of the previous chunk
            exchange.left = int(line.partition(b";")[0], 16)
            exchange.in_chunk = exchange.left > 0
            exchange.last_chunk = exchange.left == 0
        return True

    def _deliver(self, exchange: _Exchange, part: bytes, at: float) -> None:
        assert exchange.response is not None
        if exchange.sink is not None and exchange.response.is_stream:
            exchange.sink(part, at)
            return
        exchange.size += len(part)
        if exchange.size > MAX_BODY:
            raise InvalidResponse(f"the body exceeds {MAX_BODY} bytes")
        exchange.parts.append(part)

    def _finish(self, exchange: _Exchange) -> None:
        assert exchange.response is not None
        self._exchange = None
        exchange.response.body = b"".join(exchange.parts)
        if exchange.response.headers.get("connection", "").lower() == "close":
            self.close()
        if not exchange.done.done():
            exchange.done.set_result(exchange.response)

    def _fail(self, error: Exception) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(error)


class HttpClient:
    """Requests to one server, over connections that are kept and used again.

    Args:
        url: The server's URL, http or https.
        headers: Header fields of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str] = {}) -> None:
        self._address = parsed_url(url)
        self._tls = ssl.create_default_context() if self._address.scheme == "https" else None
        self._port = self._address.port or (443 if self._tls else 80)
        self._host = self._address.hostname or ""
        self._headers = {"host": self._address.netloc.rpartition("@")[2], **headers}
        self._idle: list[Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] = {},
        sink: Sink | None = None,
        timeout: float = 60.0,
    ) -> Response:
        """Sends a request and returns the complete response.

        Args:
            method: The HTTP method.
            path: The path on the server.
            body: An object that is sent as JSON; None: no body.
            headers: Further header fields.
            sink: Receives the events of a response that is an event stream.
            timeout: Seconds until the response must be complete.

        Raises:
            ConnectionLost: The server cannot be reached or closed the connection.
            InvalidResponse: The response is not HTTP.
            asyncio.TimeoutError: The time is up.
        """
        data = self._encoded(method, path, body, headers)
        return await asyncio.wait_for(self._exchange(data, sink), timeout)

    async def _exchange(self, data: bytes, sink: Sink | None) -> Response:
        loop = asyncio.get_running_loop()
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            if not connection.open:
                continue
            reused, sent = connection.used, loop.time()
            try:
                response = await connection.send(data, sink)
            except ConnectionLost as error:
                # The server may have closed a kept connection just before the request arrived.
                if reused and error.unanswered and loop.time() < sent + STALE_SECONDS:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.open:
                self._idle.append(connection)
            return response

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {self._address.netloc}: {error}") from None
        return connection

    def _encoded(self, method: str, path: str, body: object, headers: Mapping[str, str]) -> bytes:
        fields = {**self._headers, **headers}
        data = b""
        if body is not None:
            data = json.dumps(body).encode()
            fields["content-type"] = "application/json"
        if body is not None or method == "POST":
            fields["content-length"] = str(len(data))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data

    async def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # in which the transports close their sockets


def parsed_url(url: str) -> SplitResult:
    """Returns the parts of a server's URL.

    Raises:
        InvalidRequest: It is not an http or https URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = None
    if not valid:
        raise InvalidRequest(f"URL is {url!r}, expected one such as http://127.0.0.1:23333")
    return parts
