"""Messages to systemd, as sd_notify(3) describes them: the server is ready, its loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

READY = "READY=1"
_ALIVE = "WATCHDOG=1"


def notify(message: str) -> None:
    """Sends a message to the service manager, if there is one."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path.startswith("@"):  # a name without a file
        path = "\0" + path[1:]
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(message.encode(), path)


async def report_alive() -> None:
    """Sends what WatchdogSec= of the unit expects, twice as often, until it is cancelled."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    ours = os.environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
    seconds = int(microseconds) / 2e6 if ours and microseconds.isdecimal() else 0.0
    while seconds > 0:
        notify(_ALIVE)
        await asyncio.sleep(seconds)
