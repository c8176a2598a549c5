"""Messages to systemd, as sd_notify(3) describes them: the server is ready, its loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket

READY = "READY=1"
_ALIVE = "WATCHDOG=1"
_WAIT_SECONDS = 0.1  # before a message is sent again to a manager that is behind
_FULL = (errno.EAGAIN, errno.ENOBUFS)


def notify(message: str) -> bool:
    """Sends a message to the service manager, if there is one. Returns False if its queue is full,
    as at boot, when many services write."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path.startswith("@"):  # a name without a file
        path = "\0" + path[1:]
    if path:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as out:
            out.setblocking(False)
            try:
                out.sendto(message.encode(), path)
            except OSError as error:
                return error.errno not in _FULL
    return True


async def report_ready() -> None:
    """Sends that the server is ready, and then what `report_alive()` sends."""
    while not notify(READY):
        await asyncio.sleep(_WAIT_SECONDS)
    await report_alive()


async def report_alive() -> None:
    """Sends what WatchdogSec= of the unit expects, twice as often, until it is cancelled."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    ours = os.environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
    seconds = int(microseconds) / 2e6 if ours and microseconds.isdecimal() else 0.0
    while seconds > 0:
        notify(_ALIVE)
        await asyncio.sleep(seconds)
