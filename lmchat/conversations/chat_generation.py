"""One reply to messages, without a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmchat.conversations.handle_pool import HandlePool, Reservation
from lmchat.conversations.known_replies import KnownReplies, KnownReply
from lmchat.conversations.messages import Recognized
from lmchat.generation.generation import Generation
from lmchat.generation.reply import Outcome, Reply
from lmchat.generation.settings import Effective
from lmchat.generation.stateless import StatelessGeneration
from lmchat.sessions.turn_execution import LIVE_TOKENS
from lmchat.store.turns import Turn
from lmchat.text.conversation import Prompt
from lmchat.text.replies.reply_parser import ReplyParser

if TYPE_CHECKING:
    from lmchat.sessions.runtime import Runtime
    from turbomind import Stream


class ChatGeneration(StatelessGeneration):
    """Generates the reply to a prompt of messages, with a handle of the pool if there is one.

    Args:
        runtime: the engine and its threads.
        prompt: the prompt.
        asked: the conversation that it was made of.
        effective: the settings.
        owner: the owner.
        replies: takes the reply. None: nothing is kept.
        pool: has the handles of recent conversations. None: the request has no handle.
        begins: called with the generation before it is queued. It may raise.
        ended: called with the generation when it has ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Prompt,
        asked: Recognized,
        effective: Effective,
        owner: str,
        replies: KnownReplies | None,
        pool: HandlePool | None,
        begins: Callable[[Generation], None],
        ended: Callable[[Generation], None],
    ) -> None:
        ids, resumed = prompt.token_ids, prompt.resumed
        self._head, self._own = ids[: len(ids) - resumed], ids[len(ids) - resumed :]
        if resumed:
            effective = replace(effective, params={**effective.params, "continued": resumed})
        self._asked, self._replies, self._pool = asked, replies, pool
        self._reservation: Reservation | None = None
        self._reopened = False
        super().__init__(runtime, ids, effective, owner, begins, ended)
        self._shown = self._shown_before()

    def _parser(self) -> ReplyParser:
        """Returns a new parser for the tokens of a choice."""
        builder = self._runtime.builder
        return ReplyParser(
            self._runtime.tokenizer,
            reasoning=builder.reasoning,
            in_reasoning=builder.starts_in_reasoning(self._head),
            stop_strings=self._effective.stop_strings,
            resume=self._own,
            context=self._head if builder.info.kind == "none" else (),
            hidden=self._effective.hidden_tokens(self._runtime.core.eos_token_ids),
        )

    def _shown_before(self) -> tuple[int, int]:
        """Returns the lengths of the text and the reasoning that a continued reply has already."""
        if not self._own:
            return 0, 0
        builder = self._runtime.builder
        before = ReplyParser(
            self._runtime.tokenizer,
            reasoning=builder.reasoning,
            in_reasoning=builder.starts_in_reasoning(self._head),
            context=self._head if builder.info.kind == "none" else (),
            hidden=self._effective.hidden_tokens(self._runtime.core.eos_token_ids),
        )
        before.push(self._own)
        before.finish()
        return len(before.text), len(before.reasoning)

    def enter(self) -> None:
        """Queues the request, or sends it at once.

        Raises:
            Overloaded: the queue is full.
        """
        first, *others = self._parsers
        if self._pool is not None and not others:
            self._reservation = reservation = self._pool.reserve(
                self._ticket.owner, self._token_ids
            )
            cost = max(1, len(self._token_ids) - reservation.held)
            live = reservation.continues and cost <= LIVE_TOKENS
            self._ticket = self._new_ticket(self._ticket.owner, live=live, cost=cost)
        try:
            self.generation.prepare(first, len(self._own), others=others)
            self._runtime.reader.call(self._enter)
        except BaseException as error:
            self.generation.abort(error)
            raise

    def _request(self) -> Callable[[], Stream]:
        """Returns a call that sends the request to the engine."""
        if self._reservation is None or self._pool is None:
            return super()._request()
        handle, prefix = self._pool.begin(self._reservation)
        params = {k: v for k, v in self._effective.params.items() if k != "n"}
        return functools.partial(
            handle.advance,
            prefix,
            self._token_ids[prefix:],
            inbox=self._runtime.reader.inbox,
            priority=self._ticket.priority,
            **params,
        )

    def _reopen(self) -> bool:
        """Uses a new handle, after the engine lost one for lack of memory."""
        if self._reservation is None or self._pool is None or self._reopened:
            return False
        self._reopened = True
        self._pool.lost(self._reservation)
        self.generation.post(self._runtime.reader, self._request())
        return True

    def _commit(self, outcome: Outcome) -> Reply:
        try:
            self._keep(outcome)
        finally:
            reply = super()._commit(outcome)
        if not reply.usage.prompt_tokens:
            usage = replace(reply.usage, prompt_tokens=len(self._token_ids))
            reply = replace(reply, usage=usage)
        return reply

    def _keep(self, outcome: Outcome) -> None:
        """Keeps the reply's tokens and the KV for the next request of the conversation."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None and self._pool is not None:
            asked = len(self._token_ids)
            if outcome.token_ids:
                computed = asked + max(0, self.generation.sampled - 1)
                self._pool.finish(reservation, outcome.token_ids, computed)
            elif outcome.finish_reason == "cancelled" and reservation.own is not None:
                self._pool.finish(
                    reservation, (), max(reservation.own.computed, self.generation.prompt_done)
                )
            else:
                self._pool.abandon(reservation)
        for one in (outcome, *outcome.others):
            if one.token_ids and self._replies is not None:
                self._replies.add(self._ticket.owner, self._known(one))

    def _known(self, outcome: Outcome) -> KnownReply:
        ids = (*self._own, *outcome.token_ids)
        raw = self._runtime.tokenizer.raw(ids[: len(ids) - outcome.stopped])
        text, reasoning = outcome.text, outcome.reasoning
        turn = Turn(
            id=0,
            parent=None,
            role="assistant",
            text=text,
            message=self._runtime.builder.reply_message(text, reasoning, raw),
            token_ids=ids,
            reasoning=reasoning,
            stopped=outcome.stopped,
        )
        shown = None
        if self._own:
            shown = self._asked.conversation.messages[-1]["content"] + text[self._shown[0] :]
        return KnownReply(turn, self._asked.past, self._asked.now, shown)

    def _reply(self, outcome: Outcome) -> Reply:
        """Returns the reply of a choice: what is new in it."""
        text, reasoning = self._shown
        return replace(
            super()._reply(outcome),
            text=outcome.text[text:],
            reasoning=outcome.reasoning[reasoning:],
        )
