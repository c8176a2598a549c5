"""A session: a conversation with its branches, its exact tokens, and their KV."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, overload

from typing_extensions import Unpack

from lmchat.errors import Error, InvalidRequest, NotFound, SessionBusy
from lmchat.generation.generation import Generation, Reply, ReplyStream
from lmchat.generation.reply_stream import Follower
from lmchat.generation.room import check_prompt
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION, HandleCache
from lmchat.sessions import branches as tree_of
from lmchat.sessions.appended import Place, Said, reply_to, rounds_of_messages
from lmchat.sessions.branches import Branch
from lmchat.sessions.context import SessionContext
from lmchat.sessions.generation_starter import (
    REPLANS,
    GenerationStarter,
    MakePlan,
    overtaken,
    placed,
    starting,
)
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.prefetch import Prefetch
from lmchat.sessions.remote_reply import RemoteReplies, stored_reply
from lmchat.sessions.rewrite import rebuilt, rounds_of
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session_properties import SessionSettings
from lmchat.sessions.session_writer import Change, Moved
from lmchat.store.once import Once
from lmchat.store.protocol import check_mapping, check_name, check_tags, check_text
from lmchat.store.records import Exported, SessionRecord
from lmchat.store.turns import Turn, TurnTree
from turbomind import Residence
from turbomind.params import wrong

__all__ = ["Branch", "Registry", "Session"]


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


class Session(SessionSettings):
    """One conversation, made by `ChatEngine.session()`.

    Any thread may call its methods. A session generates one reply at a time: a second generation,
    and methods that would change the conversation meanwhile, raise SessionBusy. After `close()` all
    methods raise NotFound.
    """

    def __init__(
        self,
        runtime: Runtime,
        record: SessionRecord,
        registry: Registry,
        handles: HandleCache | None = None,
    ) -> None:
        self.fresh = False
        """Whether this process created the session."""
        self._registry = registry
        context = SessionContext(runtime, record, handles)
        super().__init__(context)
        self._handles = context.handles
        self._prefetch = Prefetch(context)
        this = weakref.ref(self)
        self._starter = GenerationStarter(context, lambda: _used(this))
        self._remote = RemoteReplies(context)

    # --- generating ----------------------------------------------------------------------------

    @overload
    def send(
        self,
        text: str,
        *,
        stream: Literal[False] = False,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply: ...
    @overload
    def send(
        self,
        text: str,
        *,
        stream: Literal[True],
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> ReplyStream: ...
    @overload
    def send(
        self,
        text: str,
        *,
        stream: bool,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply | ReplyStream: ...
    def send(
        self,
        text: str,
        *,
        stream: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply | ReplyStream:
        """Generates a reply to `text`.

        Args:
            text: the user's message.
            stream: whether to return a `ReplyStream` at once instead of waiting for the `Reply`.
            template_variables: override the session's for this reply alone.
            settings: see `GenerationSettings`. They override the session's for this reply alone.

        Raises:
            SessionBusy: a reply is being generated, here or in another process.
            InvalidRequest: an argument is out of range.
            ContextFull: the turn does not fit the context.
            Overloaded: the queue is full.
            Error: the generation failed before its first token. The session is unchanged then.
        """
        return self._starter.answer(_sending(text, settings, template_variables), stream)

    def stream(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> ReplyStream:
        """Generates a reply to `text` as `send()` does, and returns its stream."""
        make_plan = _sending(text, settings, template_variables)
        return self._starter.answer(make_plan, stream=True)

    @overload
    def continue_(
        self, *, stream: Literal[False] = False, **settings: Unpack[GenerationSettings]
    ) -> Reply: ...
    @overload
    def continue_(
        self, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> ReplyStream: ...
    @overload
    def continue_(
        self, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream: ...
    def continue_(
        self, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream:
        """Extends the last reply in place, with its settings and seed. After a stop or a length
        limit the result equals an uninterrupted reply."""
        return self._starter.answer(lambda planner: planner.continue_(settings), stream)

    @overload
    def retry(
        self, *, stream: Literal[False] = False, **settings: Unpack[GenerationSettings]
    ) -> Reply: ...
    @overload
    def retry(
        self, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> ReplyStream: ...
    @overload
    def retry(
        self, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream: ...
    def retry(
        self, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream:
        """Generates another reply to the last user turn, as a new branch with the next attempt."""
        return self._starter.answer(lambda planner: planner.retry(settings), stream)

    @overload
    def edit(
        self,
        turn: int,
        text: str,
        *,
        stream: Literal[False] = False,
        **settings: Unpack[GenerationSettings],
    ) -> Reply: ...
    @overload
    def edit(
        self, turn: int, text: str, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> ReplyStream: ...
    @overload
    def edit(
        self, turn: int, text: str, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream: ...
    def edit(
        self, turn: int, text: str, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream:
        """Generates a reply to `text` in place of user turn `turn` (from 0), as a new branch."""
        return self._starter.answer(_editing(turn, text, settings), stream)

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
        """Starts `send()` and returns its generation without waiting.

        What `before` and `system` change is stored together with the reply. A message that is
        refused, or cancelled before the first token, leaves the conversation as it was.

        Args:
            text: the user's message.
            template_variables: as in `send()`.
            after: id of the reply that the message follows, as a new branch; None: the last one.
            before: messages between that reply and `text`, as in `append()`; an assistant's is the
                last of them.
            system: the system prompt from now on, empty for none; None: unchanged.
            overflow: `set_overflow()` for this turn alone; None: the session's.
            keep_question: whether `text` becomes `unanswered` when it is cancelled before the first
                token.
            metadata: JSON values stored with the user turn.
            request: digest of the client's request that the turn answers, for `requests`; empty: it
                has none.
            check: called with the stored turns before the start, which it may refuse by an error.
                No other process can store a turn between both. It may be called several times.
            settings: as in `send()`.

        Raises:
            NotFound: there is no reply `after`.
            Error: as `send()`.
        """
        stored = check_mapping("metadata", metadata)
        make_plan = _sending(text, settings, template_variables, stored)
        place = _place(after, before, system, overflow)
        place = replace(place, keeps_question=keep_question, request=request, check=check)
        return self._starter.start(make_plan, place)

    def start_continue(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """Starts `continue_()` and returns its generation without waiting. `metadata` are JSON
        values that are added to those of the reply; `request` and `check` are those of
        `start_send()`."""
        return self._starter.start(
            lambda planner: planner.continue_(settings), _storing(metadata, check, request)
        )

    def start_retry(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        request: str = "",
        check: Callable[[TurnTree], object] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """Starts `retry()` and returns its generation without waiting. `metadata` are JSON values
        stored with the reply; `request` and `check` are those of `start_send()`."""
        return self._starter.start(
            lambda planner: planner.retry(settings), _storing(metadata, check, request)
        )

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
        """Starts `edit()` and returns its generation without waiting. `metadata` are JSON values
        stored with the reply; `request` and `check` are those of `start_send()`."""
        return self._starter.start(
            _editing(turn, text, settings), _storing(metadata, check, request)
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
    def running(self) -> Generation | None:
        """Current generation, or None."""
        return self._activity.generation

    @property
    def ending(self) -> Generation | None:
        """Generation that was asked to stop and has not ended yet, or None. The next method that
        generates waits for it."""
        return self._activity.ending

    def stop(self, turn: int | None = None) -> Reply | None:
        """Stops the current generation and waits until its turn is committed. Any thread may call
        it. A generation of another process stops within 0.25 s.

        All generated tokens stay. A turn that has none leaves the session as it was, with its
        question in `unanswered`; its Reply is empty and has no turn.

        Args:
            turn: stops only the reply that becomes this turn. None: any.

        Returns:
            The reply; None if nothing was being generated.
        """
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

    def follow(self, turn: int | None = None) -> Follower:
        """Returns a reader of the reply that is being generated, which has all of it so far.

        The reply may be generated here or by another process; that one's tokens are read from its
        journal. Without one, the reader has the last reply, complete. Any number of readers may
        follow a reply. If the other process dies, the reply ends with `finish_reason`
        "interrupted", as `continue_()` finds it.

        Args:
            turn: only the reply that becomes, or is, this turn, of any branch. None: any.

        Raises:
            NotFound: there is no such reply, or the session is closed or was deleted.
            StoreError: the session cannot be read.
        """
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

    def undo(self) -> str:
        """Removes the last user turn and its reply from the conversation and returns its text.

        The turn remains in `branches()`. Nothing is generated.

        Raises:
            InvalidRequest: the conversation has no user turn.
        """

        def undo() -> Change[str]:
            users = tree_of.users(self._record)
            if not users:
                raise InvalidRequest("undo: the conversation has no turn, expected at least one")
            return Change(users[-1].text, {"leaf": users[-1].parent})

        return self._change(undo, "undo a turn")

    def branches(self, turn: int) -> list[Branch]:
        """Returns the branches at user turn `turn` (from 0), oldest first.

        The number after the last turn selects the branches that `undo()` left.
        """
        return tree_of.branches(self._record, turn)

    def switch(self, turn: int, index: int) -> None:
        """Switches to the newest conversation of branch `index` of `branches(turn)`."""

        def switch() -> Change[None]:
            found = tree_of.branches(self._record, turn)
            tree_of.check_index("index", index, len(found))
            return Change(None, {"leaf": found[index].leaf})

        self._change(switch, "switch branches")

    def fork(
        self,
        name: str | None = None,
        at: int | None = None,
        *,
        after: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> Session:
        """Creates a session with the first `at` user turns and their replies (None: all), or with
        the conversation that ends with the reply of id `after`, which may be of another branch.

        It has the same settings and shares the pages, so nothing is computed. Works while a reply
        is being generated. `tags` are its tags; None: the same ones.
        """
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

    def append(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        once: Once | None = None,
    ) -> None:
        """Appends messages to the conversation and generates nothing.

        Their text is encoded; a reply that a model generated has other token ids here than there.

        Args:
            messages: `role` and `content`: users and assistants in turn, a user first. A last user
                message without a reply becomes `unanswered`, after what that has. One with `parts`
                is several messages of these lengths, joined by empty lines; the turn's metadata
                has them.
            system: the system prompt from now on, empty for none; None: unchanged.
            once: makes it one change, however often it is called with this key. None: it has no
                key.

        Raises:
            InvalidRequest: the roles do not alternate, or the context is full.
            SessionBusy: a reply is being generated.
        """
        rounds, question = rounds_of_messages(messages)
        place = Place(system=system, rounds=tuple(rounds))
        self._runtime.check_fits(*place.texts, question.text)

        def plan(record: SessionRecord) -> tuple[list[Turn], dict[str, Any]]:
            made, end, _ = starting(self._runtime, record, place)
            waiting = Said(record.unanswered, record.unanswered_parts)
            waiting = question if rounds else waiting.then(question)
            return made, {"leaf": end.leaf, **waiting.unanswered}

        self._add("append messages", plan, once)

    def edit_reply(self, turn: int, text: str, *, once: Once | None = None) -> None:
        """Gives user turn number `turn` (from 0) another reply, as a new branch that ends with it.

        Nothing is generated: the text is encoded. The old reply and what follows it stay as a
        branch. `once` is that of `append()`.

        Raises:
            InvalidRequest: there is no such turn.
            ContextFull: the conversation would be longer than the context.
            SessionBusy: a reply is being generated.
        """
        check_text("text", text)
        self._runtime.check_fits(text)

        def plan(record: SessionRecord) -> tuple[list[Turn], dict[str, Any]]:
            made, end, _ = starting(self._runtime, record, Place())
            reply = reply_to(self._runtime, end, tree_of.user_turn(end, turn), Said(text))
            return [*made, reply], {"leaf": reply.id}

        self._add("edit a reply", plan, once)

    def _add(
        self,
        what: str,
        plan: Callable[[SessionRecord], tuple[list[Turn], dict[str, Any]]],
        once: Once | None,
    ) -> None:
        """Adds turns and changes fields as planned, and plans again if another process was
        faster."""
        self._activity.settle()
        for _ in range(REPLANS):
            with self._lock:
                self._activity.check_idle(what)
                seen, record = self._writer.seen, self._record
            if once is not None and once.is_made(record.keys):
                return
            made, fields = plan(record)
            if once is not None:
                fields = {**fields, "keys": once.added_to(record.keys)}
            self._check_fits(made)
            with contextlib.suppress(Moved):
                self._change(functools.partial(self._move, made, fields, seen), what)
                return
        raise overtaken(self._record)

    def _check_fits(self, made: Sequence[Turn]) -> None:
        if made:
            check_prompt(made[-1].length, self._runtime.core.max_context, "the conversation")

    def conversation(self, reply: int) -> tuple[Turn, ...]:
        """Returns the turns up to the reply of this id, of any branch.

        Raises:
            NotFound: there is no such reply.
        """
        record = self._record
        return tuple(record.tree.path(tree_of.reply_turn(record, reply).id))

    @property
    def replies(self) -> tuple[Turn, ...]:
        """Replies of all branches, the oldest first."""
        return tree_of.replies(self._record)

    def annotate(self, turn: int, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata of the turn of this id.

        Raises:
            NotFound: there is no such turn.
        """
        values = check_mapping("metadata", metadata)

        def annotate() -> Change[None]:
            if turn not in self._record.tree:
                raise NotFound(f"session {self.name!r} has no turn {turn}")
            return Change(None, turns=[replace(self._record.tree.get(turn), metadata=values)])

        self._change(annotate)

    def count_tokens(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
    ) -> int:
        """Returns the length of the prompt that `start_send()` would make of the same arguments, in
        tokens, also if it is longer than the context."""
        check_text("text", text)
        variables = check_mapping("template_variables", template_variables)
        place = _place(after, before, system)
        plan, _ = placed(
            self._runtime, self._record, lambda planner: planner.count(text, variables), place
        )
        return plan.length

    def set_system(self, text: str | None) -> None:
        """Changes the system prompt; None removes it. A conversation that has turns continues as a
        new branch from the root: replies have the same tokens, and the next turn computes all of it
        again."""
        if text is not None:
            check_text("system", text)
            self._runtime.check_fits(text)
        self._activity.settle()
        for _ in range(REPLANS):
            with self._lock:
                self._activity.check_idle("change the system prompt")
                seen = self._writer.seen
                record = self._record
                rounds = rounds_of(record.tree.path(record.leaf))
            made = rebuilt(self._runtime, record, text, rounds)
            with contextlib.suppress(Moved):
                fields = {"leaf": made[-1].id if made else None}
                move = functools.partial(self._move, made, fields, seen)
                self._change(move, "change the system prompt")
                return
        raise overtaken(self._record)

    def refresh(self) -> None:
        """Reads changes that other processes have made. Every method does so by itself.

        Raises:
            NotFound: the session was deleted.
        """
        with self._lock:
            self._activity.check_open()
        self._runtime.worker.call(self._writer.follow)

    # --- life ----------------------------------------------------------------------

    def warm(self) -> None:
        """Starts to load the session's KV into the engine's memory before its next turn. Returns at
        once, and does nothing while a reply is being generated."""
        self._prefetch.begin()

    @property
    def residence(self) -> Residence:
        """Tokens of the transcript that have KV in the engine's memory, in host memory or higher,
        and on disk or higher. None for a conversation of another tokenizer."""
        if self._is_foreign:
            return Residence(0, 0, 0)
        return self._runtime.core.residence(self.token_ids, self.owner)

    def predicted_ttft(self, new_tokens: int = 32) -> float:
        """Returns an estimate of the time to first token, in seconds, of a message of `new_tokens`
        tokens sent now to an idle engine. Returns 0.0 before any measurement, and for a
        conversation of another tokenizer, whose number of tokens the next turn will show."""
        if self._is_foreign:
            return 0.0
        return self._runtime.core.predict_ttft(self.token_ids, new_tokens, self.owner)

    def export(
        self,
        path: str | os.PathLike[str],
        pages: bool = False,
        *,
        force: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> Exported:
        """Writes the session to a file that `ChatEngine.import_()` reads.

        Args:
            path: the file.
            pages: whether the KV is written too.
            force: whether an existing file is replaced.
            notify: called with a sentence about each thing that is left out.

        Raises:
            InvalidRequest: the file exists and `force` is False.
        """
        from lmchat.archive import export_session

        self.refresh()
        with self._runtime.pages.stored(pages) as stored:
            return export_session(
                self._runtime.store, stored, self._record, path, force, notify=notify
            )

    def rename(self, name: str) -> None:
        """Changes the name.

        Raises:
            InvalidRequest: another session of the owner has it.
        """
        with self._lock:
            self._activity.check_open()
        self.refresh()
        self._runtime.worker.call(functools.partial(self._registry.renamed, self, name))

    def pin(self, pinned: bool = True) -> None:
        """Sets whether its pages stay in memory longer than those of other idle sessions."""
        self._set("pinned", bool(pinned))
        with self._lock:
            newest = self._handles.set_retention_priority(
                RETENTION_PINNED if pinned else RETENTION_SESSION
            )
        if newest is not None:  # without the lock, because the engine may take a step to answer
            with contextlib.suppress(NotFound):
                newest.set_retention_priority(self._handles.retention_priority)

    def close(self) -> None:
        """Stops the generation and closes the engine handles. `ChatEngine.session()` opens the
        session again. Idempotent."""
        while not self._context.close() and self.state is not State.CLOSED:
            self._activity.stop()
        self._remote.close()
        with contextlib.suppress(Error):  # the turn stays in the journal
            self._runtime.worker.call(self._writer.settle)
        self._registry.closed(self)

    def delete(self) -> None:
        """Closes and deletes the session.

        Raises:
            NotFound: it was deleted before.
        """
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

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self.name!r}: {self.length} tokens, {self.state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Session cannot be copied or pickled: use fork()")

    # --- storing changes ------------------------------------------------------------------------

    def _move(self, made: list[Turn], fields: Mapping[str, Any], seen: int) -> Change[None]:
        """Adds turns and changes fields, unless the conversation has moved on since."""
        if self._writer.seen != seen:
            raise Moved
        return Change(None, fields, made)


def _used(this: weakref.ref[Session]) -> None:
    session = this()
    if session is not None:
        session._registry.used(session)


def _unjournalled(generation: Generation) -> None:
    generation.lease = None


def _sending(
    text: str,
    settings: GenerationSettings,
    template_variables: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None = None,
) -> MakePlan:
    check_text("text", text)
    variables = check_mapping("template_variables", template_variables)
    return lambda planner: planner.send(text, settings, variables, metadata=metadata)


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


def _editing(turn: int, text: str, settings: GenerationSettings) -> MakePlan:
    check_text("text", text)
    return lambda planner: planner.edit(turn, text, settings)
