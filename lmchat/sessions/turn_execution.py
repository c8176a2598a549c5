"""Executes one turn: from a planned prompt through queue and engine to a committed reply."""

from __future__ import annotations

import functools
from dataclasses import replace

from lmchat.errors import InternalError, Overloaded
from lmchat.generation.generation import Generation, Outcome, Reply
from lmchat.generation.ticket import Ticket
from lmchat.kv.handle_cache import CachedHandle
from lmchat.sessions import overflow
from lmchat.sessions.appended import said_in
from lmchat.sessions.context import SessionContext
from lmchat.sessions.planner import Plan
from lmchat.sessions.reply_turn import (
    parser_of,
    reply_id,
    reply_turn,
    resumed_ids,
    resumed_parts,
    tell_preceding,
)
from lmchat.sessions.rewrite import with_turns
from lmchat.store.records import SessionRecord, TurnStart, now
from lmchat.store.turns import TurnTree, Usage
from lmchat.text.replies.reply_parser import ReplyParser

LIVE_TOKENS = (
    512  # a turn of a live session with at most this many tokens to compute has precedence
)


class TurnExecution:
    """One generation of one session. The session is free for the next one when it ends."""

    def __init__(self, context: SessionContext) -> None:
        self.generation = Generation(
            context.runtime.session_reader.later,
            self._commit,
            context.activity.moved,
            self._withdraw,
            self._reopen,
            context.runtime.worker.later,
        )
        self.generation.observers = context.runtime.observers
        self._context = context
        self._runtime = context.runtime
        self._lock = context.lock
        self._plan: Plan | None = None
        self._rewritten: TurnTree | None = None
        self._parser: ReplyParser | None = None
        self._ticket: Ticket | None = None
        self._held: CachedHandle | None = None
        self._reopened = 0
        self._reply_id = 0

    def enter(self, plan: Plan, seen: int) -> None:
        """Reserves a place, persists the start of the turn, then queues the request or posts it at
        once. Nothing is written if there is no place.

        Raises:
            Overloaded, SessionBusy, StoreError.
            Stale: the session has changed; plan again.
        """
        self._plan = plan
        # A rebuilt conversation has a tree of its own until it is persisted with its reply.
        self._rewritten = with_turns(self._record, plan.past).tree if plan.past else None
        self._parser = parser_of(self._runtime, self._record, plan)
        self.generation.known_tokens = plan.prefix_length
        self.generation.prepare(
            self._parser,
            len(resumed_ids(plan)),
            plan.rewritten,
            before=resumed_parts(self._runtime, self._record, plan, self._parser),
        )
        self._ticket = self._new_ticket(plan)
        self._runtime.admission.reserve(self._ticket)
        try:
            self._runtime.worker.call(functools.partial(self._enter, seen))
        except BaseException:
            self._runtime.admission.release(self._ticket)
            raise

    def _new_ticket(self, plan: Plan) -> Ticket:
        with self._lock:
            tree = self._tree
            held = self._context.handles.live_tokens(tree, plan.parent, plan.prefix_length)
        cost = max(1, plan.length - held)
        ticket = Ticket(
            self._record.owner,
            live=held > 0 and cost <= LIVE_TOKENS,
            cost=cost,
            start=functools.partial(self._runtime.session_reader.later, self._post),
            refused=self._refused,
            reprioritize=self.generation.set_priority,
            limit=plan.effective.params.get("max_new_tokens"),
        )
        self.generation.charge = functools.partial(self._runtime.admission.charge, ticket)
        return ticket

    def _refused(self, error: Overloaded) -> None:
        """Ends the queued request, whose place another owner has taken."""
        self._runtime.session_reader.later(functools.partial(self.generation.fail, error))

    @property
    def _record(self) -> SessionRecord:
        return self._context.record

    @property
    def _tree(self) -> TurnTree:
        return self._record.tree if self._rewritten is None else self._rewritten

    def _enter(self, seen: int) -> None:
        plan, ticket = self._plan, self._ticket
        assert plan is not None
        assert ticket is not None
        self._reply_id = self.generation.log.turn_id = reply_id(self._record, plan)
        tell_preceding(self.generation.log, self._tree, plan.parent, plan.user)
        if self.generation.cancelled:
            return self._runtime.session_reader.call(self.generation.cancelled_early)
        start = TurnStart(
            parent=plan.parent,
            prefix_length=plan.prefix_length,
            reply_id=self._reply_id,
            settings=plan.effective.stored,
            user=plan.user,
            extends=plan.extends.id if plan.extends else None,
            past=plan.past,
            metadata=plan.metadata,
            keeps_question=plan.keeps_question,
        )
        self.generation.log.metadata = start.new_metadata
        lease = self.generation.lease = self._context.writer.begin(start, seen, plan.request)
        self.generation.has_request = bool(plan.request)
        self.generation.has_moved = self._context.writer.has_moved
        self._runtime.durability.began(lease, self.generation.cancel)
        try:
            self._runtime.admission.enter(ticket)
        except BaseException:
            self._context.writer.release()
            raise
        self.generation.cancel_again()
        return None

    def _post(self) -> None:
        """Posts the request to the engine once it is admitted."""
        if self.generation.cancelled:
            return self.generation.cancelled_early()
        try:
            self._advance()
        except Exception as error:
            self.generation.fail(error)
        return None

    def _advance(self) -> None:
        plan, ticket = self._plan, self._ticket
        assert plan is not None
        assert ticket is not None
        with self._lock:
            self._held, prefix_length, append = self._context.handles.take(
                self._tree, plan.parent, plan.prefix_length, plan.suffix
            )
        extends, reader = plan.extends, self._runtime.session_reader
        advance = functools.partial(
            self._held.handle.advance,
            prefix_length,
            append,
            inbox=reader.inbox,
            retention_priority=self._context.handles.retention_priority,
            priority=ticket.priority,
            continued=len(extends.token_ids) - extends.stopped if extends else 0,
            **plan.effective.params,
        )
        self.generation.post(reader, advance)

    def _reopen(self) -> bool:
        """Tries another handle, then a new one, after the engine lost one for lack of memory."""
        if self._held is None or self._reopened == 2:
            return False
        self._reopened += 1
        with self._lock:
            if self._reopened == 1:
                self._context.handles.forget(self._held)
            else:  # copies of a lost handle are lost too
                self._context.handles.close()
        self._advance()
        return True

    def _withdraw(self) -> bool:
        return self._ticket is not None and self._runtime.admission.withdraw(self._ticket)

    def _commit(self, outcome: Outcome) -> Reply:
        try:
            if outcome.finish_reason == "cancelled" and not outcome.token_ids:
                return self._withdrawn_reply(outcome)
            reply = self._committed_reply(outcome)
            if not self._context.writer.is_deleted:
                self._prepare_next_turn()
            return reply
        except Exception:
            self._drop_rewritten()
            raise
        finally:
            self._context.writer.release()
            self._context.activity.ended()
            if self._ticket is not None:
                self._runtime.admission.leave(self._ticket)

    def _drop_rewritten(self) -> None:
        """Closes the handle of a rebuilt conversation that was not persisted."""
        if self._held is not None and self._rewritten is not None:
            with self._lock:
                self._context.handles.drop(self._held)

    def _withdrawn_reply(self, outcome: Outcome) -> Reply:
        """Leaves the session as it was before a turn that was cancelled before its first token.

        The question stays in `unanswered`, as after the death of the process, unless the caller
        wants it dropped. A reply that was to be continued is returned as it is.
        """
        plan, writer = self._plan, self._context.writer
        assert plan is not None
        self._drop_rewritten()
        if self._held is not None and self._rewritten is None:
            with self._lock:
                computed = self._computed(plan, outcome)
                self._held.holds_prompt(plan.parent, plan.prefix_length, plan.suffix, computed)
        error = None
        if plan.user is not None and plan.keeps_question:
            error = writer.finish((), said_in(plan.user).unanswered)
        usage = replace(outcome.usage, prompt_tokens=outcome.usage.prompt_tokens or plan.length)
        extends = plan.extends
        return Reply(
            text=extends.text if extends else "",
            reasoning=extends.reasoning if extends else "",
            token_ids=list(extends.token_ids) if extends else [],
            finish_reason="cancelled",
            usage=usage,
            timings=outcome.timings,
            error=error,
            turn=extends,
        )

    def _prepare_next_turn(self) -> None:
        """Saves pages for other processes and queues the idle prefill of the next turn."""
        runtime, record, plan = self._runtime, self._record, self._plan
        if self._held is not None:
            runtime.pages.save(self._held.handle)
        assert plan is not None
        make = None
        length, context = record.tree.get(record.leaf or 0).length, runtime.core.max_context
        if record.overflow == "drop" and overflow.is_near(plan, length, context):
            make = functools.partial(overflow.next_prompt, runtime, record)
        runtime.idle_prefill.enqueue(record.id, record.owner, make)

    def _committed_reply(self, outcome: Outcome) -> Reply:
        """Persists the turn."""
        plan, parser, writer = self._plan, self._parser, self._context.writer
        if outcome.finish_reason == "error" and not outcome.token_ids:
            raise outcome.error or InternalError("the generation failed without a reason")
        assert plan is not None
        assert parser is not None
        usage = replace(outcome.usage, prompt_tokens=outcome.usage.prompt_tokens or plan.length)
        outcome = replace(outcome, usage=usage)
        turn = reply_turn(self._runtime, plan, parser, outcome, self._reply_id)
        turns = [*plan.past, *((plan.user,) if plan.user else ()), turn]
        found = self._record.notices
        fields = {"leaf": turn.id, "last_used": now(), "unanswered": "", "notices": ()}
        error = writer.finish(turns, {**fields, **self._runtime.identity.fields()})
        turn = writer.record.tree.get(turn.id)
        if self._held is not None:
            length = plan.length + self.generation.sampled
            with self._lock:
                self._held.holds(turn, length, self._computed(plan, outcome))
        return Reply(
            text=turn.text,
            reasoning=turn.reasoning,
            token_ids=list(turn.token_ids),
            finish_reason=turn.finish_reason if error else outcome.finish_reason,
            usage=usage,
            timings=outcome.timings,
            error=error or outcome.error,
            logprobs=outcome.logprobs,
            turn=turn,
            notices=(*found, *self._notices(plan, usage)),
        )

    def _computed(self, plan: Plan, outcome: Outcome) -> int:
        """Returns the number of tokens that have KV; the last sampled one has none."""
        if outcome.token_ids:
            return plan.length + max(0, self.generation.sampled - 1)
        assert self._held is not None
        return max(self._held.computed, self.generation.prompt_done)

    def _notices(self, plan: Plan, usage: Usage) -> tuple[str, ...]:
        found = list(plan.notices)
        if plan.dropped:
            found.append(overflow.notice(plan.dropped, usage))
        if plan.rewritten:
            found.append(
                f"the chat template changed earlier turns: {plan.rewritten} of their tokens were "
                "replaced and what follows was computed again"
            )
        if usage.foreign_tokens:
            found.append(
                f"the KV of {usage.foreign_tokens} tokens was computed by another kind of "
                "machine or build, or on another number of ranks: good, but not bit for bit; the "
                "setting exact computes them again"
            )
        return tuple(found)
