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
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]
_LOOPBACK = ("127.0.0.1", "::1")
_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_PORT_TRIES = 8
LOOK_SECONDS = 1.0
"""Time between two looks whether the file of a socket is in its place."""


def tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Returns a socket for each address of a name, all bound to one port. They do not listen yet.

    Args:
        host: a name or address. `localhost` has the addresses of IPv4 and IPv6; those that this
            machine has not are left out, if it has one.
        port: the port; 0: any free one.

    Raises:
        InvalidRequest: the address is unknown, not of this machine, or in use.
    """
    addresses = _resolved(host, port)
    for _ in range(_PORT_TRIES - 1 if port == 0 else 0):
        with contextlib.suppress(InvalidRequest):  # the free port is in use at another address
            return _all_bound(host, port, addresses)
    return _all_bound(host, port, addresses)


def _all_bound(host: str, port: int, addresses: list[_Address]) -> list[socket.socket]:
    """Returns a bound socket for each address; closes all if one cannot be bound."""
    sockets: list[socket.socket] = []
    missing = None
    try:
        for family, address in addresses:
            try:
                sockets.append(_bound(family, (address[0], port, *address[2:]), len(addresses) > 1))
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
                missing = error
            else:
                port = port or sockets[0].getsockname()[1]
        if missing and not sockets:
            raise missing
    except OSError as error:
        for one in sockets:
            one.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidRequest(
                f"port {port} of {host} is in use, expected a free one: set --port"
            ) from error
        reason = error.strerror or error
        raise InvalidRequest(f"cannot listen on {host} port {port}: {reason}") from error
    return sockets


def _bound(
    family: socket.AddressFamily, address: tuple[Any, ...], is_one_of_several: bool
) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_one_of_several and family == socket.AF_INET6:  # "::" has the addresses of IPv4, too
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def addresses_of(host: str, port: int) -> list[str]:
    """Returns the numeric addresses that `tcp_sockets` binds, as "127.0.0.1:80" or "[::1]:80".

    Raises:
        InvalidRequest: the address is unknown.
    """
    return [
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, address in _resolved(host, port)
        if _is_here(family, address)
    ]


def _is_here(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Returns whether an address is one of this machine's, as far as is known."""
    try:
        _bound(family, (address[0], 0, *address[2:]), is_one_of_several=True).close()
    except OSError as error:
        return error.errno not in _MISSING
    return True


def _resolved(host: str, port: int) -> list[_Address]:
    """Returns the addresses of a name. Whether `localhost` has both is not left to the system's
    file of hosts: browsers do not read it (RFC 6761 6.3)."""
    is_local = host.lower().removesuffix(".") == "localhost"
    try:
        found = [
            (family, address)
            for name in (_LOOPBACK if is_local else (host,))
            for family, _, _, _, address in socket.getaddrinfo(
                name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        ]
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"--host is {host!r}, expected an address: {error}") from error
    return list(dict.fromkeys(found))


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
