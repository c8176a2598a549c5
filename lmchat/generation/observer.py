"""What a server learns of all generations of an engine, to count them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from lmchat.errors import Error
from lmchat.generation.reply import Reply


class Observer(Protocol):
    """Is called on the reader threads, so no method may wait or do more than count."""

    def tokens(self, seconds: float) -> None:
        """Tokens of a choice arrived, `seconds` after the ones before them."""

    def ended(self, reply: Reply, known_tokens: int | None, has_moved: bool) -> None:
        """A generation has ended.

        Args:
            reply: the reply.
            known_tokens: tokens of the prompt that its session had before the turn; None: it is of
                no session.
            has_moved: whether another process had the session's lease before.
        """

    def failed(self, error: Error) -> None:
        """A generation has failed before its first token, or was refused while it waited. One that
        was refused before is reported to its caller alone."""


def report(observers: Sequence[Observer], call: Callable[[Observer], object]) -> None:
    """Calls the observers. An error of one is logged and harms no generation."""
    for observer in observers:
        try:
            call(observer)
        except Exception:
            logging.getLogger(__name__).exception("an observer failed")
