"""Process 1 of a container: passes signals on, and collects ended processes.

The system drops signals to process 1 that have no handler, and gives it every process whose parent
has ended. So the command runs in a child, where signals mean from the first moment on what they
mean elsewhere.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

_SI_KERNEL = 0x80  # a terminal sends such a signal to the child, too
_UNBLOCKED = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP,
    signal.SIGSYS, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip


def run_in_child() -> None:
    """Returns in a child if this is process 1. Process 1 ends as its child does."""
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _UNBLOCKED)
    child = os.fork()
    if child:
        _follow(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(child: int) -> NoReturn:
    """Passes signals on to the child until it ends."""
    while True:
        taken = signal.sigwaitinfo(signal.valid_signals() - _UNBLOCKED)
        if taken.si_signo == signal.SIGCHLD:
            _collect(child)
        elif taken.si_code != _SI_KERNEL:
            os.kill(child, taken.si_signo)


def _collect(child: int) -> None:
    """Collects processes that have ended, and ends if the child is one of them."""
    ended = -1
    while ended:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
