"""One error for too many open files, wherever the limit is met."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from turbomind.errors import InternalError

_MESSAGE = "too many files are open"
_SHORTAGE = (errno.EMFILE, errno.ENFILE)
_WANTED = 4096  # enough for any number of sessions and segment files


@contextlib.contextmanager
def explain_open_file_limit(what: str) -> Iterator[None]:
    """Turns any error of the block that lacks file descriptors into an InternalError.

    The message names `what` cannot be opened, the limit, and how to raise it. Also a decorator.
    """
    try:
        yield
    except Exception as error:
        if _MESSAGE in str(error) or not _is_shortage(error):
            raise
        raise InternalError(f"{_MESSAGE}: {what} cannot be opened, {_limit()}") from error


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


def _is_shortage(error: BaseException | None) -> bool:
    """Returns whether an error or one of its causes is the system's lack of descriptors."""
    seen: set[int] = set()  # an error that is raised twice may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _SHORTAGE:
            return True
        if any(os.strerror(number) in str(error) for number in _SHORTAGE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _limit() -> str:
    import resource  # only for the message

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, soft) or soft < _WANTED:
        most = "" if hard == resource.RLIM_INFINITY else f", up to {hard}"
        return (
            f"the limit of this process is {soft}; `ulimit -n {_WANTED}` in the shell that starts "
            f"it raises that{most}"
        )
    return f"the limit of this process is {soft}, or all of the system's are in use"
