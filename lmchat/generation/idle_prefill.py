"""Prompts that are computed ahead, while nothing else runs, because a next turn will need them.

Nothing of it is shown or recorded: it only leaves keys and values in the engine's cache, under
their tokens, where that turn finds its full pages. Any request stops it at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lmchat.generation.reader import Reader
from lmchat.kv.handle_cache import RETENTION_BRANCH
from lmchat.store.prefixes import PAGE
from lmchat.store.records import Lease
from turbomind import Engine, Event, Stream

PRIORITY = 2  # behind all requests: see `lmchat.generation.admission.priority`
MOST_PROMPTS = 8  # remembered of one session

Prompt = list[int]


@dataclass
class _QueueEntry:
    """What one session wants: `make` gives the prompt, None when that is done or not wanted any
    more. `computed` are the prompts that the engine may have pages of."""

    owner: str
    make: Callable[[], Prompt] | None
    computed: list[Prompt] = field(default_factory=list)

    def add(self, prompt: Prompt) -> None:
        """It is about to be computed."""
        others = [one for one in self.computed if one != prompt[: len(one)]]
        self.computed = [*others[1 - MOST_PROMPTS :], prompt]


class IdlePrefill:
    """The wishes of all sessions, one at a time. `idle` says whether no request runs or waits,
    `soon` has a helper thread do something; without `reuse` the engine would not find again what
    was computed, and nothing is. Reader thread, but for `held()`."""

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
        self._wishes: dict[str, _QueueEntry] = {}  # by session
        self._making = False
        self._running: _Prefill | None = None
        self._holds = 0

    def enqueue(self, session: str, owner: str, make: Callable[[], Prompt] | None) -> None:
        """The session's wish from now on; it begins with the next `resume()`."""
        computed = self.forget(session)
        if self._reuse and (make is not None or computed):
            self._wishes[session] = _QueueEntry(owner, make, computed)

    def forget(self, session: str) -> list[Prompt]:
        """It has no wish any more. Returns the prompts that the engine may have pages of."""
        wish = self._wishes.pop(session, None)
        if wish is None:
            return []
        wish.make = None
        if self._running is not None and self._running.wish is wish:
            self._running.cancel()
        return wish.computed

    def stop(self) -> None:
        """A request needs the engine; until `resume()`, which does not go on before it is idle."""
        if self._running is not None:
            self._running.cancel()

    def resume(self) -> None:
        """Goes on with what is wanted, if nothing else runs."""
        wish = next((w for w in self._wishes.values() if w.make is not None), None)
        if wish is not None and self._may_run() and not self._making:
            self._making = True
            self._soon(lambda: self._make(wish))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For what asks the engine by itself: nothing is computed ahead within. Any thread."""
        self._reader.call(self._hold)
        try:
            yield
        finally:
            self._reader.call(self._let_go)

    def _hold(self) -> None:
        self._holds += 1
        self.stop()

    def _let_go(self) -> None:
        self._holds -= 1
        self.resume()

    def _may_run(self) -> bool:
        return self._running is None and not self._holds and self._idle()

    def _make(self, wish: _QueueEntry) -> None:
        """Helper thread: renders the prompt, and looks whether there is room for it."""
        prompt: Prompt = []
        try:
            make = wish.make
            if make is not None:
                prompt = make()
            if not self._has_room(len(prompt)):
                prompt = []
        except Exception as error:  # nothing is lost: the turn will meet it
            logging.getLogger(__name__).debug("nothing is computed ahead: %s", error)
            prompt = []
        self._reader.later(lambda: self._start(wish, prompt))

    def _has_room(self, tokens: int) -> bool:
        """Whether free pages suffice in every cache group, so that nothing cached has to leave."""
        stats, groups = self._core.stats(), self._core.cache_groups
        others = stats.pages_total // groups * (groups - 1)  # free ones of other groups, at most
        return stats.pages_free - others >= (tokens + PAGE) // PAGE

    def _start(self, wish: _QueueEntry, prompt: Prompt) -> None:
        self._making = False
        if not prompt or wish.make is None:
            wish.make = None
            return self.resume()
        if not self._may_run():
            return None  # once more when it may
        wish.add(prompt)
        self._running = _Prefill(wish, self._ended)
        try:
            self._reader.watch(lambda: self._stream(wish, prompt), self._running)
        except Exception:  # the engine is closed
            self._ended(done=True)
        return None

    def _stream(self, wish: _QueueEntry, prompt: Prompt) -> Stream:
        return self._core.stream(
            prompt,
            inbox=self._reader.inbox,
            priority=PRIORITY,
            salt=wish.owner,
            retention_priority=RETENTION_BRANCH,
            max_new_tokens=1,
            temperature=0.0,
        )

    def _ended(self, done: bool) -> None:
        running, self._running = self._running, None
        if done and running is not None:
            running.wish.make = None
        self.resume()


class _Prefill:
    """Takes the events of a prompt that is computed ahead."""

    def __init__(self, wish: _QueueEntry, ended: Callable[[bool], None]) -> None:
        self.wish = wish
        self._ended = ended
        self._stream: Stream | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """It ends soon."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def attach(self, stream: Stream) -> None:
        """The engine has it."""
        self._stream = stream
        if self._cancelled:
            stream.cancel()

    def journal(self, _events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Nothing of it is kept."""
        return None

    def refuse(self, _error: Exception) -> None:
        """Nothing was to be kept."""

    def feed(self, events: Sequence[Event]) -> None:
        """It has ended, or goes on."""
        for event in events:
            if event.terminal:
                self._ended(event.finish_reason != "cancelled")

    def fail(self, _error: BaseException) -> None:
        """It cannot be read: so be it."""
        self._ended(True)
