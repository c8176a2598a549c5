"""Clients whose connection breaks: at a place of the response, or before it."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any


class RawRequest:
    """A POST on a connection of its own, which a test breaks when it wants.

    Args:
        port: the server's port.
        path: the path.
        body: the JSON body.
        headers: further headers.
    """

    def __init__(self, port: int, path: str, body: dict[str, Any], **headers: str) -> None:
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        self.read = b""
        """What has been read of the response."""

    def read_until(self, text: bytes, times: int = 1) -> None:
        """Reads until the text has come this many times, or the end."""
        while self.read.count(text) < times:
            data = self.socket.recv(1 << 16)
            if not data:
                return
            self.read += data

    def close(self) -> None:
        """Ends the connection as a client does that has waited for too long."""
        self.socket.close()

    def reset(self) -> None:
        """Drops the connection, and what has come and is not read."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
