"""A session: a conversation with its branches, its exact tokens, and their KV."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from typing_extensions import Unpack, override

from lmchat.errors import Error, InvalidRequest, NotFound, SessionBusy
from lmchat.generation.generation import Generation, Reply
from lmchat.generation.reply_stream import Follower
from lmchat.generation.room import check_prompt
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.interface.session import Branch
from lmchat.kv.handle_cache import HandleCache
from lmchat.sessions import branches as tree_of
from lmchat.sessions.appended import Place, Said, reply_to, rounds_of_messages
from lmchat.sessions.context import SessionContext
from lmchat.sessions.generation_starter import (
    REPLANS,
    GenerationStarter,
    placed,
    starting,
)
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.prefetch import Prefetch
from lmchat.sessions.remote_reply import RemoteReplies, stored_reply
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session_properties import Planned, SessionProperties
from lmchat.sessions.session_writer import Change
from lmchat.store.once import Once
from lmchat.store.protocol import check_mapping, check_name, check_tags, check_text
from lmchat.store.records import Exported, SessionRecord
from lmchat.store.turns import Turn, TurnTree
from turbomind import Residence
from turbomind.params import wrong


class Registry(Protocol):
    """The open sessions of an engine."""

    def used(self, session: Session) -> None:
        """Records the use of a session."""

    def opened(self, record: SessionRecord, handles: HandleCache) -> Session:
        """Stores and opens a fork."""

    def closed(self, session: Session) -> None:
        """Records that a session has closed."""

    def renamed(self, session: Session, name: str) -> None:
        """Gives a session another name."""

    def forget(self, record: SessionRecord) -> None:
        """Deletes a session."""


class Session(SessionProperties):
    """A `SessionApi` of this process, made by `ChatEngine.session()`."""

    def __init__(
        self,
        runtime: Runtime,
        record: SessionRecord,
        registry: Registry,
        handles: HandleCache | None = None,
    ) -> None:
        self._registry = registry
        context = SessionContext(runtime, record, handles)
        super().__init__(context)
        self._prefetch = Prefetch(context)
        this = weakref.ref(self)
        self._starter = GenerationStarter(context, self._reading, lambda: _used(this))
        self._remote = RemoteReplies(context)

    # --- generating ----------------------------------------------------------------------------

    @override
    def start_send(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
        overflow: str | None = None,
        keep_question: bool = True,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """Starts `send()`, as `SessionApi.start_send()`, and takes two more arguments of servers.

        `request` is the digest of the client's request that the turn answers, for `requests`;
        empty: it has none. `check` is called with the stored turns before the start, which it may
        refuse by an error. No other process can store a turn between both. It may be called several
        times.
        """
        check_text("text", text)
        stored = check_mapping("metadata", metadata)
        variables = check_mapping("template_variables", template_variables)
        place = _place(after, before, system, overflow)
        place = replace(place, keeps_question=keep_question, request=request, check=check)
        return self._starter.start(
            lambda planner: planner.send(text, settings, variables, metadata=stored), place
        )

    @override
    def start_continue(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """Starts `continue_()`; `request` and `check` are those of `start_send()`."""
        return self._starter.start(
            lambda planner: planner.continue_(settings), _storing(metadata, check, request)
        )

    @override
    def start_retry(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """Starts `retry()`; `request` and `check` are those of `start_send()`."""
        return self._starter.start(
            lambda planner: planner.retry(settings), _storing(metadata, check, request)
        )

    @override
    def start_edit(
        self,
        turn: int,
        text: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """Starts `edit()`; `request` and `check` are those of `start_send()`."""
        check_text("text", text)
        return self._starter.start(
            lambda planner: planner.edit(turn, text, settings), _storing(metadata, check, request)
        )

    def start_resume(
        self,
        *,
        overflow: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
    ) -> Generation:
        """Starts the rest of the last reply, which was cut, for the client that asks for it again.
        It ends where it would have ended. With log-probabilities, which are not stored, it is
        generated again from its first token, as a branch. The arguments are those of
        `start_send()`, but that `metadata` are added to those of the reply."""
        place = replace(_storing(metadata, check, request), overflow=overflow)
        return self._starter.start(lambda planner: planner.resume(), place)

    @property
    @override
    def running(self) -> Generation | None:
        return self._activity.generation

    @property
    @override
    def ending(self) -> Generation | None:
        return self._activity.ending

    @override
    def stop(self, turn: int | None = None) -> Reply | None:
        running = self._activity.generation
        if running is None:
            return self._remote.stop(self._refresh_unless_busy, turn)
        if turn not in (None, running.turn_id):
            return None
        self._settle_request(running)
        return self._activity.stop()

    def _settle_request(self, running: Generation) -> None:
        """Stores that no client is owed the rest of a reply, because a caller stops it."""
        if running.has_request and running.lease is not None:
            mark, token = self._runtime.store.mark_request, running.lease.fencing_token
            with contextlib.suppress(Error):
                self._runtime.worker.call(functools.partial(mark, self._record, token, "settled"))

    @override
    def follow(self, turn: int | None = None) -> Follower:
        for _ in range(REPLANS):
            with self._lock:
                self._activity.check_open()
                generation = self._activity.generation
            if generation is not None:
                if turn in (None, generation.turn_id):
                    return generation.follow()
                break
            follower = self._remote.follow(self._refresh_unless_busy)
            if follower is not None:
                if turn in (None, follower.turn_id):
                    return follower
                follower.close()
            if self._activity.generation is None:
                break
        return stored_reply(self._stored_reply(turn))

    def _stored_reply(self, turn: int | None) -> Turn:
        """Returns the reply of a turn, or the last one."""
        record = self._record
        if turn is not None:
            return tree_of.reply_turn(record, turn)
        last = None if record.leaf is None else record.tree.get(record.leaf)
        if last is None or last.role != "assistant":
            raise NotFound(f"session {record.name!r} has no reply to follow, expected one")
        return last

    def _refresh_unless_busy(self) -> None:
        with contextlib.suppress(SessionBusy):
            self.refresh()

    # --- moving in the conversation -------------------------------------------------------------

    @override
    def undo(self) -> str:
        def undo() -> Change[str]:
            users = tree_of.users(self._record)
            if not users:
                raise InvalidRequest("undo: the conversation has no turn, expected at least one")
            return Change(users[-1].text, {"leaf": users[-1].parent})

        return self._change(undo, "undo a turn")

    @override
    def branches(self, turn: int) -> list[Branch]:
        return tree_of.branches(self._record, turn)

    @override
    def switch(self, turn: int, index: int) -> None:
        def switch() -> Change[None]:
            found = tree_of.branches(self._record, turn)
            tree_of.check_index("index", index, len(found))
            return Change(None, {"leaf": found[index].leaf})

        self._change(switch, "switch branches")

    @override
    def fork(
        self,
        name: str | None = None,
        at: int | None = None,
        *,
        after: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> Session:
        chosen = None if tags is None else check_tags(tags)
        if name is not None:
            check_name(name)
        self.refresh()
        current = self._record
        # Without the lock, which a running reply needs: this reads all turns.
        record = tree_of.forked(current, name, at, after)
        if chosen is not None:
            record = replace(record, tags=chosen)
        length = record.tree.get(record.leaf).length if record.leaf else 0
        with self._lock:
            self._activity.check_open()
            handles = self._handles.fork(current.tree, record.leaf, length)
        return self._registry.opened(record, handles)

    @override
    def append(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        once: Once | None = None,
    ) -> None:
        """Appends messages, as `SessionApi.append()`. `once` makes it one change, however often it
        is called with this key. None: it has no key."""
        rounds, question = rounds_of_messages(messages)
        place = Place(system=system, rounds=tuple(rounds))
        self._runtime.check_fits(*place.texts, question.text)

        def plan(record: SessionRecord) -> Planned:
            made, end, _ = starting(self._runtime, record, place)
            waiting = Said(record.unanswered, record.unanswered_parts)
            waiting = question if rounds else waiting.then(question)
            return made, {"leaf": end.leaf, **waiting.unanswered}

        self._add("append messages", plan, once)

    @override
    def edit_reply(self, turn: int, text: str, *, once: Once | None = None) -> None:
        """Replaces a reply, as `SessionApi.edit_reply()`. `once` is that of `append()`."""
        check_text("text", text)
        self._runtime.check_fits(text)

        def plan(record: SessionRecord) -> Planned:
            made, end, _ = starting(self._runtime, record, Place())
            reply = reply_to(self._runtime, end, tree_of.user_turn(end, turn), Said(text))
            return [*made, reply], {"leaf": reply.id}

        self._add("edit a reply", plan, once)

    def _add(self, what: str, plan: Callable[[SessionRecord], Planned], once: Once | None) -> None:
        """Adds turns and changes fields as planned, once."""

        def planned(record: SessionRecord) -> Planned | None:
            if once is not None and once.is_made(record.keys):
                return None
            made, fields = plan(record)
            if once is not None:
                fields = {**fields, "keys": once.added_to(record.keys)}
            if made:
                limit = self._runtime.core.max_context
                check_prompt(made[-1].length, limit, "the conversation")
            return made, fields

        self._replan(what, planned)

    @override
    def conversation(self, reply: int) -> tuple[Turn, ...]:
        record = self._record
        return tuple(record.tree.path(tree_of.reply_turn(record, reply).id))

    @property
    @override
    def replies(self) -> tuple[Turn, ...]:
        return tree_of.replies(self._record)

    @override
    def annotate(self, turn: int, metadata: Mapping[str, Any]) -> None:
        values = check_mapping("metadata", metadata)

        def annotate() -> Change[None]:
            if turn not in self._record.tree:
                raise NotFound(f"session {self.name!r} has no turn {turn}")
            return Change(None, turns=[replace(self._record.tree.get(turn), metadata=values)])

        self._change(annotate)

    @override
    def count_tokens(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
    ) -> int:
        check_text("text", text)
        variables = check_mapping("template_variables", template_variables)
        place = _place(after, before, system)
        plan, _ = placed(
            self._runtime, self._record, lambda planner: planner.count(text, variables), place
        )
        return plan.length

    @override
    def refresh(self) -> None:
        with self._lock:
            self._activity.check_open()
        self._runtime.worker.call(self._writer.follow)

    # --- life ----------------------------------------------------------------------

    @override
    def warm(self) -> None:
        self._prefetch.begin()

    @property
    @override
    def residence(self) -> Residence:
        if self._is_foreign:
            return Residence(0, 0, 0)
        return self._runtime.core.residence(self.token_ids, self.owner)

    @override
    def predicted_ttft(self, new_tokens: int = 32) -> float:
        if self._is_foreign:
            return 0.0
        return self._runtime.core.predict_ttft(self.token_ids, new_tokens, self.owner)

    @override
    def export(
        self,
        path: str | os.PathLike[str],
        pages: bool = False,
        *,
        force: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> Exported:
        from lmchat.archive import export_session

        self.refresh()
        with self._runtime.pages.stored(pages) as stored:
            return export_session(
                self._runtime.store, stored, self._record, path, force, notify=notify
            )

    @override
    def rename(self, name: str) -> None:
        with self._lock:
            self._activity.check_open()
        self.refresh()
        self._runtime.worker.call(functools.partial(self._registry.renamed, self, name))

    @override
    def close(self) -> None:
        """Stops the generation and closes the engine handles. `ChatEngine.session()` opens the
        session again. Idempotent."""
        while not self._context.close() and self.state is not State.CLOSED:
            self._activity.stop()
        self._remote.close()
        with contextlib.suppress(Error):  # the turn stays in the journal
            self._runtime.worker.call(self._writer.settle)
        self._registry.closed(self)

    @override
    def delete(self) -> None:
        self._registry.forget(self._record)
        self.close()

    def removed(self, remove: Callable[[], None]) -> None:
        """Deletes the session by `remove`. A running reply is not stored. Used by the registry."""
        generation = self._activity.generation
        if generation is not None:
            self._runtime.session_reader.call(functools.partial(_unjournalled, generation))
        try:
            remove()
        except Exception:
            if generation is not None:  # it ends, and is stored as it is then
                generation.cancel()
            raise
        self._writer.deleted()
        with self._lock:
            if self._activity.generation is None:
                self._context.release_handles(save=False)

    def __repr__(self) -> str:
        return f"<Session {self.name!r}: {self.length} tokens, {self.state}>"


def _used(this: weakref.ref[Session]) -> None:
    session = this()
    if session is not None:
        session._registry.used(session)


def _unjournalled(generation: Generation) -> None:
    generation.lease = None


def _place(
    after: int | None,
    before: Sequence[Mapping[str, Any]],
    system: str | None,
    overflow: str | None = None,
) -> Place:
    rounds, _ = rounds_of_messages(before)
    if len(before) % 2:
        expected = "'assistant': a reply before the message"
        raise wrong(f"before[{len(before) - 1}].role", "user", expected)
    if system is not None:
        check_text("system", system)
    if overflow is not None:
        check_overflow(overflow)
    return Place(after, system, tuple(rounds), overflow)


def _storing(
    metadata: Mapping[str, Any] | None,
    check: Callable[[TurnTree], object] | None,
    request: str,
) -> Place:
    """Returns the last reply as the place, with metadata for the next one."""
    return Place(metadata=check_mapping("metadata", metadata), request=request, check=check)
