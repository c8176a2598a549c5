"""Starts the generation of a verb: plans it, and plans again when the session has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from lmchat.errors import SessionBusy
from lmchat.generation.generation import Generation
from lmchat.generation.reply_stream import Reading
from lmchat.generation.room import within
from lmchat.sessions.appended import Place, appended
from lmchat.sessions.branches import reply_turn
from lmchat.sessions.context import SessionContext
from lmchat.sessions.overflow import fits, linked, shortened
from lmchat.sessions.planner import Plan, Planner
from lmchat.sessions.rewrite import rebuilt, rounds_of, system_of, with_turns
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.turn_execution import TurnExecution
from lmchat.store.protocol import Stale
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn

REPLANS = 3  # attempts to plan a verb while other processes change the session

MakePlan = Callable[[Planner], Plan]


class GenerationStarter:
    """Starts the generations of one session.

    Args:
        context: the session.
        reading: the session's calls that read what they start.
        begun: called when a generation has begun, before it is planned.
    """

    def __init__(
        self,
        context: SessionContext,
        reading: Reading,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._context, self._reading = context, reading
        self._begun = begun

    def new_execution(self) -> TurnExecution:
        """Returns an execution that has not begun."""
        return TurnExecution(self._context)

    def start(self, make_plan: MakePlan, place: Place | None = None) -> Generation:
        """Generates without waiting."""
        self._context.activity.settle()
        execution = self.new_execution()
        generation = execution.generation
        self._reading.begins(functools.partial(self._stop, generation))
        try:
            self._context.activity.begin(generation)
            self._begun()
            self._enter(execution, make_plan, place or Place())
        except BaseException as error:
            if self._context.activity.generation is generation:
                generation.observers = ()  # it is refused: nothing has begun that could fail
                generation.abort(error)
            raise
        return generation

    def _stop(self, generation: Generation, interrupt: KeyboardInterrupt) -> None:
        if self._context.activity.generation is generation:
            generation.abort(interrupt)

    def _enter(self, execution: TurnExecution, make_plan: MakePlan, place: Place) -> None:
        context = self._context
        for _ in range(REPLANS):
            seen = context.writer.seen
            try:
                if place.check is not None:
                    place.check(context.record.tree)
                plan = planned(context.runtime, context.record, make_plan, place)
                execution.enter(plan, seen)
                return
            except Stale:  # another process was faster, or died: plan after its turns
                context.runtime.worker.call(context.writer.follow)
        raise overtaken(context.record)


def planned(
    runtime: Runtime, record: SessionRecord, make_plan: MakePlan, place: Place | None = None
) -> Plan:
    """Returns the plan of a verb, rebuilt if the tokenizer has changed or the context is full.

    The record does not change.
    """
    place, context = place or Place(), runtime.core.max_context
    for text in place.texts:  # one by one: the oldest may be dropped
        runtime.check_fits(text)
    before = record
    plan, record = placed(runtime, record, make_plan, place)
    if (place.overflow or record.overflow) == "drop" and not fits(plan, context):
        stored = before.tree.path(before.leaf if place.after is None else place.after)
        plan = linked(shortened(runtime, record, plan), stored)
    what = "the turn alone" if plan.dropped else "the conversation"
    return replace(plan, effective=within(plan.effective, plan.length, context, what))


def placed(
    runtime: Runtime, record: SessionRecord, make_plan: MakePlan, place: Place
) -> tuple[Plan, SessionRecord]:
    """Returns the plan of a verb at a place, and the session with the turns that it starts from."""
    past, at, notices = starting(runtime, record, place)
    plan = make_plan(Planner(runtime, at))
    plan = replace(
        plan,
        keeps_question=place.keeps_question,
        metadata=place.metadata,
        request=place.request,
    )
    return replace(plan, past=tuple(past), notices=notices), at


def starting(
    runtime: Runtime, record: SessionRecord, place: Place
) -> tuple[list[Turn], SessionRecord, tuple[str, ...]]:
    """Returns the new turns that precede a message at a place, the session with them, and notices
    for the user."""
    if place.after is not None:
        record = replace(record, leaf=reply_turn(record, place.after).id)
    path = record.tree.path(record.leaf)
    reads, system = runtime.identity.reads(path, record), system_of(path)
    wanted = system if place.system is None else place.system or None
    notices = runtime.identity.notices(record, reencoded=not reads)
    made: list[Turn] = []
    if not reads or wanted != system:
        made = rebuilt(runtime, record, wanted, rounds_of(path), encode=not reads)
        record = with_turns(record, made)
    if not reads:
        notices = (
            "the model has another tokenizer: the conversation was encoded again from its text, "
            "without earlier reasoning, as a branch beside the old one",
            *notices,
        )
    if place.rounds:
        added = appended(runtime, record, place.rounds)
        made, record = [*made, *added], with_turns(record, added)
    return made, record, notices


def overtaken(record: SessionRecord) -> SessionBusy:
    """Returns the error for a session that other processes keep changing."""
    return SessionBusy(
        f"session {record.name!r} is being changed by another process, which was faster "
        f"{REPLANS} times: nothing was done; try again"
    )
