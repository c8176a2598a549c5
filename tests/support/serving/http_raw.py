"""HTTP by bytes: requests that no client library sends."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 60.0
"""Seconds after which a test fails instead of waiting on."""


@dataclass
class Answer:
    """One response: its status, headers in lower case, and body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """Yields a connection to a server of this machine."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        yield connection


def request(
    method: str,
    target: str | bytes,
    headers: Iterable[tuple[str, str]] = (("Host", "localhost"),),
    body: bytes | None = None,
    version: str = "1.1",
) -> bytes:
    """Returns the bytes of a request. With a body they have its length."""
    target = target.encode("latin-1") if isinstance(target, str) else target
    lines = [f"{name}: {value}" for name, value in headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    head = "".join(f"{line}\r\n" for line in lines)
    return (
        method.encode() + b" " + target + f" HTTP/{version}\r\n{head}\r\n".encode() + (body or b"")
    )


def rest(connection: socket.socket) -> bytes:
    """Returns what the server sends until it closes the connection or resets it."""
    found = []
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found.append(data)
    return b"".join(found)


def answer(connection: socket.socket, method: str = "GET") -> Answer | None:
    """Reads one response with a Content-Length to a request of this method. None: the server closed
    the connection."""
    found = b""
    try:
        while b"\r\n\r\n" not in found:
            data = connection.recv(1 << 16)
            if not data:
                return None
            found += data
        head, _, body = found.partition(b"\r\n\r\n")
        parsed = parse_head(head)
        length = 0 if method == "HEAD" else int(parsed.headers.get("content-length", 0))
        while len(body) < length:
            data = connection.recv(1 << 16)
            if not data:
                return None
            body += data
    except ConnectionError:
        return None
    parsed.body = body[:length]
    return parsed


def parse_head(head: bytes) -> Answer:
    """Returns the status and headers of a response."""
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Answer(int(first.split()[1]), {n.lower(): v.strip() for n, _, v in pairs})


def exchange(port: int, data: bytes) -> Answer | None:
    """Sends bytes on a connection of their own and reads one response."""
    with connected(port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return answer(connection, data.partition(b" ")[0].decode("latin-1"))
