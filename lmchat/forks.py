"""Engines and sessions in a forked child, which has none of the threads that they need.

A call there would wait for a thread that does not exist, or for a lock that its owner held at the
fork. So each inherited object becomes one of a class that refuses every use. An engine that is made
in the child works.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, NoReturn

from lmchat.errors import EngineClosed

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(one: object) -> None:
    """Makes an object refuse every use in children that are forked from now on."""
    _watched.add(one)


def _refuse(*_args: object, **_named: object) -> NoReturn:
    raise EngineClosed(
        "the process was forked: its parent has the engine, expected one that is opened in this "
        "process"
    )


def _attribute(self: Any, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        return object.__getattribute__(self, name)
    return _refuse()


def _nothing(*_args: object) -> None:
    """Leaves a block, or drops the object: the parent does what is to be done."""


def _repr(self: Any) -> str:
    return f"<{type(self).__name__} of the parent of this process>"


async def _leave(*_args: object) -> None:
    """The same of an asynchronous block."""


_METHODS = {
    "__slots__": (),
    "__getattribute__": _attribute,
    "__repr__": _repr,
    "__exit__": _nothing,
    "__aexit__": _leave,
    "__del__": _nothing,
    **dict.fromkeys(("__enter__", "__iter__", "__next__", "__aenter__", "__anext__"), _refuse),
}


@functools.cache
def _inherited(kind: type) -> type:
    """Returns the class of the inherited objects of a class."""
    return type(kind.__name__, (kind,), {**_METHODS, "__module__": kind.__module__})


def _after_fork() -> None:
    for one in list(_watched):
        one.__class__ = _inherited(one.__class__)
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)
