"""Status lines of a reply: progress of the prefill, and why it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmchat.figures import duration, usage_parts

if TYPE_CHECKING:
    from lmchat.generation.generation import Reply

CONTINUE = "/continue goes on"
FORK = "/fork continues in a copy"
ROOM = "/undo or /new makes room"
DROPS = "with the next question the oldest rounds drop out of the prompt"


def usage_line(reply: Reply, length: int, max_context: int) -> str:
    """Returns `usage_parts` as one line."""
    return " · ".join(usage_parts(reply, length, max_context))


def is_withdrawn(reply: Reply) -> bool:
    """Returns whether a reply was stopped before its first token; the session is as it was."""
    return reply.finish_reason == "cancelled" and not reply.token_ids


def ending(reply: Reply, length: int, max_context: int, overflow: str) -> str | None:
    """Returns why a reply was cut, and the command that extends it; None for a complete reply.

    Args:
        reply: The reply.
        length: Length of the session, in tokens.
        max_context: Size of the model's context, in tokens.
        overflow: The session's rule for a full context.
    """
    if is_withdrawn(reply):
        return "stopped before its first token"
    if reply.finish_reason == "cancelled":
        return f"stopped; {CONTINUE}"
    if reply.finish_reason == "length":
        if length >= max_context:
            remedy = DROPS if overflow == "drop" else ROOM
            return f"the context of {max_context:,} tokens is full; {remedy}"
        return f"cut at max_new_tokens; {CONTINUE}"
    return None


def progress_line(done: int, total: int, seconds_left: float | None, width: int) -> str:
    """Returns a progress bar of the prefill that fits `width` columns.

    Args:
        done: Tokens of the prompt that are computed.
        total: Tokens of the prompt.
        seconds_left: Predicted time of the rest; None if unknown.
        width: Columns of the terminal.
    """
    share = done / total if total else 0.0
    text = f"{100 * share:.0f}%"
    if seconds_left is not None:
        text += f" · {duration(seconds_left)} left"
    head = f"reading {done:,} of {total:,} tokens"
    if len(head) + len(text) + 16 <= width:
        text = f"{head} {bar(share, min(24, width - len(head) - len(text) - 4))} {text}"
    elif len(text) + 8 <= width:
        text = f"{bar(share, min(24, width - len(text) - 2))} {text}"
    return text[: max(1, width - 1)]


def bar(share: float, width: int) -> str:
    """Returns a bar of `width` columns, filled from the left."""
    full = int(share * width)
    return "━" * full + "╌" * (width - full)
