"""One generation without a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lmchat.errors import InternalError
from lmchat.generation.generation import Generation, Outcome, Reply
from lmchat.generation.settings import Effective
from lmchat.generation.state import State
from lmchat.generation.ticket import Ticket
from lmchat.text.replies.reply_parser import ReplyParser

if TYPE_CHECKING:
    from lmchat.sessions.runtime import Runtime
    from turbomind import Stream


class StatelessGeneration:
    """Generates a continuation of a prompt of token ids, or `n` of them.

    Args:
        runtime: the engine and its threads.
        token_ids: the prompt.
        effective: the settings.
        owner: the owner that the computed tokens are accounted to.
        begins: called with the generation before it is queued. It may raise.
        ended: called with the generation when it has ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        token_ids: Sequence[int],
        effective: Effective,
        owner: str,
        begins: Callable[[Generation], None],
        ended: Callable[[Generation], None],
    ) -> None:
        self.generation = Generation(
            runtime.reader.later, self._commit, self._moved, self._withdraw, self._reopen
        )
        self.generation.observers = runtime.observers
        self._runtime = runtime
        self._token_ids = list(token_ids)
        self._effective = effective
        self._begins = begins
        self._ended = ended
        self._parsers = [self._parser() for _ in range(effective.params.get("n", 1))]
        self._ticket = self._new_ticket(owner, live=False, cost=max(1, len(self._token_ids)))

    def _new_ticket(self, owner: str, *, live: bool, cost: int) -> Ticket:
        """Returns the ticket of the request, to which its tokens are accounted from now on."""
        later = self._runtime.reader.later  # a slot is freed and a request refused on any thread
        ticket = Ticket(
            owner,
            live=live,
            cost=cost,
            start=functools.partial(later, self._post),
            refused=lambda error: later(functools.partial(self.generation.fail, error)),
            reprioritize=self.generation.set_priority,
            limit=self._effective.params.get("max_new_tokens"),
            choices=self._effective.params.get("n", 1),
        )
        self.generation.charge = functools.partial(self._runtime.admission.charge, ticket)
        self.generation.choice_ended = functools.partial(
            self._runtime.admission.choice_ended, ticket
        )
        return ticket

    def _parser(self) -> ReplyParser:
        """Returns a new parser for the tokens of a choice."""
        return ReplyParser(
            self._runtime.tokenizer,
            stop_strings=self._effective.stop_strings,
            context=self._token_ids,
            hidden=self._effective.hidden_tokens(self._runtime.core.eos_token_ids),
        )

    def enter(self) -> None:
        """Queues the request, or sends it at once.

        Raises:
            Overloaded: the queue is full.
        """
        try:
            first, *others = self._parsers
            self.generation.prepare(first, others=others)
            self._runtime.reader.call(self._enter)
        except BaseException as error:
            self.generation.abort(error)
            raise

    def _enter(self) -> None:
        self._begins(self.generation)
        self._runtime.admission.enter(self._ticket)

    def _post(self) -> None:
        if self.generation.cancelled:
            return self.generation.cancelled_early()
        try:
            self.generation.post(self._runtime.reader, self._request())
        except Exception as error:
            self.generation.fail(error)
        return None

    def _request(self) -> Callable[[], Stream]:
        """Returns a call that sends the request to the engine."""
        return functools.partial(
            self._runtime.core.stream,
            self._token_ids,
            inbox=self._runtime.reader.inbox,
            priority=self._ticket.priority,
            salt=self._ticket.owner,
            **self._effective.params,
        )

    def _reopen(self) -> bool:
        """Sends a request again whose handle is gone; there is none."""
        return False

    def _moved(self, _state: State) -> None:
        pass

    def _withdraw(self) -> bool:
        return self._runtime.admission.withdraw(self._ticket)

    def _commit(self, outcome: Outcome) -> Reply:
        self._ended(self.generation)
        self._runtime.admission.leave(self._ticket)
        outcomes = [outcome, *outcome.others]
        if outcome.finish_reason == "error" and not any(one.token_ids for one in outcomes):
            raise outcome.error or InternalError("the generation failed without a reason")
        others = tuple(self._reply(one) for one in outcome.others)
        return replace(self._reply(outcome), others=others)

    def _reply(self, outcome: Outcome) -> Reply:
        """Returns the reply of a choice."""
        return Reply(
            text=outcome.text,
            reasoning=outcome.reasoning,
            token_ids=outcome.token_ids,
            finish_reason=outcome.finish_reason,
            usage=outcome.usage,
            timings=outcome.timings,
            error=outcome.error,
            logprobs=outcome.logprobs,
        )
