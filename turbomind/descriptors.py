"""Too many open files: one error for it, wherever it happens."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from turbomind.errors import InternalError

_SAID = "too many files are open"
_SHORTAGE = (errno.EMFILE, errno.ENFILE)
_WANTED = 4096  # enough for any number of sessions and segment files


@contextlib.contextmanager
def telling_of_descriptors(what: str) -> Iterator[None]:
    """What fails in the block for want of file descriptors raises InternalError, whatever it was
    before: it says that `what` cannot be opened, what the limit is, and how to raise it. Also a
    decorator."""
    try:
        yield
    except Exception as error:
        if _SAID in str(error) or not _is_shortage(error):
            raise
        raise InternalError(f"{_SAID}: {what} cannot be opened, {_limit()}") from error


def is_exhausted(wanted: int) -> bool:
    """Whether this process cannot open so many files now."""
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


def _is_shortage(error: BaseException | None) -> bool:
    """Whether it, or an error it came from, is the system's, or the core's in its words."""
    seen: set[int] = set()  # an error that is raised twice may come from itself
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _SHORTAGE:
            return True
        if any(os.strerror(number) in str(error) for number in _SHORTAGE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _limit() -> str:
    try:
        import resource
    except ImportError:  # no limits of processes on this system
        return "expected fewer to be open"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, soft) or soft < _WANTED:
        most = "" if hard == resource.RLIM_INFINITY else f", up to {hard}"
        return (
            f"the limit of this process is {soft}; `ulimit -n {_WANTED}` in the shell that starts "
            f"it raises that{most}"
        )
    return f"the limit of this process is {soft}, or all of the system's are in use"
