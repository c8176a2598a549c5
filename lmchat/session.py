"""A session: a conversation that keeps its tokens, its branches, and its keys and values."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol, overload

from lmchat import settings as settings_module
from lmchat.errors import ContextFull, InvalidRequest, NotFound, SessionBusy
from lmchat.generation import Generation, Reply, ReplyStream
from lmchat.kept_kv import KEEP_PINNED, KEEP_SESSION, KeptKV
from lmchat.planner import Plan, Planner
from lmchat.runtime import Runtime
from lmchat.state import State, move
from lmchat.store import SessionRecord, check_name
from lmchat.text.prompt import check_history
from lmchat.turn_run import TurnRun
from lmchat.turns import Message, Turn


@dataclass(frozen=True)
class Branch:
    """One way a conversation went on at a user turn. `leaf` is the end of its newest conversation,
    `active` says whether the session is on it."""

    index: int
    turn: Turn
    reply: Turn
    leaf: int
    active: bool


class Registry(Protocol):
    """Knows which sessions are open."""

    def opened(self, record: SessionRecord, kept: KeptKV) -> Session:
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
        kept: KeptKV | None = None,
    ) -> None:
        self._runtime = runtime
        self._record = record
        self._registry = registry
        self._lock = threading.RLock()
        self._state = State.IDLE
        self._planner = Planner(runtime, record)
        self._generation: Generation | None = None
        self._kept = kept or KeptKV(
            runtime.core, record.owner, KEEP_PINNED if record.pinned else KEEP_SESSION
        )

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
        """The beginning of the first user message."""
        return self._record.title

    @property
    def state(self) -> State:
        """What it is doing."""
        return self._state

    @property
    def history(self) -> str:
        """The rule for earlier turns: "keep" or "template"."""
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
        path = self.turns
        return path[0].text if path and path[0].role == "system" else None

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
            return self._length()

    # --- generating ----------------------------------------------------------------------------

    @overload
    def send(self, text: str, *, stream: Literal[False] = False, **settings: Any) -> Reply: ...
    @overload
    def send(self, text: str, *, stream: Literal[True], **settings: Any) -> ReplyStream: ...
    @overload
    def send(self, text: str, *, stream: bool, **settings: Any) -> Reply | ReplyStream: ...
    def send(self, text: str, *, stream: bool = False, **settings: Any) -> Reply | ReplyStream:
        """Answers `text`. Settings are those of `lmchat.settings` and come before the session's.

        Raises SessionBusy, InvalidRequest, ContextFull, Overloaded, and the error of a generation
        that fails before its first token; the session then is as it was.
        """
        return self._answer(self._sending(text, settings), stream)

    def stream(self, text: str, **settings: Any) -> ReplyStream:
        """As `send()`, but gives the text as it comes."""
        return self._answer(self._sending(text, settings), stream=True)

    @overload
    def continue_(self, *, stream: Literal[False] = False, **settings: Any) -> Reply: ...
    @overload
    def continue_(self, *, stream: Literal[True], **settings: Any) -> ReplyStream: ...
    @overload
    def continue_(self, *, stream: bool, **settings: Any) -> Reply | ReplyStream: ...
    def continue_(self, *, stream: bool = False, **settings: Any) -> Reply | ReplyStream:
        """Extends the last reply in place, with the settings and the seed it had. After a stop or a
        length limit the result is what an uninterrupted reply would have been."""
        return self._answer(lambda: self._planner.continue_(settings), stream)

    @overload
    def retry(self, *, stream: Literal[False] = False, **settings: Any) -> Reply: ...
    @overload
    def retry(self, *, stream: Literal[True], **settings: Any) -> ReplyStream: ...
    @overload
    def retry(self, *, stream: bool, **settings: Any) -> Reply | ReplyStream: ...
    def retry(self, *, stream: bool = False, **settings: Any) -> Reply | ReplyStream:
        """Answers the last user turn once more, as a new branch with the next attempt."""
        return self._answer(lambda: self._planner.retry(settings), stream)

    @overload
    def edit(
        self, turn: int, text: str, *, stream: Literal[False] = False, **settings: Any
    ) -> Reply: ...
    @overload
    def edit(
        self, turn: int, text: str, *, stream: Literal[True], **settings: Any
    ) -> ReplyStream: ...
    @overload
    def edit(
        self, turn: int, text: str, *, stream: bool, **settings: Any
    ) -> Reply | ReplyStream: ...
    def edit(
        self, turn: int, text: str, *, stream: bool = False, **settings: Any
    ) -> Reply | ReplyStream:
        """Answers `text` in the place of user turn `turn` (from 0), as a new branch there."""
        return self._answer(self._editing(turn, text, settings), stream)

    def start_send(self, text: str, **settings: Any) -> Generation:
        """`send()` without waiting; for front doors with a way of waiting of their own."""
        return self._start(self._new_run(), self._sending(text, settings))

    def start_continue(self, **settings: Any) -> Generation:
        """`continue_()` without waiting."""
        return self._start(self._new_run(), lambda: self._planner.continue_(settings))

    def start_retry(self, **settings: Any) -> Generation:
        """`retry()` without waiting."""
        return self._start(self._new_run(), lambda: self._planner.retry(settings))

    def start_edit(self, turn: int, text: str, **settings: Any) -> Generation:
        """`edit()` without waiting."""
        return self._start(self._new_run(), self._editing(turn, text, settings))

    @property
    def running(self) -> Generation | None:
        """The generation under way."""
        return self._generation

    @property
    def ending(self) -> Generation | None:
        """A generation that was asked to stop and has not ended yet. The next verb waits for it;
        those who cannot wait look here."""
        generation = self._generation
        return generation if generation is not None and generation.cancelled else None

    def stop(self) -> Reply | None:
        """Stops the generation under way and returns when its turn is committed; None when there
        is none. From any thread. Everything produced stays."""
        generation = self._generation
        if generation is None:
            return None
        generation.cancel()
        generation.wait()
        return generation.reply

    # --- moving in the conversation -------------------------------------------------------------

    def undo(self) -> str:
        """Takes back the last user turn with its reply and returns its text. The turn remains in
        `branches()`; nothing is generated."""
        self._settle()
        with self._lock:
            self._check_idle("undo a turn")
            users = self._users()
            if not users:
                raise InvalidRequest("undo: the conversation has no turn, expected at least one")
            self._record.leaf = users[-1].parent
            return users[-1].text

    def branches(self, turn: int) -> list[Branch]:
        """The ways the conversation went on at user turn `turn`, in the order they were made. The
        turn after the last one has the branches that `undo()` left."""
        with self._lock:
            tree, path = self._record.tree, set(self._path_ids())
            parent = self._record.leaf
            if turn != len(self._users()):
                parent = self._user_turn(turn).parent
            found = [
                (user, reply)
                for user in self._alternatives(parent)
                for reply in tree.children(user.id)
            ]
            return [
                Branch(index, user, reply, tree.newest_leaf(reply.id).id, reply.id in path)
                for index, (user, reply) in enumerate(found)
            ]

    def switch(self, turn: int, index: int) -> None:
        """Goes to branch `index` of `branches(turn)`, to the end of its newest conversation."""
        self._settle()
        with self._lock:
            self._check_idle("switch branches")
            branches = self.branches(turn)
            _check_index("branch", index, len(branches))
            self._record.leaf = branches[index].leaf

    def fork(self, name: str | None = None, at: int | None = None) -> Session:
        """A new session with the first `at` user turns and their replies (None: all) and the same
        settings. It shares the pages; nothing is computed. Also while this one generates."""
        if name is not None:
            check_name(name)
        with self._lock:
            self._check_open()
            path = self._record.tree.path(self._record.leaf)
            if at is not None:
                users = self._users()
                _check_index("at", at, len(users) + 1)
                if at < len(users):
                    path = path[: path.index(users[at])]
            record = SessionRecord(
                name=name or "",
                owner=self._record.owner,
                history=self._record.history,
                settings=copy.deepcopy(self._record.settings),
                template_variables=copy.deepcopy(self._record.template_variables),
                created=self._record.created,
            )
            for turn in path:
                record.tree.adopt(turn)
            last = path[-1] if path else None
            record.leaf = last.id if last else None
            length = last.length if last else 0
            kept = self._kept.fork(self._record.tree, record.leaf, length)
        return self._registry.opened(record, kept)

    def set_system(self, text: str | None) -> None:
        """Changes the system prompt. A conversation that has begun continues as a new branch from
        its beginning: its replies keep their tokens, and all of it is computed again by the next
        turn."""
        if text is not None:
            check_text("system", text)
        self._settle()
        with self._lock:
            self._check_idle("change the system prompt")
            old = self._record.tree.path(self._record.leaf)
            made: list[Turn] = []
            try:
                if text is not None:
                    made.append(self._add_system(text))
                    self._runtime.builder.check_system(made)
                for turn in old:
                    parent = made[-1].id if made else None
                    if turn.role == "user":
                        user = self._planner.user_under(parent, turn.text)[0]
                        made.append(self._record.tree.add(user))
                    elif turn.role == "assistant":
                        made.append(self._copy_reply(turn, made[-1]))
            except BaseException:
                for turn in reversed(made):
                    self._record.tree.remove(turn.id)
                raise
            self._record.leaf = made[-1].id if made else None

    # --- settings and life ----------------------------------------------------------------------

    def set(self, /, **settings: Any) -> None:
        """Changes the session's generation settings; None takes one back to the model's own."""
        with self._lock:
            self._check_open()
            merged = {**self._record.settings, **settings}
            self._record.settings = settings_module.validate(
                {name: value for name, value in merged.items() if value is not None}
            )

    def set_variables(self, /, **variables: Any) -> None:
        """Changes what the template gets beside the messages, such as `enable_thinking`; None takes
        a variable out."""
        with self._lock:
            self._check_open()
            merged = {**self._record.template_variables, **variables}
            self._record.template_variables = {k: v for k, v in merged.items() if v is not None}

    def set_history(self, history: str) -> None:
        """Changes the rule for earlier turns, "keep" or "template", from the next turn on."""
        with self._lock:
            self._check_open()
            self._record.history = check_history(history)

    def rename(self, name: str) -> None:
        """Gives it another name; InvalidRequest when that is taken."""
        with self._lock:
            self._check_open()
        # Not to be cut in two by Ctrl-C.
        self._runtime.reader.call(functools.partial(self._registry.renamed, self, name))

    def pin(self, pinned: bool = True) -> None:
        """Whether its pages stay in memory before those of other idle sessions."""
        with self._lock:
            self._check_open()
            self._record.pinned = bool(pinned)
            newest = self._kept.set_keep_value(KEEP_PINNED if pinned else KEEP_SESSION)
        if newest is not None:  # the engine may take a step to answer: nobody waits for the lock
            with contextlib.suppress(NotFound):
                newest.set_keep_value(self._kept.keep_value)

    def close(self) -> None:
        """Stops it and gives up its handles. `ChatEngine.session()` opens it again. Idempotent."""
        while True:
            self.stop()
            with self._lock:
                if self._generation is None:
                    self._state = State.CLOSED
                    self._kept.close()
                    break
        self._registry.closed(self)

    def delete(self) -> None:
        """Closes it and forgets it. NotFound when that was done before."""
        self._registry.forget(self._record)
        self.close()

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

    # --- one generation -------------------------------------------------------------------------

    def _new_run(self) -> TurnRun:
        return TurnRun(
            self._runtime, self._record, self._kept, self._lock, self._moved, self._ended
        )

    @overload
    def _answer(self, make_plan: Callable[[], Plan], stream: Literal[True]) -> ReplyStream: ...
    @overload
    def _answer(self, make_plan: Callable[[], Plan], stream: bool) -> Reply | ReplyStream: ...
    def _answer(self, make_plan: Callable[[], Plan], stream: bool) -> Reply | ReplyStream:
        run = self._new_run()
        replies = ReplyStream(run.generation)
        try:
            self._start(run, make_plan)
            return replies if stream else replies.result()
        except KeyboardInterrupt as interrupt:
            if self._generation is run.generation:
                run.generation.abort(interrupt)
            raise

    def _start(self, run: TurnRun, make_plan: Callable[[], Plan]) -> Generation:
        self._settle()
        generation = run.generation
        try:
            with self._lock:
                self._check_idle("generate")
                self._generation = generation  # first: from here on it is ended below
                self._state = move(self._state, State.QUEUED)
            plan = make_plan()
            limit = self._runtime.core.max_context
            if plan.length >= limit:
                raise ContextFull(
                    f"the conversation would be {plan.length} tokens long, expected less than "
                    f"{limit}, the context"
                )
            run.enter(plan)
        except BaseException as error:
            if self._generation is generation:
                generation.abort(error)
            raise
        return generation

    def _sending(self, text: str, settings: dict[str, Any]) -> Callable[[], Plan]:
        check_text("text", text)
        return lambda: self._planner.user(self._record.leaf, text, settings)

    def _editing(self, turn: int, text: str, settings: dict[str, Any]) -> Callable[[], Plan]:
        check_text("text", text)
        return lambda: self._planner.user(self._user_turn(turn).parent, text, settings)

    def _add_system(self, text: str) -> Turn:
        tree = self._record.tree
        message: Message = {"role": "system", "content": text}
        return tree.add(Turn(tree.new_id(), None, "system", text, message))

    def _copy_reply(self, reply: Turn, user: Turn) -> Turn:
        tree = self._record.tree
        length = user.length + len(reply.token_ids)
        turn = replace(reply, id=tree.new_id(), parent=user.id, keep=user.length, length=length)
        return tree.add(turn)

    def _moved(self, state: State) -> None:
        with self._lock:
            self._state = move(self._state, state)

    def _ended(self) -> None:
        with self._lock:
            if self._state is not State.IDLE:
                self._state = move(self._state, State.IDLE)
            self._generation = None

    # --- small things ---------------------------------------------------------------------------

    def _alternatives(self, parent: int | None) -> list[Turn]:
        """User turns under `parent`; at the beginning those under any system prompt."""
        tree, roots = self._record.tree, self._record.tree.children(None)
        systems = [turn.id for turn in roots if turn.role == "system"]
        parents = [None, *systems] if parent is None or parent in systems else [parent]
        return [turn for p in parents for turn in tree.children(p) if turn.role == "user"]

    def _length(self) -> int:
        leaf = self._record.leaf
        return 0 if leaf is None else self._record.tree.get(leaf).length

    def _path_ids(self) -> list[int]:
        return [turn.id for turn in self._record.tree.path(self._record.leaf)]

    def _users(self) -> list[Turn]:
        return [t for t in self._record.tree.path(self._record.leaf) if t.role == "user"]

    def _user_turn(self, turn: int) -> Turn:
        users = self._users()
        _check_index("turn", turn, len(users))
        return users[turn]

    def _settle(self) -> None:
        generation = self.ending
        if generation is not None:
            generation.cancel()  # once more: whoever asked may have been interrupted
            generation.wait()

    def _check_open(self) -> None:
        if self._state is State.CLOSED:
            raise NotFound(f"session {self.name!r} is closed")

    def _check_idle(self, verb: str) -> None:
        self._check_open()
        if self._state is not State.IDLE:
            raise SessionBusy(
                f"cannot {verb}: session {self.name!r} is generating ({self._state}); stop it first"
            )


def check_text(what: str, text: object) -> None:
    """InvalidRequest unless it is a text."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{what} is a {type(text).__name__}, expected a text")


def _check_index(what: str, index: object, count: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        expected = f"an integer from 0 to {count - 1}" if count else "nothing: there is none"
        raise InvalidRequest(f"{what} is {index!r}, expected {expected}")
