"""The sockets that a server listens on. They are bound before the model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

from lmchat.errors import InvalidRequest

BACKLOG = 512
LOOK_SECONDS = 1.0
"""Time between two looks whether the file of a socket is in its place."""


def tcp_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address. It does not listen yet.

    Args:
        host: a name or address.
        port: the port; 0: any free one.

    Raises:
        InvalidRequest: the address is unknown, not of this machine, or in use.
    """
    kind, address = _resolved(host, port)
    found = socket.socket(kind, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidRequest(
                f"port {port} of {host} is in use, expected a free one: set --port"
            ) from error
        reason = error.strerror or error
        raise InvalidRequest(f"cannot listen on {host} port {port}: {reason}") from error
    return found


def address_of(host: str, port: int) -> str:
    """Returns the numeric address that `tcp_socket` binds, as "127.0.0.1:80" or "[::1]:80".

    Raises:
        InvalidRequest: the address is unknown.
    """
    kind, address = _resolved(host, port)
    return f"[{address[0]}]:{port}" if kind == socket.AF_INET6 else f"{address[0]}:{port}"


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"--host is {host!r}, expected an address: {error}") from error
    return kind, address


def unix_socket(path: Path) -> socket.socket:
    """Returns a socket bound to a path, which only this user can open.

    A socket file that no process listens on is replaced.

    Raises:
        InvalidRequest: the path cannot be used, or a server listens there.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            found.bind(str(path))
        finally:
            os.umask(mask)
    except OSError as error:
        found.close()
        reason = error.strerror or error
        raise InvalidRequest(f"cannot listen on {path}: {reason}") from error
    except InvalidRequest:
        found.close()
        raise
    return found


def _remove_stale(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidRequest(f"{path} is not a socket, expected a free path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
        raise InvalidRequest(f"a server listens on {path}, expected a free path")


async def keep_listening(
    path: str | os.PathLike[str], listen: Callable[[socket.socket], Awaitable[object]]
) -> NoReturn:
    """Listens at the path of a Unix socket whenever nothing is there, until it is cancelled.

    Cleaners of temporary files remove sockets that are in use.

    Args:
        path: the path.
        listen: makes a bound socket listen.
    """
    while True:
        if not os.path.lexists(path):
            with contextlib.suppress(OSError, InvalidRequest):  # the folder is gone, too
                await listen(unix_socket(Path(path)))
        await asyncio.sleep(LOOK_SECONDS)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a server on `host`."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def url_of(bound: socket.socket) -> str:
    """Returns the URL of a bound TCP socket."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
