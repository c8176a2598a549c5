"""Conversations that exceed the context: refuses a turn, or drops the oldest ones.

Dropping leaves the system prompt and removes whole turns until at most half the context is used.
That makes it rare, because the remaining turns are computed again. The cut depends only on earlier
turns, unless the new turn needs more than the other half. It is a rewrite: the shorter conversation
is a new branch, and the old one stays in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmchat.sessions.planner import Dropped, Plan, Planner
from lmchat.sessions.rewrite import Round, rebuilt, rounds_of, system_of
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn, Usage, transcript
from turbomind.params import wrong

OVERFLOWS = ("refuse", "drop")
"""Policies for a turn that does not fit: raise ContextFull, or drop the oldest turns."""

_ROOM = 64  # tokens reserved for a reply without a limit of its own


def check_overflow(overflow: object) -> str:
    """Returns `overflow`.

    Raises:
        InvalidRequest: it is none of the policies.
    """
    if overflow not in OVERFLOWS:
        raise wrong("overflow", overflow, "'refuse' or 'drop'")
    return str(overflow)


def fits(plan: Plan, context: int) -> bool:
    """Returns whether the context has room for the prompt and the requested reply."""
    return plan.length + _wanted(plan) <= context


def shortened(runtime: Runtime, record: SessionRecord, plan: Plan) -> Plan:
    """Plans the same turn after as many earlier turns as half the context holds, or fewer where it
    needs more room.

    A default limit that the turn alone has no room for counts as half the context at most:
    otherwise nothing of the conversation would ever stay.

    Returns:
        The plan. It may need more room than there is, if no earlier turn is left to drop.
    """
    context, wanted = runtime.core.max_context, _wanted(plan)
    path = record.tree.path(plan.extends.id if plan.extends else plan.parent)
    last = 1 if plan.user is None else 0  # a continued or repeated turn always stays
    if not plan.effective.limit_given and wanted > context // 2:
        alone = _shorter(runtime, record, plan, path, max(1, len(rounds_of(path)) - last), last)
        if (alone or plan).length + wanted > context:
            wanted = context // 2
    first, found = 1, plan
    while found.length + wanted > context:
        shorter = _shorter(runtime, record, plan, path, first, last)
        if shorter is None:
            break
        found, first = shorter, (shorter.dropped.turns if shorter.dropped else 0) + 1
    return found


def _shorter(
    runtime: Runtime,
    record: SessionRecord,
    plan: Plan,
    path: Sequence[Turn],
    first: int,
    last: int,
) -> Plan | None:
    """Returns the plan after the cut that `shorter_past()` finds; None: there is none."""
    cut = shorter_past(runtime, record, path, first, last)
    if cut is None:
        return None
    dropped, made = cut
    before, after = path[-1].length, made[-1].length if made else 0
    found = _replanned(runtime, record, plan, made)
    return replace(found, past=tuple(made), dropped=Dropped(dropped, before - after, after))


def linked(plan: Plan, stored: Sequence[Turn]) -> Plan:
    """Returns a plan whose first question names the turn that was dropped before it.

    So readers continue to see what the prompt no longer has.

    Args:
        plan: a plan.
        stored: the stored conversation that it started from. Turns that were made for the plan
            alone are not stored where they are dropped at once.
    """
    rounds = rounds_of(stored)
    if plan.dropped is None or not rounds:
        return plan
    last = rounds[min(plan.dropped.turns, len(rounds)) - 1]
    link = (last.reply or last.user).id
    at = next((i for i, turn in enumerate(plan.past) if turn.role == "user"), None)
    if at is not None:
        first = replace(plan.past[at], dropped_before=link)
        return replace(plan, past=(*plan.past[:at], first, *plan.past[at + 1 :]))
    assert plan.user is not None  # a continued or repeated turn stays
    return replace(plan, user=replace(plan.user, dropped_before=link))


def is_near(plan: Plan, length: int, context: int) -> bool:
    """Returns whether a next turn like the planned one, after `length` tokens, may not fit."""
    wanted = _wanted(plan)
    if not plan.effective.limit_given:
        wanted = min(wanted, context // 2)
    return length + max(wanted, context // 10) > context


def next_prompt(runtime: Runtime, record: SessionRecord) -> list[int]:
    """Returns the transcript that remains once the conversation does not fit; may be empty."""
    cut = shorter_past(runtime, record, record.tree.path(record.leaf))
    return transcript(cut[1]) if cut else []


def shorter_past(
    runtime: Runtime, record: SessionRecord, path: Sequence[Turn], first: int = 1, last: int = 0
) -> tuple[int, list[Turn]] | None:
    """Finds the rounds to drop from the start of a conversation.

    Args:
        runtime: the engine's runtime.
        record: the session.
        path: the turns of the conversation.
        first: fewest rounds to drop.
        last: fewest rounds that stay.

    Returns:
        The number of dropped rounds, and new turns for the others, at most half the context or
        `last` rounds long. None if there are too few rounds.
    """
    half, rounds = runtime.core.max_context // 2, rounds_of(path)
    most = len(rounds) - last
    if first > most:
        return None
    first = max(first, _first_that_fits(rounds, path[-1].length, half))
    while True:
        made = rebuilt(runtime, record, system_of(path), rounds[first:])
        if first >= most or made[-1].length <= half:
            return first, made
        first += 1


def notice(dropped: Dropped, usage: Usage) -> str:
    """Returns the notice for the user about a turn with this usage."""
    turns = "turn was" if dropped.turns == 1 else f"{dropped.turns} turns were"
    again = max(0, dropped.remaining - usage.cached_tokens)
    cost = f"; of the {dropped.remaining:,} tokens that stay {again:,} were computed again"
    return (
        f"the context is full: the oldest {turns} dropped ({dropped.tokens:,} tokens)"
        f"{cost if dropped.remaining else ', nothing stays'}"
    )


def _wanted(plan: Plan) -> int:
    most = plan.effective.stored.get("max_new_tokens")  # not as it was cut for this turn
    return _ROOM if most is None else int(most)


def _first_that_fits(rounds: Sequence[Round], total: int, room: int) -> int:
    """Returns an estimate of the fewest rounds to drop, assuming that lengths do not change."""
    remaining = (total - turn.user.prefix_length for turn in rounds)
    return next((at for at, length in enumerate(remaining) if length <= room), len(rounds) - 1)


def _replanned(runtime: Runtime, record: SessionRecord, plan: Plan, made: Sequence[Turn]) -> Plan:
    leaf = made[-1] if made else None
    if plan.user is not None:
        planner = Planner(runtime, record)
        user = planner.user_after(made, plan.user.text, plan.variables)[0]
        user = replace(user, metadata=plan.user.metadata)
        return replace(
            plan,
            parent=user.parent,
            prefix_length=user.prefix_length,
            suffix=user.token_ids,
            user=user,
            rewritten=0,
        )
    assert leaf is not None
    if plan.extends is not None:
        prefix_length = leaf.length - leaf.stopped
        return replace(plan, parent=leaf.id, prefix_length=prefix_length, extends=leaf, rewritten=0)
    return replace(plan, parent=leaf.id, prefix_length=leaf.length, rewritten=0)
