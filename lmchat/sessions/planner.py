"""Plans of generations: a prompt on the session's tree, and the settings that apply."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmchat.errors import Error, InvalidRequest
from lmchat.generation import settings as settings_module
from lmchat.generation.settings import SETTINGS, Effective
from lmchat.sessions.branches import user_turn
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn
from lmchat.text.prompt import Suffix


@dataclass(frozen=True)
class Dropped:
    """The number of oldest turns that were dropped, their tokens, and the tokens that remain."""

    turns: int
    tokens: int
    remaining: int


@dataclass(frozen=True)
class Plan:
    """A prompt: the first `prefix_length` tokens of the transcript of `parent`, then `suffix`.

    Attributes:
        parent: the turn that the prompt starts from; None: an empty conversation.
        prefix_length: length of the prefix of its transcript, in tokens.
        suffix: token ids after that prefix.
        effective: the settings.
        user: a new turn, stored together with its reply.
        extends: the reply that is continued.
        rewritten: number of earlier tokens that were replaced.
        past: the turns of a rebuilt conversation, parents first. They are stored with the reply and
            not in the tree yet.
        dropped: the turns dropped because the context was full.
        notices: sentences for the user about changes to earlier turns.
        variables: template variables for this turn alone.
        keeps_question: whether the user turn becomes the session's unanswered one if the turn ends
            before its first token.
        metadata: JSON values by key that the reply gets, beside those that a continued one has.
        request: digest of the client's request that the turn answers; empty: it has none.
    """

    parent: int | None
    prefix_length: int
    suffix: tuple[int, ...]
    effective: Effective
    user: Turn | None = None
    extends: Turn | None = None
    rewritten: int = 0
    past: tuple[Turn, ...] = ()
    dropped: Dropped | None = None
    notices: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    keeps_question: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)
    request: str = ""

    @property
    def length(self) -> int:
        """Length of the prompt, in tokens."""
        return self.prefix_length + len(self.suffix)


class Planner:
    """Plans the generations of one session, without changing it."""

    def __init__(self, runtime: Runtime, record: SessionRecord) -> None:
        self._runtime = runtime
        self._record = record

    def send(
        self,
        text: str,
        settings: Mapping[str, Any],
        variables: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Plans a reply to `text` after the last turn.

        Args:
            text: the user's message.
            settings: of this reply.
            variables: override the session's.
            metadata: stored with the user turn.

        Raises:
            ContextFull: no context holds the text.
        """
        self._runtime.check_fits(text)
        return self._answer_to(text, self._record.leaf, settings, variables or {}, metadata)

    def count(self, text: str, variables: Mapping[str, Any] | None) -> Plan:
        """Plans as `send()` does, also a text that no context holds."""
        return self._answer_to(text, self._record.leaf, {}, variables)

    def edit(self, turn: int, text: str, settings: Mapping[str, Any]) -> Plan:
        """Plans a reply to `text` in place of user turn `turn`, from 0.

        Raises:
            ContextFull: no context holds the text.
        """
        self._runtime.check_fits(text)
        old = user_turn(self._record, turn)
        plan = self._answer_to(text, old.parent, settings)
        assert plan.user is not None
        return replace(plan, user=replace(plan.user, dropped_before=old.dropped_before))

    def _answer_to(
        self,
        text: str,
        parent: int | None,
        settings: Mapping[str, Any],
        variables: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Plan:
        effective, variables = self._merge(settings), variables or {}
        user, suffix = self.user_after(self._record.tree.path(parent), text, variables)
        user = replace(user, metadata=dict(metadata or {}))
        return Plan(
            parent,
            user.prefix_length,
            user.token_ids,
            effective,
            user,
            rewritten=suffix.rewritten,
            variables=variables,
        )

    def retry(self, settings: Mapping[str, Any]) -> Plan:
        """Plans another reply to the last user turn, with the last seed and the next attempt.

        If the template renders that turn differently now (`enable_thinking`, say), it becomes a new
        turn beside the old one.
        """
        reply = self._last_reply("retry")
        user = self._record.tree.get(reply.parent or 0)
        siblings = self._record.tree.children(user.id)
        attempt = 1 + max(int(turn.settings.get("attempt", 0)) for turn in siblings)
        seed = {"seed": reply.settings.get("seed")}
        effective = self._merge({**seed, **settings}, attempt)
        again, suffix = self.user_after(self._record.tree.path(user.parent), user.text)
        if (again.prefix_length, again.token_ids) == (user.prefix_length, user.token_ids):
            return Plan(user.id, user.length, (), effective)
        again = replace(again, dropped_before=user.dropped_before)
        ids, rewritten = again.token_ids, suffix.rewritten
        return Plan(user.parent, again.prefix_length, ids, effective, again, rewritten=rewritten)

    def continue_(self, settings: Mapping[str, Any]) -> Plan:
        """Plans the continuation of the last reply, with its settings. A stop token is removed, and
        not chosen again as the first token."""
        reply = self._last_reply("continue")
        return self._continued(reply, settings, reply.finish_reason == "interrupted")

    def resume(self) -> Plan:
        """Plans the rest of the last reply, which ends where it would have ended if it had not been
        cut. One with log-probabilities, which are not stored, is generated again from its first
        token, with its seed and as a branch."""
        reply = self._last_reply("resume")
        if reply.settings.get("logprobs") is None:
            return self._continued(reply, {}, is_cut=True)
        settings = {k: v for k, v in reply.settings.items() if k in SETTINGS}
        effective = self._merge(settings, int(reply.settings.get("attempt", 0)), session={})
        effective = replace(effective, limit_given=False)
        return Plan(reply.parent, reply.prefix_length, (), effective)

    def _continued(self, reply: Turn, settings: Mapping[str, Any], is_cut: bool) -> Plan:
        limits = {"min_new_tokens": 1} if reply.stopped else {}
        before = {k: v for k, v in reply.settings.items() if k in SETTINGS}
        least = before.pop("min_new_tokens", 0)
        if is_cut:  # ends where it would have ended
            done = reply.usage.completion_tokens
            if "max_new_tokens" in before:
                limits["max_new_tokens"] = before["max_new_tokens"] - done
            if least > done:
                limits["min_new_tokens"] = least - done
        attempt = int(reply.settings.get("attempt", 0))
        # Not the session's settings: they may have changed since.
        effective = self._merge({**before, **limits, **settings}, attempt, session={})
        given = settings.get("max_new_tokens") is not None  # not by an earlier call
        effective = replace(effective, limit_given=given)
        return Plan(reply.id, reply.length - reply.stopped, (), effective, extends=reply)

    def user_after(
        self, path: Sequence[Turn], text: str, variables: Mapping[str, Any] | None = None
    ) -> tuple[Turn, Suffix]:
        """Returns a new user turn and its suffix.

        Args:
            path: the conversation before it, from the root; its turns may be new too.
            text: the user's message.
            variables: template variables that override the session's; None removes one.
        """
        record = self._record
        merged = {**record.template_variables, **(variables or {})}
        suffix = self._runtime.builder.suffix(
            path,
            text,
            history=record.history,
            variables={name: value for name, value in merged.items() if value is not None},
            now=record.created.astimezone(),
        )
        user = Turn(
            id=record.tree.new_id(),
            parent=path[-1].id if path else None,
            role="user",
            text=text,
            message=suffix.message,
            token_ids=tuple(suffix.token_ids),
            prefix_length=suffix.prefix_length,
            length=suffix.prefix_length + len(suffix.token_ids),
        )
        return user, suffix

    def _merge(
        self,
        settings: Mapping[str, Any],
        attempt: int = 0,
        session: Mapping[str, Any] | None = None,
    ) -> Effective:
        own = self._record.settings if session is None else session
        found = settings_module.merge(
            settings,
            own,
            self._runtime.model_settings,
            attempt=attempt,
            vocab=self._runtime.core.vocab_size,
        )
        return replace(found, stored=self._runtime.identity.marked(found.stored))

    def _last_reply(self, verb: str) -> Turn:
        leaf = self._record.leaf
        turn = None if leaf is None else self._record.tree.get(leaf)
        if turn is None or turn.role != "assistant":
            raise InvalidRequest(f"{verb}: the conversation has no reply, expected one")
        return turn


def unanswered_prompt(runtime: Runtime, record: SessionRecord) -> list[list[int]]:
    """Returns the prompt of a question that was stopped before its reply, which may have KV on
    disk. Returns an empty list where there is none, or where it cannot be made again."""
    if not record.unanswered:
        return []
    with contextlib.suppress(Error):
        plan = Planner(runtime, record).count(record.unanswered, None)
        before = record.tree.token_ids(plan.parent) if plan.parent is not None else []
        return [[*before[: plan.prefix_length], *plan.suffix]]
    return []
