"""Runs conversations: the user's messages are given, the replies are the model's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmchat import ChatEngine, Reply
from lmchat.errors import ContextFull

AT_ONCE = 32
"""Conversations that run side by side."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def side_by_side(function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Applies `function` to every item, several at a time. Returns the results in order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, items))


def talks(
    engine: ChatEngine, conversations: Sequence[Sequence[str]], **settings: Any
) -> list[list[Reply]]:
    """Returns the replies to the messages of each conversation, sent in order to its session.

    A conversation that exceeds the context has fewer replies than messages.
    """
    return side_by_side(functools.partial(_talk, engine, settings), conversations)


def _talk(engine: ChatEngine, settings: dict[str, Any], users: Sequence[str]) -> list[Reply]:
    session = engine.session(settings=settings)
    replies: list[Reply] = []
    try:
        for text in users:
            replies.append(session.send(text))
            if replies[-1].error is not None:
                raise replies[-1].error
    except ContextFull:
        pass
    finally:
        session.delete()
    return replies
