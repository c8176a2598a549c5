"""A session: a conversation that keeps its tokens, its branches, and its keys and values."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar, overload

from lmchat.errors import Error, InvalidRequest, NotFound
from lmchat.generation import settings as settings_module
from lmchat.generation.generation import Generation, Reply, ReplyStream
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION, HandleCache
from lmchat.sessions import branches as tree_of
from lmchat.sessions.branches import Branch
from lmchat.sessions.context import SessionContext
from lmchat.sessions.generation_starter import REPLANS, GenerationStarter, MakePlan, overtaken
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.prefetch import Prefetch
from lmchat.sessions.recovery import INTERRUPTED
from lmchat.sessions.rewrite import rebuilt, rounds_of, system_of
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session_writer import Change, Moved
from lmchat.store.protocol import check_mapping, check_name, check_tags
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn
from lmchat.text.prompt import check_history

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lmchat.archive import Exported
    from turbomind import Residence

__all__ = ["Branch", "Registry", "Session", "check_text"]

Result = TypeVar("Result")


class Registry(Protocol):
    """Knows which sessions are open."""

    def opened(self, record: SessionRecord, handles: HandleCache) -> Session:
        """Keeps and opens a fork."""

    def closed(self, session: Session) -> None:
        """Forgets that it is open."""

    def renamed(self, session: Session, name: str) -> None:
        """Moves it to another name."""

    def forget(self, record: SessionRecord) -> None:
        """Deletes it."""


class Session:
    """One conversation. From `ChatEngine.session()`.

    Methods may be called from any thread. One generation at a time: a second one, and verbs that
    would change what is being generated on, raise SessionBusy. After `close()` all raise NotFound.
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
        self._context = context = SessionContext(runtime, record, handles)
        self._runtime, self._record, self._handles = runtime, record, context.handles
        self._activity, self._writer, self._lock = context.activity, context.writer, context.lock
        self._prefetch = Prefetch(context)
        self._starter = GenerationStarter(context)

    # --- what it is ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name, one of its owner's."""
        return self._record.name

    @property
    def owner(self) -> str:
        """Whose it is. Pages are shared only within an owner."""
        return self._record.owner

    @property
    def title(self) -> str:
        """Its own, else the beginning of the first user message. Setting it to an empty text gives
        the latter back."""
        return self._record.title

    @title.setter
    def title(self, title: str) -> None:
        self.set_title(title)

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags, in the order they were given."""
        return self._record.tags

    @property
    def overflow(self) -> str:
        """What happens when a turn does not fit the context: "refuse" or "drop"."""
        return self._record.overflow

    @property
    def interrupted(self) -> bool:
        """Whether the last reply was cut off by the end of its process; `continue_()` goes on."""
        turns = self.turns
        return bool(turns) and turns[-1].finish_reason == INTERRUPTED

    @property
    def unanswered(self) -> str | None:
        """The question of a turn whose process ended before the first token of its reply: it is not
        in the conversation, and can be sent again. None after the next turn."""
        return self._record.unanswered or None

    @property
    def notices(self) -> tuple[str, ...]:
        """What the next reply's notices will begin with: what was damaged when it was opened,
        say."""
        return self._record.notices

    @property
    def state(self) -> State:
        """What it is doing."""
        return self._activity.state

    @property
    def history(self) -> str:
        """The rule for earlier turns: "append" or "template"."""
        return self._record.history

    @property
    def pinned(self) -> bool:
        """Whether its pages stay before others'."""
        return self._record.pinned

    @property
    def settings(self) -> dict[str, Any]:
        """A copy of the session's own generation settings."""
        return dict(self._record.settings)

    @property
    def template_variables(self) -> dict[str, Any]:
        """A copy of what the template gets beside the messages."""
        return dict(self._record.template_variables)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return system_of(self.turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The current conversation: the system prompt if there is one, then users and replies."""
        with self._lock:
            return tuple(self._record.tree.path(self._record.leaf))

    @property
    def token_ids(self) -> list[int]:
        """The transcript: every token of the current conversation."""
        with self._lock:
            return self._record.tree.token_ids(self._record.leaf)

    @property
    def length(self) -> int:
        """Tokens of the transcript."""
        with self._lock:
            leaf = self._record.leaf
            return 0 if leaf is None else self._record.tree.get(leaf).length

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
        """Answers `text`. Settings are those of `lmchat.generation.settings` and override the
        session's, as do `template_variables`: both hold for this answer alone.

        Raises SessionBusy, InvalidRequest, ContextFull, Overloaded, and the error of a generation
        that fails before its first token; the session then is as it was.
        """
        return self._starter.answer(_sending(text, settings, template_variables), stream)

    def stream(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> ReplyStream:
        """As `send()`, but gives the text as it comes."""
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
        """Extends the last reply in place, with the settings and the seed it had. After a stop or a
        length limit the result is what an uninterrupted reply would have been."""
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
        """Answers the last user turn once more, as a new branch with the next attempt."""
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
        """Answers `text` in the place of user turn `turn` (from 0), as a new branch there."""
        return self._starter.answer(_editing(turn, text, settings), stream)

    def start_send(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Generation:
        """`send()` without waiting; for front doors with a way of waiting of their own."""
        return self._starter.start(_sending(text, settings, template_variables))

    def start_continue(self, **settings: Unpack[GenerationSettings]) -> Generation:
        """`continue_()` without waiting."""
        return self._starter.start(lambda planner: planner.continue_(settings))

    def start_retry(self, **settings: Unpack[GenerationSettings]) -> Generation:
        """`retry()` without waiting."""
        return self._starter.start(lambda planner: planner.retry(settings))

    def start_edit(
        self, turn: int, text: str, **settings: Unpack[GenerationSettings]
    ) -> Generation:
        """`edit()` without waiting."""
        return self._starter.start(_editing(turn, text, settings))

    @property
    def running(self) -> Generation | None:
        """The generation under way."""
        return self._activity.generation

    @property
    def ending(self) -> Generation | None:
        """A generation that was asked to stop and has not ended yet. The next verb waits for it;
        those who cannot wait look here."""
        return self._activity.ending

    def stop(self) -> Reply | None:
        """Stops the generation under way and returns when its turn is committed; None when there
        is none. From any thread. Everything produced stays."""
        return self._activity.stop()

    # --- moving in the conversation -------------------------------------------------------------

    def undo(self) -> str:
        """Takes back the last user turn with its reply and returns its text. The turn remains in
        `branches()`; nothing is generated."""

        def undo() -> Change[str]:
            users = tree_of.users(self._record)
            if not users:
                raise InvalidRequest("undo: the conversation has no turn, expected at least one")
            return Change(users[-1].text, {"leaf": users[-1].parent})

        return self._change(undo, "undo a turn")

    def branches(self, turn: int) -> list[Branch]:
        """The ways the conversation went on at user turn `turn`, in the order they were made. The
        turn after the last one has the branches that `undo()` left."""
        with self._lock:
            return tree_of.branches(self._record, turn)

    def switch(self, turn: int, index: int) -> None:
        """Goes to branch `index` of `branches(turn)`, to the end of its newest conversation."""

        def switch() -> Change[None]:
            found = tree_of.branches(self._record, turn)
            tree_of.check_index("branch", index, len(found))
            return Change(None, {"leaf": found[index].leaf})

        self._change(switch, "switch branches")

    def fork(self, name: str | None = None, at: int | None = None) -> Session:
        """A new session with the first `at` user turns and their replies (None: all) and the same
        settings. It shares the pages; nothing is computed. Also while this one generates."""
        if name is not None:
            check_name(name)
        self.refresh()
        with self._lock:
            self._activity.check_open()
            record = tree_of.forked(self._record, name, at)
            length = record.tree.get(record.leaf).length if record.leaf else 0
            handles = self._handles.fork(self._record.tree, record.leaf, length)
        return self._registry.opened(record, handles)

    def set_system(self, text: str | None) -> None:
        """Changes the system prompt. A conversation that has begun continues as a new branch from
        its beginning: its replies keep their tokens, and all of it is computed again by the next
        turn."""
        if text is not None:
            check_text("system", text)
        self._activity.settle()
        for _ in range(REPLANS):
            with self._lock:
                self._activity.check_idle("change the system prompt")
                seen = self._writer.seen
                rounds = rounds_of(self._record.tree.path(self._record.leaf))
            made = rebuilt(self._runtime, self._record, text, rounds)
            with contextlib.suppress(Moved):
                self._change(functools.partial(self._go_to, made, seen), "change the system prompt")
                return
        raise overtaken(self._record)

    def refresh(self) -> None:
        """Takes over what other processes did to the session since its last verb here; every verb
        does that by itself. NotFound when it was deleted."""
        with self._lock:
            self._activity.check_open()
        self._runtime.reader.call(self._writer.follow)

    # --- settings and life ----------------------------------------------------------------------

    def set(self, /, **settings: Unpack[GenerationSettings]) -> None:
        """Changes the session's generation settings; None takes one back to the model's own."""

        def change() -> Change[None]:
            merged = {**self._record.settings, **settings}
            chosen = {name: value for name, value in merged.items() if value is not None}
            return Change(None, {"settings": settings_module.validate(chosen)})

        self._change(change)

    def set_variables(self, /, **variables: Any) -> None:
        """Changes what the template gets beside the messages, such as `enable_thinking`; None takes
        a variable out."""

        def change() -> Change[None]:
            merged = {**self._record.template_variables, **variables}
            chosen = {name: value for name, value in merged.items() if value is not None}
            return Change(None, {"template_variables": chosen})

        self._change(change)

    def set_history(self, history: str) -> None:
        """Changes the rule for earlier turns, "append" or "template", from the next turn on."""
        self._set("history", check_history(history))

    def warm(self) -> None:
        """Begins to bring the session's keys and values up to the engine's memory, because a turn
        is about to come. Never waits, and does nothing while one runs."""
        self._prefetch.begin()

    @property
    def residence(self) -> Residence:
        """Tokens of the transcript whose keys and values are in the engine's memory, in the host's
        or above, and on disk or above."""
        return self._runtime.core.residence(self.token_ids, self.owner)

    def predicted_ttft(self, new_tokens: int = 32) -> float:
        """Seconds to the first token of a reply to a question of so many tokens, if it were sent
        now and alone; an estimate, 0.0 before anything was measured."""
        return self._runtime.core.predict_ttft(self.token_ids, new_tokens, self.owner)

    def export(
        self,
        path: str | os.PathLike[str],
        pages: bool = False,
        *,
        force: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> Exported:
        """Writes it to a file that `ChatEngine.import_()` reads, on request with its keys and
        values. `say` gets a sentence about what is left out. InvalidRequest where the file exists,
        unless `force`."""
        from lmchat.archive import export_session

        self.refresh()
        with self._lock:
            record = replace(self._record, tree=self._record.tree.copy())
        with self._runtime.pages.stored(pages) as stored:
            return export_session(self._runtime.store, stored, record, path, force, say=say)

    def set_title(self, title: str) -> None:
        """Gives it a title of its own; an empty text takes it back."""
        check_text("title", title)
        self._set("own_title", " ".join(title.split()))

    def set_tags(self, tags: Iterable[str]) -> None:
        """Gives it these tags in place of those it has."""
        self._set("tags", check_tags(tags))

    def set_overflow(self, overflow: str) -> None:
        """What happens when a turn does not fit the context: "refuse" raises ContextFull, "drop"
        forgets the oldest turns, down to half the context, and says so in the reply's notices."""
        self._set("overflow", check_overflow(overflow))

    def rename(self, name: str) -> None:
        """Gives it another name; InvalidRequest when that is taken."""
        with self._lock:
            self._activity.check_open()
        self.refresh()
        # Not to be cut in two by Ctrl-C.
        self._runtime.reader.call(functools.partial(self._registry.renamed, self, name))

    def pin(self, pinned: bool = True) -> None:
        """Whether its pages stay in memory before those of other idle sessions."""
        self._set("pinned", bool(pinned))
        with self._lock:
            newest = self._handles.set_retention_priority(
                RETENTION_PINNED if pinned else RETENTION_SESSION
            )
        if newest is not None:  # the engine may take a step to answer: nobody waits for the lock
            with contextlib.suppress(NotFound):
                newest.set_retention_priority(self._handles.retention_priority)

    def close(self) -> None:
        """Stops it and gives up its handles. `ChatEngine.session()` opens it again. Idempotent."""
        while True:
            self.stop()
            with self._lock:
                if self._activity.generation is None:
                    self._activity.state = State.CLOSED
                    self._release_handles(save=not self._writer.is_deleted)
                    break
        with contextlib.suppress(Error):  # it stays in the journal
            self._runtime.reader.call(self._writer.settle)
        self._registry.closed(self)

    def delete(self) -> None:
        """Closes it and forgets it. NotFound when that was done before."""
        self._registry.forget(self._record)
        self.close()

    def forgotten(self) -> None:
        """Reader thread: it was deleted; what it generates is not kept. Used by `ChatEngine`."""
        self._writer.deleted()
        generation = self._activity.generation
        if generation is not None:
            generation.lease = None
            return
        with self._lock:
            self._release_handles(save=False)

    def _release_handles(self, save: bool) -> None:
        self._prefetch.close()
        self._handles.close(save)

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

    # --- keeping what changes -------------------------------------------------------------------

    def _change(self, act: Callable[[], Change[Result]], verb: str | None = None) -> Result:
        """`SessionWriter.change()`; with `verb` only while nothing is generated, and only where the
        conversation has not moved on."""
        if verb is not None:
            self._activity.settle()

        def check() -> None:
            self._activity.check_open() if verb is None else self._activity.check_idle(verb)

        def checked() -> Change[Result]:
            check()
            return act()

        with self._lock:
            check()
        return self._runtime.reader.call(
            lambda: self._writer.change(checked, placed=verb is not None)
        )

    def _set(self, name: str, value: object) -> None:
        self._change(lambda: Change(None, {name: value}))

    def _go_to(self, made: list[Turn], seen: int) -> Change[None]:
        """To a conversation told again, unless it has moved on since."""
        if self._writer.seen != seen:
            raise Moved
        return Change(None, {"leaf": made[-1].id if made else None}, made)


def check_text(what: str, text: object) -> None:
    """InvalidRequest unless it is a text."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{what} is a {type(text).__name__}, expected a text")


def _sending(
    text: str, settings: GenerationSettings, template_variables: Mapping[str, Any] | None
) -> MakePlan:
    check_text("text", text)
    variables = check_mapping("template_variables", template_variables)
    return lambda planner: planner.send(text, settings, variables)


def _editing(turn: int, text: str, settings: GenerationSettings) -> MakePlan:
    check_text("text", text)
    return lambda planner: planner.edit(turn, text, settings)
