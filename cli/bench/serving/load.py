"""Sends the turns of a schedule in an open loop, and watches the event loop meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from .endpoint import Message, Request
from .schedule import Conversation
from .turn import Outcome, Turn

Send = Callable[[Request, float], Awaitable[Turn]]
"""Sends a turn that was due at a time of the loop's clock."""

LAG_INTERVAL = 0.02  # seconds between two looks at the clock
START_SECONDS = 0.05  # from the call to the start of the run


@dataclass(frozen=True)
class Window:
    """The measured part of a run: `seconds` after the `warmup`, or fewer with `requests`.

    Attributes:
        warmup: Seconds before it.
        seconds: Its length.
        requests: Turns after which it ends early; None: no such bound.
    """

    warmup: float
    seconds: float
    requests: int | None = None


@dataclass
class Observed:
    """What a run has shown. Times are seconds on the loop's clock.

    Attributes:
        begin: Begin of the window.
        end: Its end: no later turn was sent.
        turns: Turns that ended, those of the warm-up too.
        interrupted: Turns that Ctrl-C cut.
        lags: Delays of the event loop, one every LAG_INTERVAL.
        cpu: Processor time of this process / elapsed time.
    """

    begin: float = 0.0
    end: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    interrupted: int = 0
    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0

    def measured(self) -> list[Turn]:
        """Returns the turns that were due in the window."""
        return [turn for turn in self.turns if self.begin <= turn.due < self.end]


class Load:
    """A run of a schedule.

    A conversation starts at its time, however the earlier ones fare. Its next turn is due a think
    time after the previous reply. A turn that was refused or failed is not sent again: its message
    is dropped, and the conversation goes on with its next turn.

    Args:
        send: Sends a turn.
        conversations: The schedule.
        window: The measured part.
        session: Prefix of the names of the server's sessions; None: each turn sends its history.
    """

    def __init__(
        self,
        send: Send,
        conversations: Sequence[Conversation],
        window: Window,
        session: str | None = None,
    ) -> None:
        self._send = send
        self._conversations = conversations
        self._window = window
        self._session = session
        self._sent = 0
        self._latest = 0.0
        self._closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self.observed = Observed()

    async def run(self, stop: asyncio.Event) -> Observed:
        """Runs until every turn has ended, or until `stop` is set, which cuts what is running."""
        loop = asyncio.get_running_loop()
        start = loop.time() + START_SECONDS
        self.observed.begin = start + self._window.warmup
        self.observed.end = self.observed.begin + self._window.seconds
        wall, cpu = time.perf_counter(), time.process_time()
        watch = loop.create_task(self._watch())
        main = loop.create_task(self._arrivals(start))
        stopped = loop.create_task(stop.wait())
        await asyncio.wait({main, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            self.observed.end = min(self.observed.end, loop.time())
        for task in (main, stopped, watch, *self._tasks):
            task.cancel()
        await asyncio.gather(main, stopped, watch, *self._tasks, return_exceptions=True)
        self.observed.cpu = (time.process_time() - cpu) / (time.perf_counter() - wall)
        for error in self._failures:
            raise error
        return self.observed

    async def _arrivals(self, start: float) -> None:
        for number, conversation in enumerate(self._conversations):
            await self._until(start + conversation.at)
            if start + conversation.at >= self.observed.end:
                break
            task = asyncio.create_task(self._converse(number, conversation, start))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _converse(self, number: int, conversation: Conversation, start: float) -> None:
        loop = asyncio.get_running_loop()
        session = None if self._session is None else f"{self._session}-{number}"
        history: list[Message] = []
        due = start + conversation.at
        for index, planned in enumerate(conversation.turns):
            if index:
                due = loop.time() + planned.think
                await self._until(due)
            if not self._may_send(due):
                return
            new = {"role": "user", "content": planned.message}
            messages = [new] if session is not None else [*history, new]
            try:
                turn = await self._send(Request(messages, planned.reply_tokens, session), due)
            except asyncio.CancelledError:
                self.observed.interrupted += 1
                raise
            self.observed.turns.append(turn)
            if turn.outcome is Outcome.FINISHED:
                history += [new, {"role": "assistant", "content": turn.text}]

    def _may_send(self, due: float) -> bool:
        """Returns whether the window is still open, and counts the turn."""
        if due >= self.observed.end or self._closed.is_set():
            return False
        if due >= self.observed.begin:
            self._sent += 1
            self._latest = max(self._latest, due)
            if self._sent == self._window.requests:
                self.observed.end = math.nextafter(self._latest, math.inf)
                self._closed.set()
        return True

    async def _until(self, at: float) -> None:
        """Sleeps until a time of the loop's clock, or until no turn may be sent any more."""
        left = min(at, self.observed.end) - asyncio.get_running_loop().time()
        if left > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), left)

    async def _watch(self) -> None:
        """Measures how late the event loop wakes a task that sleeps."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.observed.lags.append(loop.time() - due)
