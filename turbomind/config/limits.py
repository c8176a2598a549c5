"""One error for a limit on open files or threads, wherever it is met."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from turbomind import _C
from turbomind.errors import InternalError

TASKS = 20
"""Threads that a server has besides those of `threads`, as long as few calls wait at once."""

_FILES = "too many files are open"
_THREADS = "the system refuses another thread"
_SHORTAGE = (errno.EMFILE, errno.ENFILE)
_WANTED = 4096  # enough for any number of sessions and segment files
_NO_THREAD = ("can't start new thread", "refused to start a thread", _THREADS)


@contextlib.contextmanager
def explain_limits(what: str) -> Iterator[None]:
    """Turns any error of the block that lacks file descriptors or threads into an InternalError.

    The message names `what` cannot be opened, the limits, and how to raise them. Also a decorator.
    """
    try:
        yield
    except Exception as error:
        if _FILES in str(error) or _THREADS in str(error):
            raise
        if any(map(_lacks_files, _causes(error))):
            message = f"{_FILES}: {what} cannot be opened, {_limit_on_files()}"
        elif any(map(_lacks_threads, _causes(error))):
            message = f"{_THREADS} for {what}: {_limit_on_threads()}"
        else:
            raise
        raise InternalError(message) from error


def start_thread(thread: threading.Thread, what: str) -> None:
    """Starts a thread that `what` needs.

    Raises:
        InternalError: The system refuses it.
    """
    with explain_limits(what):
        thread.start()


def shortage(error: BaseException) -> str | None:
    """Returns the text of an error, or of the first of its causes, that is a lack of file
    descriptors or threads; None where none is."""
    found = (one for one in _causes(error) if _lacks_files(one) or _lacks_threads(one))
    return next(map(str, found), None)


def is_exhausted(wanted: int) -> bool:
    """Returns whether this process cannot open `wanted` more files now."""
    opened: list[int] = []
    try:
        while len(opened) < wanted:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in _SHORTAGE
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return False


def _lacks_files(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _SHORTAGE:
        return True
    return any(text in str(error) for text in (_FILES, *map(os.strerror, _SHORTAGE)))


def _lacks_threads(error: BaseException) -> bool:
    return any(text in str(error) for text in _NO_THREAD)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    seen: set[int] = set()  # an error that is raised twice may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _limit_on_files() -> str:
    import resource  # only for the message

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, soft) or soft < _WANTED:
        most = "" if hard == resource.RLIM_INFINITY else f", up to {hard}"
        return (
            f"the limit of this process is {soft}; `ulimit -n {_WANTED}` in the shell that starts "
            f"it raises that{most}"
        )
    return f"the limit of this process is {soft}, or all of the system's are in use"


def _limit_on_threads() -> str:
    import resource

    from turbomind.machine import physical_cores

    limits = []
    for folder, _ in _C.control_groups("pids", "/"):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            most, used = (
                int(Path(folder, f"pids.{name}").read_text()) for name in ("max", "current")
            )
            limits.append(f"its control group allows {most} tasks and has {used}")
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        limits.append(f"the user may have {soft} (`ulimit -u`)")
    return (
        f"this process has {len(os.listdir('/proc/self/task'))}, "
        + "".join(f"{limit}, " for limit in limits)
        + f"and lmchat needs {TASKS} besides those of `threads` ({physical_cores()} by default "
        "here): raise the limit on tasks (docker's --pids-limit, podPidsLimit, TasksMax of a "
        "unit, `ulimit -u`) or lower `threads`"
    )
