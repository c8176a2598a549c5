"""The signals that end a server in order."""

from __future__ import annotations

import signal


def ending_signals() -> list[signal.Signals]:
    """Returns SIGTERM and SIGINT; also SIGHUP, unless the process was started to ignore it, as by
    nohup. Where a terminal closes, SIGHUP comes twice: from the shell and from the system."""
    keeps_running = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if keeps_running else [signal.SIGHUP])]
