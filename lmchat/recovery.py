"""The reply that a process which died left in the journal, as the turn it would have been."""

from __future__ import annotations

from lmchat import settings as settings_module
from lmchat.generated import parser_of, reply_turn, resumed_ids
from lmchat.generation import Outcome
from lmchat.planner import Plan
from lmchat.runtime import Runtime
from lmchat.store import JournalEntry, SessionRecord, TurnStart
from lmchat.turns import Timings, Turn, Usage

INTERRUPTED = "interrupted"
"""The finish reason of a reply whose process died in the middle of it."""


def recovered(
    runtime: Runtime, record: SessionRecord, entry: JournalEntry
) -> tuple[list[Turn], int | None]:
    """The turns that the journal holds and the leaf they make; no turns when no token had come.

    The tokens go through the parser that the live reply went through, so a stop string cuts them
    at the same place. A reply that was whole ends as it would have; another is "interrupted", and
    `continue_()` goes on as if it had never stopped.
    """
    ids = list(entry.token_ids)
    if not ids or _is_kept(record, entry.start):
        return [], record.leaf
    plan = planned(record, entry.start)
    parser = parser_of(runtime, record, plan)
    parser.push(ids)
    parser.finish()
    reason, stopped = _end(runtime, plan, ids)
    if parser.stopped:
        reason, stopped = "stop", False
        del ids[max(0, parser.kept - len(resumed_ids(plan))) :]
    usage = Usage(
        prompt_tokens=plan.length,
        completion_tokens=len(ids),
        reasoning_tokens=parser.reasoning_tokens,
    )
    outcome = Outcome(ids, reason, stopped, None, usage, Timings())
    reply = reply_turn(runtime, plan, parser, outcome, entry.start.reply_id)
    turns = [reply] if plan.user is None else [plan.user, reply]
    return turns, reply.id


def _is_kept(record: SessionRecord, start: TurnStart) -> bool:
    """Whether the turn was kept and only its journal was not emptied."""
    if start.reply_id not in record.tree:
        return False
    reply = record.tree.get(start.reply_id)
    return start.extends != start.reply_id or reply.length - reply.stopped != start.keep


def planned(record: SessionRecord, start: TurnStart) -> Plan:
    """The plan that a turn started from."""
    return Plan(
        parent=start.parent,
        keep=start.keep,
        suffix=start.user.token_ids if start.user else (),
        effective=settings_module.effective(start.settings),
        user=start.user,
        extends=None if start.extends is None else record.tree.get(start.extends),
    )


def _end(runtime: Runtime, plan: Plan, ids: list[int]) -> tuple[str, bool]:
    """(why the reply ended, whether its last token is a stop token), by the engine's rules."""
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
