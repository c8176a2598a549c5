"""A conversation that no longer fits the context: refuse, or drop its oldest turns.

Dropping keeps the system prompt and cuts at turn borders, down to half the context, so that it is
rare: what stays is computed again. It is a rewrite: the shorter conversation is a new branch, and
the old one stays in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmchat.errors import ContextFull, InvalidRequest
from lmchat.planner import Plan, Planner
from lmchat.rewrite import Round, rounds_of, told_again
from lmchat.runtime import Runtime
from lmchat.store import SessionRecord
from lmchat.turns import Turn

OVERFLOWS = ("refuse", "drop")
"""What a session does with a turn that does not fit: raise ContextFull, or forget its oldest."""

_ROOM = 64  # tokens a reply without a limit of its own should have


@dataclass(frozen=True)
class Shortened:
    """A plan on a shorter past, the turns of that past, which are not in the tree yet, and what to
    tell the user."""

    plan: Plan
    turns: list[Turn]
    notice: str


def check_overflow(overflow: object) -> str:
    """`overflow`, when it is one of the policies; else InvalidRequest."""
    if overflow not in OVERFLOWS:
        raise InvalidRequest(f"overflow is {overflow!r}, expected 'refuse' or 'drop'")
    return str(overflow)


def fits(plan: Plan, context: int) -> bool:
    """Whether the prompt leaves room for the reply that was asked for."""
    return plan.length + _wanted(plan) <= context


def refuse(plan: Plan, context: int) -> None:
    """ContextFull where the prompt alone fills the context; the engine refuses the rest."""
    if plan.length >= context:
        raise ContextFull(
            f"the conversation would be {plan.length} tokens long, expected less than {context}, "
            "the context"
        )


def shortened(runtime: Runtime, record: SessionRecord, plan: Plan) -> Shortened:
    """The same turn behind as much of the past as half the context holds. ContextFull when the
    turn alone does not fit."""
    context = runtime.core.max_context
    path = record.tree.path(plan.extends.id if plan.extends else plan.parent)
    system = path[0].text if path and path[0].role == "system" else None
    rounds = rounds_of(path)
    last = rounds[-1:] if plan.user is None else []  # continued or asked again: stays in any case
    past = rounds[: len(rounds) - len(last)]
    first = 1 + _first_that_fits(past, path[-1].length if path else 0, context // 2)
    while first <= len(past):
        made = told_again(runtime, record, system, [*past[first:], *last])
        found = _replanned(runtime, record, plan, made)
        if fits(found, context) and (found.length <= context // 2 or first == len(past)):
            return Shortened(found, made, _notice(first, path, made))
        first += 1
    refuse(plan, context)
    raise ContextFull(
        f"the turn alone needs {_wanted(plan)} tokens behind its prompt, expected fewer: the "
        f"context has {context}"
    )


def _wanted(plan: Plan) -> int:
    most = plan.effective.params.get("max_new_tokens")
    return _ROOM if most is None else int(most)


def _first_that_fits(rounds: Sequence[Round], total: int, room: int) -> int:
    """About where to cut: rounds before it are not worth trying to keep. At least 0."""
    for at, turn in enumerate(rounds):
        if total - turn.user.keep <= room:
            return max(0, at - 1)
    return max(0, len(rounds) - 1)


def _replanned(runtime: Runtime, record: SessionRecord, plan: Plan, made: list[Turn]) -> Plan:
    scratch = replace(record, tree=record.tree.copy())
    for turn in made:
        scratch.tree.adopt(turn)
    leaf = made[-1] if made else None
    if plan.user is not None:
        parent = leaf.id if leaf else None
        user = Planner(runtime, scratch).user_under(parent, plan.user.text)[0]
        return replace(
            plan, parent=user.parent, keep=user.keep, suffix=user.token_ids, user=user, rewritten=0
        )
    assert leaf is not None
    if plan.extends is not None:
        keep = leaf.length - leaf.stopped
        return replace(plan, parent=leaf.id, keep=keep, extends=leaf, rewritten=0)
    return replace(plan, parent=leaf.id, keep=leaf.length, rewritten=0)


def _notice(dropped: int, path: Sequence[Turn], made: Sequence[Turn]) -> str:
    before = path[-1].length if path else 0
    after = made[-1].length if made else 0
    turns = "1 turn was" if dropped == 1 else f"{dropped} turns were"
    return (
        f"the context is full: the oldest {turns} dropped ({before - after} tokens); the {after} "
        "tokens that stay are computed again"
    )
