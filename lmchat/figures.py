"""The figures of a reply as text: tokens, times, and the use of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmchat.generation.reply import Reply
    from lmchat.store.turns import Turn


def usage_parts(reply: Reply | Turn, length: int, max_context: int) -> list[str]:
    """Returns the facts about a reply: new and cached tokens, TTFT, tokens per second, context.

    Args:
        reply: the reply.
        length: length of the session, in tokens.
        max_context: size of the model's context, in tokens.
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


def context_use(length: int, max_context: int) -> str:
    """Returns the use of the context, such as `context 25 / 4,096 (1%)`."""
    share = 100 * length / max_context
    percent = "<1" if 0 < share < 1 else f"{share:.0f}"
    return f"context {length:,} / {max_context:,} ({percent}%)"


def latency(seconds: float) -> str:
    """Returns a time to first token: milliseconds below a second, seconds above."""
    milliseconds = round(1000 * seconds)
    if milliseconds >= 1000:
        return f"{seconds:.2f} s"
    return f"{milliseconds} ms" if milliseconds else "<1 ms"


def duration(seconds: float) -> str:
    """Returns a duration in at most two units, such as `2 min 5 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
