"""Idle prefill: computes prompts that a next turn will need while no request runs.

The prompt is neither shown nor recorded. Its KV stays in the engine's cache, where that turn finds
the full pages. Any request stops it at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from lmchat.generation.reader import Reader
from lmchat.generation.ticket import IDLE
from lmchat.kv.handle_cache import RETENTION_BRANCH
from lmchat.store.prefixes import PAGE
from lmchat.store.records import Lease
from turbomind import Engine, Event, Stream

MOST_PROMPTS = 8  # remembered per session

Prompt = list[int]


@dataclass
class _QueueEntry:
    """The prompt that one session wants computed.

    `make` returns the prompt; it is None once that is done or cancelled. `computed` lists the
    prompts that the engine may have pages of.
    """

    owner: str
    make: Callable[[], Prompt] | None
    computed: list[Prompt] = field(default_factory=list)

    def add(self, prompt: Prompt) -> None:
        """Records a prompt that is about to be computed."""
        others = [one for one in self.computed if one != prompt[: len(one)]]
        self.computed = [*others[1 - MOST_PROMPTS :], prompt]


P = ParamSpec("P")
Result = TypeVar("Result")


def _locked(
    method: Callable[Concatenate[IdlePrefill, P], Result],
) -> Callable[Concatenate[IdlePrefill, P], Result]:
    @functools.wraps(method)
    def call(self: IdlePrefill, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class IdlePrefill:
    """The queue entries of all sessions, run one at a time.

    Any thread may call it. Its lock is held only while a prompt is started or stopped.

    Args:
        core: the engine.
        reader: the engine's reader thread.
        idle: returns whether no request runs or waits.
        soon: posts a call to a background thread.
        reuse: whether the engine reuses prefixes. Without it nothing is computed.
    """

    def __init__(
        self,
        core: Engine,
        reader: Reader,
        idle: Callable[[], bool],
        soon: Callable[[Callable[[], object]], None],
        reuse: bool = True,
    ) -> None:
        self._core = core
        self._reader = reader
        self._idle = idle
        self._soon = soon
        self._reuse = reuse
        self._entries: dict[str, _QueueEntry] = {}  # by session
        self._making = False
        self._running: _Prefill | None = None
        self._holds = 0
        self._lock = threading.RLock()

    @_locked
    def enqueue(self, session: str, owner: str, make: Callable[[], Prompt] | None) -> None:
        """Replaces the session's entry; `make` None removes it. The next `resume()` may start
        it."""
        computed = self.forget(session)
        if self._reuse and (make is not None or computed):
            self._entries[session] = _QueueEntry(owner, make, computed)

    @_locked
    def forget(self, session: str) -> list[Prompt]:
        """Removes the session's entry. Returns the prompts that the engine may have pages of."""
        entry = self._entries.pop(session, None)
        if entry is None:
            return []
        entry.make = None
        if self._running is not None and self._running.entry is entry:
            self._running.cancel()
        return entry.computed

    @_locked
    def stop(self) -> None:
        """Stops the running prompt, because a request needs the engine."""
        if self._running is not None:
            self._running.cancel()

    @_locked
    def resume(self) -> None:
        """Starts the next entry if the engine is idle."""
        entry = next((e for e in self._entries.values() if e.make is not None), None)
        if entry is not None and self._may_run() and not self._making:
            self._making = True
            self._soon(lambda: self._make(entry))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stops idle prefill within a `with` block, for calls to the engine itself. Any thread."""
        self._hold()
        try:
            yield
        finally:
            self._let_go()

    @_locked
    def _hold(self) -> None:
        self._holds += 1
        self.stop()

    @_locked
    def _let_go(self) -> None:
        self._holds -= 1
        self.resume()

    def _may_run(self) -> bool:
        return self._running is None and not self._holds and self._idle()

    def _make(self, entry: _QueueEntry) -> None:
        """Renders the prompt on a background thread, and checks that there is room for it."""
        prompt: Prompt = []
        try:
            make = entry.make
            if make is not None:
                prompt = make()
            if not self._has_room(len(prompt)):
                prompt = []
        except Exception as error:  # the turn itself will report it
            logging.getLogger(__name__).debug("idle prefill failed: %s", error)
            prompt = []
        self._reader.later(lambda: self._start(entry, prompt))

    def _has_room(self, tokens: int) -> bool:
        """Returns whether pages that are free, or that windows have moved past, suffice in every
        cache group, so that nothing useful is evicted."""
        whole = (tokens + PAGE) // PAGE
        for group in self._core.stats().groups:
            window_and_chunk = (group.window + self._core.prefill_chunk) // PAGE + 2
            needed = min(whole, window_and_chunk) if group.window else whole
            if group.free + group.out_of_reach < needed:
                return False
        return True

    @_locked
    def _start(self, entry: _QueueEntry, prompt: Prompt) -> None:
        self._making = False
        if not prompt or entry.make is None:
            entry.make = None
            return self.resume()
        if not self._may_run():
            return None  # tried again by the next `resume()`
        entry.add(prompt)
        self._running = _Prefill(entry, self._ended)
        try:
            self._reader.watch(lambda: self._stream(entry, prompt), self._running)
        except Exception:  # the engine is closed
            self._ended(done=True)
        return None

    def _stream(self, entry: _QueueEntry, prompt: Prompt) -> Stream:
        return self._core.stream(
            prompt,
            inbox=self._reader.inbox,
            priority=IDLE,
            salt=entry.owner,
            retention_priority=RETENTION_BRANCH,
            max_new_tokens=1,
            temperature=0.0,
        )

    @_locked
    def _ended(self, done: bool) -> None:
        running, self._running = self._running, None
        if done and running is not None:
            running.entry.make = None
        self.resume()


class _Prefill:
    """Takes the events of a prompt in idle prefill."""

    def __init__(self, entry: _QueueEntry, ended: Callable[[bool], None]) -> None:
        self.entry = entry
        self._ended = ended
        self._stream: Stream | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Requests its end."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def attach(self, stream: Stream) -> None:
        """Records the stream of the request."""
        self._stream = stream
        if self._cancelled:
            stream.cancel()

    def journal(self, _events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Returns None: idle prefill journals nothing."""
        return None

    def refuse(self, _error: Exception) -> None:
        """Does nothing: idle prefill journals nothing."""

    def feed(self, events: Sequence[Event]) -> None:
        """Ends if one of the events is terminal."""
        for event in events:
            if event.terminal:
                self._ended(event.finish_reason != "cancelled")

    def fail(self, _error: BaseException) -> None:
        """Ends without a further attempt."""
        self._ended(True)
