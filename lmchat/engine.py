"""`ChatEngine`: one model on this machine, and its sessions."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from lmchat.bundled import find_model, name_of
from lmchat.errors import EngineClosed, Error, InvalidRequest, NotFound, StoreError
from lmchat.generation import settings as settings_module
from lmchat.generation.admission import Admission
from lmchat.generation.generation import Generation, Reply, ReplyStream
from lmchat.generation.idle_prefill import IdlePrefill
from lmchat.generation.reader import Reader
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.state import State
from lmchat.generation.stateless import StatelessGeneration
from lmchat.kv.handle_cache import HandleCache
from lmchat.kv.lower_tiers import LowerTiers, tier_options
from lmchat.kv.page_deletion import free_pages, unfinished
from lmchat.sessions.model_identity import identity
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.rewrite import system_turn
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session import Session, check_text
from lmchat.store.choice import open_store
from lmchat.store.prefixes import Transcript, ends
from lmchat.store.protocol import Store, check_mapping, check_name
from lmchat.store.records import SessionRecord, Summary
from lmchat.store.syncer import Durability
from lmchat.text.prompt import PromptBuilder, check_history
from lmchat.text.template import ChatTemplate
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer
from turbomind import Engine, ModelInfo, Stats
from turbomind.descriptors import explain_open_file_limit
from turbomind.params import token_id_list

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_QUEUE = 256  # requests that can wait for a slot of the batch


@dataclass(frozen=True)
class SessionInfo(Summary):
    """One session in a list.

    `state` is its activity in this process; `busy` names another process that generates in it.
    `turns` counts user turns, `tokens` those of the transcript.
    """

    state: State = State.CLOSED


class ChatEngine:
    """A model and its sessions, for any number of threads.

    A context manager. `close()` stops all generations and stores their tokens.

    Args:
        model: a model folder or a hub name. None, or "memo" if no folder has that name: the small
            model that ships with lmchat.
        store: "disk" (the user's data directory, or $LMCHAT_HOME: sessions outlive the process),
            "memory" (sessions end with this engine), the path of a data directory, or a `Store`.
        persist_pages: whether KV pages of sessions are written to disk beside the store. Needs
            `prefix_reuse`.
        disk_quota: largest size of these pages, in bytes or as a text like "20GiB"; None: no limit.
        max_queue: requests that may wait for a slot of the batch; one more raises Overloaded.
        engine_options: those of `turbomind.Engine`, such as `cache_memory` or `threads`.

    Raises:
        InvalidRequest: an option is out of range.
        NotFound: there is no such model.
        ModelError: the model cannot be loaded.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | Store = "disk",
        persist_pages: bool = True,
        disk_quota: int | str | None = None,
        max_queue: int = MAX_QUEUE,
        **engine_options: Any,
    ) -> None:
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0:
            raise InvalidRequest(f"max_queue is {max_queue!r}, expected an integer of 0 or more")
        self._max_queue = max_queue
        with explain_open_file_limit("the engine"):
            opened, folder, self._owns_store = open_store(store)
            try:
                reuse = engine_options.get("prefix_reuse", True)
                tiers = tier_options(folder if reuse else None, persist_pages, disk_quota)
                self._start(model, opened, tiers, engine_options)
            except BaseException:
                if self._owns_store:
                    opened.close()
                raise
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Session] = {}
        self._unsettled: dict[str, Session] = {}  # closed while the store failed to write, by id
        self._running: set[Generation] = set()
        self._is_closed = False

    def _start(
        self,
        model: str | os.PathLike[str] | None,
        store: Store,
        tiers: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        path = find_model(model)
        self.core = Engine(path, **tiers, **options)
        started: list[Callable[[], object]] = [self.core.close]
        try:
            folder = self.core.info.folder
            tokenizer = Tokenizer.from_folder(folder)
            template = ChatTemplate.from_folder(folder)
            model_settings = settings_module.from_generation_config(
                self.core.info.generation_defaults
            )
            pages = LowerTiers(self.core, tiers.get("page_folder"))
            durability = Durability(store, pages)
            started.append(durability.close)
            reader = Reader(durability.journal)
            started.append(reader.close)
            admission = Admission(
                self.core.max_batch_size,
                self._max_queue,
                busy=lambda: idle_prefill.stop(),
                idle=lambda: idle_prefill.resume(),
            )
            reuse = bool(options.get("prefix_reuse", True))
            idle_prefill = IdlePrefill(
                self.core, reader, lambda: admission.is_idle, durability.soon, reuse
            )
            self._runtime = Runtime(
                core=self.core,
                tokenizer=tokenizer,
                builder=PromptBuilder(tokenizer, template),
                admission=admission,
                idle_prefill=idle_prefill,
                reader=reader,
                store=store,
                durability=durability,
                pages=pages,
                identity=identity(
                    name_of(model),
                    pages.fingerprint,
                    folder,
                    self.core.vocab_size,
                    template.source if template else None,
                ),
                model_settings=model_settings,
            )
        except BaseException:
            for close in started:
                close()
            raise

    # --- sessions --------------------------------------------------------------------------------

    def session(
        self,
        name: str | None = None,
        *,
        system: str | None = None,
        owner: str = "local",
        history: str | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        overflow: str | None = None,
    ) -> Session:
        """Opens the owner's session `name`, or creates it.

        An existing session takes the arguments that are given, except `system`:
        `Session.set_system()` changes that.

        Args:
            name: the name; None: a new session with a generated name.
            system: the system prompt of a new session.
            owner: the owner. Pages are shared only within an owner.
            history: the rule for earlier turns that the template would change, "append" or
                "template"; None: `template_info.default_history`.
            settings: generation settings for all turns.
            template_variables: variables that the template gets beside the messages.
            overflow: "refuse" or "drop" if a turn does not fit the context, see
                `Session.set_overflow()`. Default of a new session: "refuse".

        Raises:
            InvalidRequest: an argument is out of range, or `system` differs from that of an
                existing session.
        """
        check_text("owner", owner)
        if name is not None:
            check_name(name)
        if system is not None:
            check_text("system", system)
        given = settings_module.validate(check_mapping("settings", settings))
        variables = check_mapping("template_variables", template_variables)
        if overflow is not None:
            check_overflow(overflow)
        if history is None:
            fresh = self._runtime.builder.info.default_history
        else:
            fresh = check_history(history)
        record = SessionRecord(
            name=name or "",
            owner=owner,
            history=fresh,
            settings=given,
            template_variables=variables,
            overflow=overflow or "refuse",
            model=self._runtime.identity.model,
        )
        if system is not None:
            turn = system_turn(record.tree, system)
            self._runtime.builder.check_system([turn])
            record = record.changed([turn], leaf=turn.id)
        # The reader thread does it, so that Ctrl-C cannot interrupt it halfway.
        found, is_new = self._runtime.reader.call(lambda: self._find_or_add(record))
        if is_new:
            return found
        if system is not None and system != found.system:
            raise InvalidRequest(
                f"system: session {name!r} has another one, expected none or the same; use "
                "set_system()"
            )
        if any(found.settings.get(k) != v for k, v in given.items()):
            found.set(**given)
        if any(found.template_variables.get(k) != v for k, v in variables.items()):
            found.set_variables(**variables)
        if history is not None and history != found.history:
            found.set_history(history)
        if overflow is not None and overflow != found.overflow:
            found.set_overflow(overflow)
        return found

    def _find_or_add(self, record: SessionRecord) -> tuple[Session, bool]:
        """Returns the session of the record's name, and whether it was added."""
        with self._lock:
            self._check_open()
            found = self._find(record.owner, record.name) if record.name else None
            return (self._add(record), True) if found is None else (found, False)

    def _find(self, owner: str, name: str) -> Session | None:
        """Returns the session of that name in its current state, or None. Other processes may have
        created, renamed or deleted it since it was opened here."""
        session = self._open.get((owner, name))
        if session is not None and session.state is not State.CLOSED:
            with contextlib.suppress(NotFound):
                session._writer.follow()
                if session.name == name:
                    return session
                self._open[owner, session.name] = session
            del self._open[owner, name]
        record = self._runtime.store.find(owner, name)
        if record is None:
            return None
        opened = next((s for s in self._open.values() if s._record.id == record.id), None)
        if record.id in self._unsettled:  # otherwise the next turn would empty its journal
            self._unsettled[record.id]._writer.settle()
            del self._unsettled[record.id]
            return self._find(owner, name)
        if opened is not None and opened.state is not State.CLOSED:
            opened._writer.follow()  # another process has renamed it
            self._move(opened)
            return opened
        session = Session(self._runtime, record, self)
        session._writer.follow()
        self._open[owner, name] = session
        return session

    def _add(self, record: SessionRecord, handles: HandleCache | None = None) -> Session:
        store = self._runtime.store
        record = store.add(record) if record.name else store.add_numbered(record)
        session = Session(self._runtime, record, self, handles)
        session.fresh = True
        self._open[record.owner, record.name] = session
        return session

    def _move(self, session: Session) -> None:
        for key, found in list(self._open.items()):
            if found is session:
                del self._open[key]
        self._open[session.owner, session.name] = session

    def sessions(
        self,
        owner: str | None = None,
        *,
        search: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
    ) -> list[SessionInfo]:
        """Lists the sessions, all or an owner's, without reading their turns.

        The last used comes first; with `search`, the best match.
        """
        for what, text in (("owner", owner), ("search", search), ("tag", tag)):
            if text is not None:
                check_text(what, text)
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise InvalidRequest(f"limit is {limit!r}, expected an integer of 0 or more, or None")
        found = self._runtime.store.summaries(owner, search=search, tag=tag, limit=limit)
        states = {session._record.id: session.state for session in list(self._open.values())}
        return [
            SessionInfo(
                state=states.get(summary.id, State.CLOSED),
                **{f.name: getattr(summary, f.name) for f in fields(Summary)},
            )
            for summary in found
        ]

    def delete(self, name: str, owner: str = "local") -> None:
        """Stops and deletes a session, and frees pages on disk that no other session of its owner
        has.

        Raises:
            NotFound: the owner has no such session.
        """
        record = self._runtime.reader.call(lambda: self._stored(owner, name))
        if record is None:
            raise NotFound(f"no session {name!r}")
        self.forget(record)

    def _stored(self, owner: str, name: str) -> SessionRecord | None:
        """Returns the stored session. A damaged one has only its id, which suffices to delete
        it."""
        store = self._runtime.store
        try:
            return store.find(owner, name)
        except StoreError:
            for one in store.summaries(owner):
                if one.name == name:
                    return SessionRecord(name, owner, "append", id=one.id)
            raise

    def forget(self, record: SessionRecord) -> None:
        """Deletes a session. Used by `Session.delete()`."""
        session, ids = self._runtime.reader.call(lambda: self._remove(record))
        if session is not None:
            session.close()
            ids += ends(session._record)  # with the tokens generated meanwhile
        free_pages(self._runtime, record.owner, ids)

    def _remove(self, record: SessionRecord) -> tuple[Session | None, list[Transcript]]:
        with self._lock:
            ids = ends(record) + unfinished(self._runtime.store, record)
            self._runtime.store.remove(record)
            ids += self._runtime.idle_prefill.forget(record.id)
            session = next((s for s in self._open.values() if s._record.id == record.id), None)
            if session is not None:  # another process may have renamed it
                self._open = {key: s for key, s in self._open.items() if s is not session}
                session.forgotten()
            return session, ids

    def opened(self, record: SessionRecord, handles: HandleCache) -> Session:
        """Registers a fork. Used by `Session.fork()`."""

        def add() -> Session:
            with self._lock:
                self._check_open()
                return self._add(record, handles)

        try:
            return self._runtime.reader.call(add)
        except Exception:
            handles.close()
            raise

    def closed(self, session: Session) -> None:
        """Records that a session has closed. Used by `Session.close()`."""
        self._runtime.reader.call(lambda: self._forget_closed(session))

    def _forget_closed(self, session: Session) -> None:
        with self._lock:
            for key, found in list(self._open.items()):
                if found is session:
                    del self._open[key]
        self._runtime.idle_prefill.forget(session._record.id)
        if session._writer.is_unsettled:
            self._unsettled[session._record.id] = session
        if session.fresh:
            with contextlib.suppress(Error):
                session._writer.follow()
                if session._writer.is_empty:  # an empty session is of no use
                    self._runtime.store.remove(session._record)

    def renamed(self, session: Session, name: str) -> None:
        """Gives a session another name. Used by `Session.rename()`."""
        with self._lock:
            session._writer.rename(name)
            self._move(session)

    def import_(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        owner: str = "local",
        notify: Callable[[str], None] | None = None,
    ) -> Session:
        """Imports a session that `Session.export()` wrote, with its KV if the file has it.

        Args:
            path: the file.
            name: name of the new session; None: the name it had.
            owner: owner of the new session.
            notify: called with a sentence about each thing that is left out.

        Raises:
            InvalidRequest: the file is not valid, or the name is taken.
        """
        from lmchat.archive import import_session

        check_text("owner", owner)
        self._check_open()
        runtime = self._runtime
        with runtime.pages.stored() as stored:
            record = import_session(
                runtime.store,
                stored,
                path,
                name,
                owner,
                fingerprint=runtime.identity.fingerprint,
                vocab_size=self.core.vocab_size,
                notify=notify,
            )
        runtime.pages.refresh()
        return self.session(record.name, owner=owner)

    # --- without a session -----------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> Reply:
        """Continues a text or token ids, without a template and without a session.

        Spellings of special tokens in a text become these tokens here, unlike in a session.

        Args:
            prompt: a text or token ids.
            owner: the owner. Pages are shared only within an owner.
            settings: see `StatelessSettings`. With `n`, `Reply.others` has the choices after the
                first one.

        Raises:
            InvalidRequest: an argument is out of range.
            Overloaded: the queue is full.
        """
        request = self._stateless(prompt, owner, settings)
        replies = ReplyStream(request.generation)
        try:
            request.enter()
            return replies.result()
        except KeyboardInterrupt:
            request.generation.cancel()
            raise

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> ReplyStream:
        """Continues a prompt as `generate()` does, and returns its stream."""
        request = self._stateless(prompt, owner, settings)
        replies = ReplyStream(request.generation)
        request.enter()
        return replies

    def start_generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> Generation:
        """Starts `generate()` and returns its generation without waiting."""
        request = self._stateless(prompt, owner, settings)
        request.enter()
        return request.generation

    def _stateless(
        self, prompt: str | Iterable[int], owner: str, settings: StatelessSettings
    ) -> StatelessGeneration:
        check_text("owner", owner)
        self._check_open()
        ids = self._ids(prompt)
        if not ids:
            raise InvalidRequest("prompt is empty, expected at least one token")
        effective = settings_module.merge(
            settings, {}, self._runtime.model_settings, stateless=True
        )
        return StatelessGeneration(
            self._runtime, ids, effective, owner, self._begins, self._running.discard
        )

    def _begins(self, generation: Generation) -> None:
        self._running.add(generation)  # before the check: `close()` sees it, or the check raises
        self._check_open()

    def score(self, prompt: str | Iterable[int]) -> list[float]:
        """Returns the log-probability of each token after the first, given the tokens before it."""
        ids = self._ids(prompt)
        with self._runtime.idle_prefill.held():
            return self.core.score(ids)

    def _ids(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._runtime.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"prompt is {prompt!r}, expected a text or token ids")
        return token_id_list(prompt, self.core.vocab_size)

    # --- properties ------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._runtime.tokenizer

    @property
    def template_info(self) -> TemplateInfo:
        """Kind of the model's chat template, and the rules that follow from it."""
        return self._runtime.builder.info

    @property
    def model_settings(self) -> dict[str, Any]:
        """Generation settings of the model's own configuration."""
        return dict(self._runtime.model_settings)

    @property
    def model(self) -> str:
        """Name of the model in lists of sessions: a folder's path, a hub name, or "memo"."""
        return self._runtime.identity.model

    @property
    def info(self) -> ModelInfo:
        """Properties of the model."""
        return self.core.info

    @property
    def max_context(self) -> int:
        """Largest length of a conversation, in tokens."""
        return self.core.max_context

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot of the batch."""
        return self._runtime.admission.waiting

    def stats(self) -> Stats:
        """Returns the engine's counters."""
        return self.core.stats()

    def profile(self, on: bool = True) -> None:
        """Starts the profiler of `stats().ops` with an empty table, or stops it."""
        self.core.profile(on)

    def close(self) -> None:
        """Stops all generations, commits their tokens, and ends the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            sessions = list(self._open.values())
            generations = list(self._running)
        generations += [running for s in sessions if (running := s.running) is not None]
        for generation in generations:
            generation.cancel()
        for session in sessions:
            session.close()
        for generation in generations:
            generation.wait()
        self._record_speeds()
        self.core.close()
        self._runtime.durability.close()
        self._runtime.reader.close()
        if self._owns_store:
            self._runtime.store.close()

    def _record_speeds(self) -> None:
        """Stores the measured speeds, for lists that are made without an engine."""
        runtime = self._runtime
        if runtime.pages.persist:
            with contextlib.suppress(Error):
                recorded = runtime.store.noted("speeds") or {}
                speeds = {**recorded, runtime.identity.fingerprint: self.core.speeds()}
                runtime.store.note("speeds", speeds)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the chat engine has been closed")

    def __enter__(self) -> ChatEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ChatEngine cannot be copied or pickled: it owns threads and memory")
