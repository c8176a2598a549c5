"""Makes a turn of the journal that a dead process left."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmchat.generation import settings as settings_module
from lmchat.generation.generation import Outcome
from lmchat.sessions.appended import Said, said_in
from lmchat.sessions.planner import Plan
from lmchat.sessions.reply_turn import parser_of, reply_turn, resumed_ids
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import JournalEntry, SessionRecord, TurnStart
from lmchat.store.turns import Timings, Turn, Usage

INTERRUPTED = "interrupted"
"""The finish reason of a reply whose process died in the middle of it."""


@dataclass(frozen=True)
class Recovered:
    """The result of a recovery.

    New or longer turns, the new leaf, a question without any token of a reply, and a notice about
    damage. All fields are empty when the journal yields nothing.
    """

    turns: tuple[Turn, ...] = ()
    leaf: int | None = None
    unanswered: Said = field(default_factory=Said)
    notice: str = ""


def recovered(runtime: Runtime, record: SessionRecord, entry: JournalEntry) -> Recovered:
    """Recovers as much of a journal as can be read.

    The tokens go through the parser that the live reply went through, so a stop string cuts them
    at the same place. A complete reply gets its own finish reason; another is "interrupted", and
    `continue_()` extends it as if it had never stopped.
    """
    start, ids = entry.start, list(entry.token_ids)
    if start is not None and start.is_stored(record.tree):
        return Recovered()
    if start is None or not has_base(record, start):
        reason = entry.damage or "it continues a turn that is not there"
        return Recovered(notice=f"an unfinished reply was damaged and is dropped: {reason}")
    if not ids:
        lost = f"an unfinished reply was damaged and is dropped: {entry.damage}"
        asked = said_in(start.user) if start.user and start.keeps_question else Said()
        return Recovered(unanswered=asked, notice=lost if entry.damage else "")
    plan = planned(record, start)
    parser = parser_of(runtime, record, plan)
    parser.push(ids)
    parser.finish()
    reason, stopped = _end(runtime, plan, ids)
    if parser.stopped:
        reason, stopped = "stop", False
        del ids[max(0, parser.stored_tokens - len(resumed_ids(plan))) :]
    usage = Usage(
        prompt_tokens=plan.length,
        completion_tokens=len(ids),
        reasoning_tokens=parser.reasoning_tokens,
    )
    outcome = Outcome(ids, reason, stopped, None, usage, Timings())
    reply = reply_turn(runtime, plan, parser, outcome, start.reply_id)
    turns = (*plan.past, reply) if plan.user is None else (*plan.past, plan.user, reply)
    cut = entry.damage if reason == INTERRUPTED else ""
    return Recovered(turns, reply.id, notice=_cut(ids, cut))


def _cut(ids: list[int], damage: str) -> str:
    if not damage:
        return ""
    return (
        f"the last reply was damaged after its first {len(ids)} tokens and ends there; it can be "
        f"continued: {damage}"
    )


def has_base(record: SessionRecord, start: TurnStart) -> bool:
    """Returns whether the turns that it follows exist, in the session or in its rebuilt past."""
    made = {turn.id: turn for turn in start.past}

    def length(turn: int | None) -> int:
        if turn is None:
            return 0
        found = made.get(turn) or (record.tree.get(turn) if turn in record.tree else None)
        return -1 if found is None else found.length

    return start.prefix_length <= length(start.parent) and length(start.extends) >= 0


def planned(record: SessionRecord, start: TurnStart) -> Plan:
    """Returns the plan that a turn started from."""
    made = {turn.id: turn for turn in start.past}
    extends = start.extends
    return Plan(
        parent=start.parent,
        prefix_length=start.prefix_length,
        suffix=start.user.token_ids if start.user else (),
        effective=settings_module.effective(start.settings),
        user=start.user,
        extends=None if extends is None else made.get(extends) or record.tree.get(extends),
        past=start.past,
        metadata=start.metadata,
    )


def _end(runtime: Runtime, plan: Plan, ids: list[int]) -> tuple[str, bool]:
    """Returns the finish reason and whether the last token is a stop token, as the engine would."""
    params = plan.effective.params
    stops = set(params.get("stop_token_ids") or ())
    if not params.get("ignore_eos"):
        stops |= set(params.get("eos_token_ids") or runtime.core.eos_token_ids)
    if ids[-1] in stops:
        return "stop", True
    most = params.get("max_new_tokens")
    if most is not None and len(ids) >= most:
        return "length", False
    if plan.length + len(ids) >= runtime.core.max_context:
        return "length", False
    return INTERRUPTED, False
