"""The way of one turn: from a planned prompt through queue and engine to a committed reply."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from lmchat.admission import Ticket, priority
from lmchat.errors import InternalError
from lmchat.generation import Generation, Outcome, Reply
from lmchat.kept_kv import Held, KeptKV
from lmchat.planner import Plan
from lmchat.runtime import Runtime
from lmchat.state import State
from lmchat.store import SessionRecord, now
from lmchat.text.reply_parser import ReplyParser
from lmchat.turns import Turn

LIVE_TOKENS = 512  # a kept session's turn with at most this many to compute goes before others


class TurnRun:
    """One generation of one session. `lock` is the session's; `ended` frees the session."""

    def __init__(
        self,
        runtime: Runtime,
        record: SessionRecord,
        kept: KeptKV,
        lock: AbstractContextManager[Any],
        moved: Callable[[State], None],
        ended: Callable[[], None],
    ) -> None:
        self.generation = Generation(
            runtime.reader.later, self._commit, moved, self._withdraw, self._reopen
        )
        self._runtime = runtime
        self._record = record
        self._kept = kept
        self._lock = lock
        self._ended = ended
        self._plan: Plan | None = None
        self._parser: ReplyParser | None = None
        self._ticket: Ticket | None = None
        self._held: Held | None = None
        self._reopened = 0

    def enter(self, plan: Plan) -> None:
        """Queues the request, or posts it at once. Raises Overloaded."""
        self._plan = plan
        self._parser = self._parser_of(plan)
        extends = plan.extends
        resumed = len(extends.token_ids) - extends.stopped if extends else 0
        self.generation.prepare(self._parser, resumed, plan.rewritten)
        self._runtime.reader.call(self._enter)

    def _enter(self) -> None:
        plan = self._plan
        assert plan is not None
        if self.generation.cancelled:
            return self.generation.cancelled_early()
        with self._lock:
            held = self._kept.live_tokens(self._record.tree, plan.parent, plan.keep)
        cost = max(1, plan.length - held)
        live = held > 0 and cost <= LIVE_TOKENS
        self._ticket = Ticket(self._record.owner, live, cost, self._post)
        self._runtime.admission.enter(self._ticket)
        return None

    def _parser_of(self, plan: Plan) -> ReplyParser:
        runtime = self._runtime
        extends = plan.extends
        user = plan.user
        if user is None:
            user = self._record.tree.get((extends.parent if extends else plan.parent) or 0)
        resume = extends.token_ids[: len(extends.token_ids) - extends.stopped] if extends else ()
        return ReplyParser(
            runtime.tokenizer,
            reasoning=runtime.builder.reasoning,
            in_reasoning=runtime.builder.starts_in_reasoning(user.token_ids),
            stop_strings=plan.effective.stop_strings,
            resume=resume,
            context=user.token_ids if runtime.builder.info.kind == "none" else (),
        )

    def _post(self) -> None:
        """The request has its place in the batch."""
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
            self._held, keep, append = self._kept.take(
                self._record.tree, plan.parent, plan.keep, plan.suffix
            )
        extends, reader = plan.extends, self._runtime.reader
        advance = functools.partial(
            self._held.handle.advance,
            keep,
            append,
            inbox=reader.inbox,
            keep_value=self._kept.keep_value,
            priority=priority(ticket),
            continued=len(extends.token_ids) - extends.stopped if extends else 0,
            **plan.effective.params,
        )
        self.generation.post(reader, advance)

    def _reopen(self) -> bool:
        """The engine lost the handle (its memory was short): tries with another one, then with a
        new one."""
        if self._held is None or self._reopened == 2:
            return False
        self._reopened += 1
        with self._lock:
            if self._reopened == 1:
                self._kept.forget(self._held)
            else:  # what was copied of a lost one is lost too
                self._kept.close()
        self._advance()
        return True

    def _withdraw(self) -> bool:
        return self._ticket is not None and self._runtime.admission.withdraw(self._ticket)

    def _commit(self, outcome: Outcome) -> Reply:
        try:
            with self._lock:
                reply = self._add_turn(outcome)
                self._record.last_used = now()
                self._ended()
                return reply
        except BaseException:
            self._ended()
            raise
        finally:
            if self._ticket is not None:
                self._runtime.admission.leave(self._ticket)

    def _add_turn(self, outcome: Outcome) -> Reply:
        plan, parser, tree = self._plan, self._parser, self._record.tree
        if outcome.finish_reason == "error" and not outcome.token_ids:
            raise outcome.error or InternalError("the generation failed without a reason")
        assert plan is not None
        assert parser is not None
        usage = replace(outcome.usage, prompt_tokens=outcome.usage.prompt_tokens or plan.length)
        turn = self._reply_turn(plan, parser, replace(outcome, usage=usage))
        if plan.user is not None:
            tree.add(plan.user)
        turn = tree.replace(turn) if turn.id in tree else tree.add(turn)
        self._record.leaf = turn.id
        if self._held is not None:
            length = plan.length + self.generation.sampled
            self._held.holds(turn, length, self._computed(plan, outcome))
        return Reply(
            text=turn.text,
            reasoning=turn.reasoning,
            token_ids=list(turn.token_ids),
            finish_reason=outcome.finish_reason,
            usage=usage,
            timings=outcome.timings,
            error=outcome.error,
            logprobs=outcome.logprobs,
            turn=turn,
            notices=self._notices(plan),
        )

    def _computed(self, plan: Plan, outcome: Outcome) -> int:
        """How many tokens have keys and values: the last sampled one has none."""
        if outcome.token_ids:
            return plan.length + max(0, self.generation.sampled - 1)
        assert self._held is not None
        return max(self._held.computed, self.generation.prompt_done)

    def _reply_turn(self, plan: Plan, parser: ReplyParser, outcome: Outcome) -> Turn:
        extends, stopped = plan.extends, outcome.stopped
        ids = tuple(outcome.token_ids)
        if extends is not None:
            if not ids:
                return extends
            ids = extends.token_ids[: len(extends.token_ids) - extends.stopped] + ids
        raw = self._runtime.tokenizer.raw(ids[: len(ids) - stopped])
        message = self._runtime.builder.reply_message(parser.text, parser.reasoning, raw)
        prompt = extends.keep if extends else plan.length
        # A reply that something follows already stays as it is; the longer one stands beside it.
        in_place = extends is not None and not self._record.tree.children(extends.id)
        return Turn(
            id=extends.id if extends and in_place else self._record.tree.new_id(),
            parent=extends.parent if extends else plan.user.id if plan.user else plan.parent,
            role="assistant",
            text=parser.text,
            message=message,
            token_ids=ids,
            keep=prompt,
            length=prompt + len(ids),
            reasoning=parser.reasoning,
            finish_reason=outcome.finish_reason,
            stopped=stopped,
            error=outcome.error,
            usage=outcome.usage,
            timings=outcome.timings,
            settings=plan.effective.stored,
        )

    def _notices(self, plan: Plan) -> tuple[str, ...]:
        if not plan.rewritten:
            return ()
        return (
            f"the chat template changed earlier turns: {plan.rewritten} of their tokens were "
            "replaced and what follows was computed again",
        )
