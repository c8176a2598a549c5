"""`ChatEngine`: one model on this machine, and its sessions."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from typing_extensions import Unpack, override

from lmchat.bundled import find_model, name_of
from lmchat.conversations.conversations import Conversations
from lmchat.errors import EngineClosed, Error, NotFound
from lmchat.forks import watch
from lmchat.generation import settings as settings_module
from lmchat.generation.admission import MAX_QUEUE, MAX_WAIT, Admission, check_queue
from lmchat.generation.generation import Generation
from lmchat.generation.idle_prefill import IdlePrefill
from lmchat.generation.observer import Observer
from lmchat.generation.reader import Reader
from lmchat.generation.scoring import Scoring
from lmchat.generation.state import State
from lmchat.generation.ticket import QueueStats
from lmchat.generation.worker import Worker
from lmchat.interface.engine import SessionInfo
from lmchat.kv.lower_tiers import LowerTiers, tier_options
from lmchat.sessions.model_identity import identity
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.registry import IDLE_CLOSE, MAX_OPEN, SessionRegistry, check_limits
from lmchat.sessions.rewrite import system_turn
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session import Session
from lmchat.stateless import StatelessVerbs
from lmchat.store.choice import open_store
from lmchat.store.protocol import (
    Store,
    check_mapping,
    check_metadata,
    check_name,
    check_tags,
    check_text,
)
from lmchat.store.records import HIDDEN_TAG, SessionRecord, Summary
from lmchat.store.syncer import Durability
from lmchat.text.model_text import read_text, tokenizer_digest
from lmchat.text.prompt import PromptBuilder, check_history
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer
from turbomind import Engine, Forecast, ModelInfo, Residence, Stats
from turbomind.config.engine_options import ChatEngineOptions
from turbomind.config.limits import explain_limits
from turbomind.params import refuse_unknown, wrong
from turbomind.shown import shown

_SWEEP_SECONDS = 5.0  # between two looks for sessions to close


class _Part(Protocol):
    def close(self) -> object: ...


class ChatEngine(StatelessVerbs):
    """An `EngineApi` of this process: a model, and the sessions of a data directory.

    Args:
        model: a model folder, a GGUF file or a hub name. None, or "memo" if no folder has that
            name: the small model that ships with lmchat.
        store: "disk" (the user's data directory, or $LMCHAT_HOME: sessions outlive the process),
            "memory" (sessions end with this engine), the path of a data directory, or a `Store`.
        persist_pages: whether KV pages of sessions are written to disk beside the store. Needs
            `prefix_reuse`.
        disk_quota: largest size of these pages, in bytes or as a text like "20GiB". "auto": a tenth
            of what is free or taken by them already, at least 1 GiB, and 5 GiB (or a twentieth of a
            smaller file system) stay free. None: no limit.
        max_queue: requests that may wait for a slot of the batch. One more raises Overloaded,
            unless its owner is below its share: then the newest one of the owner furthest above its
            share ends with that error.
        max_wait: largest predicted time to the first token of an accepted request, in seconds. A
            request that would wait longer raises Overloaded.
        idle_close: seconds without use after which a session that no caller holds is closed; its
            next use opens it again. None: no limit.
        max_open_sessions: sessions that stay open without a caller, at least 1; the least recently
            used are closed first. Pinned and generating ones stay, and do not count.
        engine_options: those of `turbomind.ChatEngineOptions`, such as `cache_memory`.

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
        disk_quota: int | str | None = "auto",
        max_queue: int = MAX_QUEUE,
        max_wait: float = MAX_WAIT,
        idle_close: float | None = IDLE_CLOSE,
        max_open_sessions: int = MAX_OPEN,
        **engine_options: Unpack[ChatEngineOptions],
    ) -> None:
        check_queue(max_queue, max_wait)
        check_limits(idle_close, max_open_sessions)
        refuse_unknown("engine option", engine_options, ChatEngineOptions.__annotations__)
        self._max_queue, self._max_wait = max_queue, float(max_wait)
        super().__init__()
        watch(self)
        with explain_limits("the engine"):
            opened, folder, self._owns_store = open_store(store)
            try:
                reuse = engine_options.get("prefix_reuse", True)
                tiers = tier_options(folder if reuse else None, persist_pages, disk_quota)
                self._start(model, opened, tiers, dict(engine_options))
            except BaseException:
                if self._owns_store:
                    opened.close()
                raise
        self._registry = SessionRegistry(self._runtime, idle_close, max_open_sessions)
        self._running: set[Generation | Scoring] = set()
        self._is_closed = False

    def _start(
        self,
        model: str | os.PathLike[str] | None,
        store: Store,
        tiers: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        path = find_model(model)
        # A file of digests may be named, which else is beside the store.
        self.core = Engine(path, **{**tiers, **options})
        started: list[Callable[[], object]] = [self.core.close]
        try:
            info = self.core.info
            text = read_text(info)
            template = text.template
            builder = PromptBuilder(text.tokenizer, template, info.eos_token_ids)
            self.core.eos_token_ids = builder.end_token_ids
            model_settings = settings_module.from_generation_config(info.generation_defaults)
            pages = LowerTiers(self.core, tiers.get("page_folder"), tiers.get("disk_quota"))
            durability = Durability(store, pages)
            started.append(durability.close)
            reader = Reader()
            started.append(reader.close)
            session_reader = Reader(durability.journal)
            started.append(session_reader.close)
            worker = Worker(functools.partial(_sweep, weakref.ref(self)), _SWEEP_SECONDS)
            started.append(worker.close)
            admission = Admission(
                self.core.max_batch_size,
                self._max_queue,
                busy=lambda: idle_prefill.stop(),
                idle=lambda: reader.later(lambda: idle_prefill.resume()),
                max_wait=self._max_wait,
            )
            reuse = bool(options.get("prefix_reuse", True))
            idle_prefill = IdlePrefill(
                self.core, reader, lambda: admission.is_idle, durability.soon, reuse
            )
            builder.tokenizer.rows = self.core.vocab_size
            self._runtime = Runtime(
                core=self.core,
                tokenizer=builder.tokenizer,
                builder=builder,
                admission=admission,
                idle_prefill=idle_prefill,
                reader=reader,
                session_reader=session_reader,
                worker=worker,
                store=store,
                durability=durability,
                pages=pages,
                identity=identity(
                    name_of(model),
                    pages.fingerprint,
                    tokenizer_digest(info, self.core.vocab_size),
                    template.source if template else None,
                    options,
                ),
                model_settings=model_settings,
            )
            self._conversations = Conversations(self._runtime, reuse)
            parts: list[_Part] = [self.core, reader, session_reader, durability]
            parts += [store] if self._owns_store else []
            # Sessions and replies hold the runtime too, so it goes with the last of them. A
            # finalizer must not wait: it only posts the work.
            ends = worker.poster(functools.partial(_close_all, parts, worker))
            self._dropped = weakref.finalize(self._runtime, ends, None)
            self._dropped.atexit = False
        except BaseException:
            for close in started:
                close()
            raise

    # --- sessions --------------------------------------------------------------------------------

    @override
    def session(
        self,
        name: str | None = None,
        *,
        system: str | None = None,
        owner: str | None = None,
        history: str | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        overflow: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Session:
        owner = self._owner_of(owner)
        if name is not None:
            check_name(name)
        if system is not None:
            check_text("system", system)
            self._runtime.check_fits(system)
        given = self._runtime.session_settings(check_mapping("settings", settings))
        variables = check_mapping("template_variables", template_variables)
        if overflow is not None:
            check_overflow(overflow)
        labels = None if tags is None else check_tags(tags)
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
            tags=labels or (),
            metadata=check_metadata(metadata),
            model=self._runtime.identity.model,
        )
        if system is not None:
            turn = system_turn(record.tree, system)
            self._runtime.builder.check_system([turn])
            record = record.changed([turn], leaf=turn.id)
        found, is_new = self._runtime.worker.call(lambda: self._registry.find_or_add(record))
        if is_new:
            return found
        if system is not None and system != found.system:
            expected = f"None or that of the session {name!r}; set_system() changes it"
            raise wrong("system", system, expected)
        kept, had = found.settings, found.template_variables
        changes = {
            "settings": {k: v for k, v in given.items() if kept.get(k) != v} or None,
            "template_variables": {k: v for k, v in variables.items() if had.get(k) != v} or None,
            "history": history,
            "overflow": overflow,
            "tags": labels,
            "metadata": metadata,
        }
        wanted = {k: v for k, v in changes.items() if v not in (None, getattr(found, k))}
        if wanted:
            found._update(wanted)
        return found

    @override
    def session_by_name(self, name: str, *, owner: str | None = None) -> Session:
        check_name(name)
        owner = self._owner_of(owner)
        found = self._runtime.worker.call(lambda: self._registry.find(owner, name))
        if found is None:
            raise NotFound(f"no session {shown(name)}")
        return found

    @override
    def session_by_id(self, session_id: str, *, owner: str | None = None) -> Session:
        check_text("session_id", session_id)
        owner = self._owner_of(owner)
        registry = self._registry
        found = self._runtime.worker.call(lambda: registry.find_by_id(owner, session_id))
        if found is None:
            raise NotFound(f"no session of the id {shown(session_id)}")
        return found

    @override
    def sessions(
        self,
        owner: str | None = None,
        *,
        search: str | None = None,
        tag: str | None = None,
        hidden: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[SessionInfo]:
        given = (("owner", owner), ("search", search), ("tag", tag), ("after", after))
        for what, text in given:
            if text is not None:
                check_text(what, text)
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise wrong("limit", limit, "an integer of 0 or more, or None")
        without = None if hidden or tag is not None else HIDDEN_TAG
        found = self._runtime.store.summaries(
            owner, search=search, tag=tag, without_tag=without, limit=limit, after=after
        )
        states = self._registry.states(summary.id for summary in found)
        return [
            SessionInfo(
                state=states.get(summary.id, State.CLOSED),
                **{f.name: getattr(summary, f.name) for f in fields(Summary)},
            )
            for summary in found
        ]

    @override
    def count_sessions(self, owner: str | None = None) -> int:
        return self._runtime.store.count(self._owner_of(owner))

    @override
    def residences(self, sessions: Iterable[Session]) -> list[Residence]:
        return [one.residence for one in self.forecasts(sessions, 1)]

    @override
    def predicted_ttfts(self, sessions: Iterable[Session], new_tokens: int = 32) -> list[float]:
        return [one.ttft for one in self.forecasts(sessions, new_tokens)]

    def forecasts(self, sessions: Iterable[Session], new_tokens: int = 32) -> list[Forecast]:
        """Returns residence and predicted time to first token of many sessions' next turns, with
        one request to the engine.

        Args:
            sessions: the sessions.
            new_tokens: tokens of the next message.

        Returns:
            One forecast per session. That of a conversation of another tokenizer has no residence
            and no time.
        """
        listed = list(sessions)
        known = [None if one._is_foreign else (one.token_ids, one.owner) for one in listed]
        made = iter(self.core.forecasts([one for one in known if one is not None], new_tokens))
        return [Forecast(Residence(0, 0, 0), 0.0) if one is None else next(made) for one in known]

    @override
    def delete(self, name: str, owner: str | None = None) -> None:
        self._registry.delete(self._owner_of(owner), name)

    @override
    def import_(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        owner: str | None = None,
        pages: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> Session:
        from lmchat.archive import import_session

        owner = self._owner_of(owner)
        self._check_open()
        runtime = self._runtime
        with runtime.pages.stored(pages) as stored:
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

    # --- properties ------------------------------------------------------------------------------

    @property
    @override
    def tokenizer(self) -> Tokenizer:
        return self._runtime.tokenizer

    @property
    @override
    def template_info(self) -> TemplateInfo:
        return self._runtime.builder.info

    @property
    @override
    def model_settings(self) -> dict[str, Any]:
        return dict(self._runtime.model_settings)

    @property
    @override
    def model(self) -> str:
        return self._runtime.identity.model

    @property
    @override
    def info(self) -> ModelInfo:
        """Properties of the model."""
        return self.core.info

    @property
    @override
    def device(self) -> str:
        return self.core.device

    @property
    @override
    def threads(self) -> int:
        return self.core.threads

    @property
    @override
    def max_context(self) -> int:
        return self.core.max_context

    @property
    @override
    def waiting(self) -> int:
        return self._runtime.admission.waiting

    @override
    def queue_stats(self) -> QueueStats:
        return self._runtime.admission.stats()

    def check_capacity(self, owner: str | None = None, *, live: bool = False) -> None:
        """Raises Overloaded at once if a request of the owner would be refused now.

        It never waits for the engine or the store, so an event loop may call it. A later request
        can still be refused.

        Args:
            owner: the owner of the request.
            live: whether it continues a conversation that has KV, with a short turn. Such a turn
                may get a slot when another request does not.

        Raises:
            Overloaded: `retry_after` has the predicted seconds until a retry can succeed.
        """
        owner = self._owner_of(owner)
        self._check_open()
        self._runtime.admission.check(owner, live=live)

    @override
    def session_states(self) -> dict[State, int]:
        return self._registry.count()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Reports all generations to `observer` from now on. Returns a function that ends this."""
        observers = self._runtime.observers
        observers.append(observer)
        return lambda: observers.remove(observer) if observer in observers else None

    @override
    def stats(self) -> Stats:
        return self.core.stats()

    def profile(self, on: bool = True) -> None:
        """Starts the profiler of `stats().ops` with an empty table, or stops it."""
        self.core.profile(on)

    @override
    def close(self) -> None:
        """Stops all generations, commits their tokens, and ends the threads. Idempotent.

        An engine that is dropped without it is closed when its last session and reply are gone.
        """
        self._is_closed = True
        self._dropped.detach()
        sessions = self._registry.close()
        generations: list[Generation | Scoring] = list(self._running)
        generations += [running for s in sessions if (running := s.running) is not None]
        for generation in generations:
            generation.cancel()
        for session in sessions:
            session.close()
        for generation in generations:
            generation.wait()
        self._conversations.close()
        self._record_speeds()
        self.core.close()
        self._runtime.reader.close()
        self._runtime.session_reader.close()
        self._runtime.worker.close()
        self._runtime.durability.close()
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


def _close_all(parts: Sequence[_Part], worker: Worker) -> None:
    """Closes what an engine has left that was dropped, on its worker thread."""
    for part in parts:
        part.close()
    worker.close()


def _sweep(this: weakref.ref[ChatEngine]) -> None:
    registry = getattr(this(), "_registry", None)  # the thread starts before it is there
    if registry is not None:
        registry.sweep()
