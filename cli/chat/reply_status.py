"""The lines about a reply: how far its prompt is, and what it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..terminal.texts import duration, latency

if TYPE_CHECKING:
    from lmchat.generation.generation import Reply

CONTINUE = "/continue goes on"
FORK = "/fork continues in a copy"
ROOM = "/undo or /new makes room"


def usage_parts(reply: Reply, length: int, max_context: int) -> list[str]:
    """New and cached tokens (of them those that came from disk), time to the first token, tokens
    per second, context in use.

    `length` is the session's, in tokens.
    """
    usage, timings = reply.usage, reply.timings
    cached = f"{usage.cached_tokens:,} cached"
    if usage.loaded_tokens:
        cached += f" ({usage.loaded_tokens:,} from disk)"
    parts = [f"{usage.prompt_tokens - usage.cached_tokens:,} new + {cached}"]
    if timings.ttft:
        parts.append(f"TTFT {latency(timings.ttft)}")
    if timings.tpot:
        rate = 1 / timings.tpot
        parts.append(f"{rate:,.{1 if rate < 100 else 0}f} tok/s")
    return [*parts, context_use(length, max_context)]


def usage_line(reply: Reply, length: int, max_context: int) -> str:
    """`usage_parts` as one line."""
    return " · ".join(usage_parts(reply, length, max_context))


def context_use(length: int, max_context: int) -> str:
    """How full the context is."""
    share = 100 * length / max_context
    percent = "<1" if 0 < share < 1 else f"{share:.0f}"
    return f"context {length:,} / {max_context:,} ({percent}%)"


def ending(reply: Reply, length: int, max_context: int) -> str | None:
    """Why the reply ended, when it was not by itself."""
    if reply.finish_reason == "cancelled":
        where = "" if reply.token_ids else " before its first token"
        return f"stopped{where}; {CONTINUE}"
    if reply.finish_reason == "length":
        if length >= max_context:
            return f"the context of {max_context:,} tokens is full; {ROOM}"
        return f"cut at max_new_tokens; {CONTINUE}"
    return None


def progress_line(done: int, total: int, seconds_left: float | None, width: int) -> str:
    """A bar with what is left of reading the prompt, as wide as fits."""
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
    """`width` columns, filled from the left."""
    full = int(share * width)
    return "━" * full + "╌" * (width - full)
