"""A child process that is watched, and started again when it ends."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from lmchat.errors import InternalError

from ..errors import note

CHECK_SECONDS = 0.25
SILENT_SECONDS = 15.0
"""Time without an answer after which a process is killed, so that the store frees its leases."""

_SILENT_CHECKS = 3  # and as many checks, so that a launcher that was stopped itself kills nothing
_SHORTEST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds before a process is started again
_STEADY_SECONDS = 60.0  # a process that was ready for so long is started again at once
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Process:
    """A child process.

    Attributes:
        name: its name in messages.
        command: its command line.
        check: returns its state, "ready" or "draining"; "" if it does not answer.
        last_signal: the signal that it gets when the launcher dies.
        cpus: the CPUs that it may use; empty: all.
        environment: its environment; None: the launcher's.
        descriptors: open files that it inherits.
        state: "waiting" to be started, "starting", "ready", "draining", "silent" or "ended".
        restarts: how often it was started again.
        was_ready: set once it has been ready.
    """

    name: str
    command: Sequence[str]
    check: Callable[[], Awaitable[str]]
    last_signal: signal.Signals = signal.SIGTERM
    cpus: Collection[int] = ()
    environment: Mapping[str, str] | None = None
    descriptors: Collection[int] = ()
    state: str = "waiting"
    restarts: int = 0
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _child: subprocess.Popen[bytes] | None = None
    _is_replaced: bool = False  # the running process ends because `restart()` has asked it to

    @property
    def pid(self) -> int | None:
        """The number of the running process."""
        return self._child.pid if self._child and self._child.poll() is None else None

    async def supervise(self) -> NoReturn:
        """Runs the process, and starts it again whenever it ends.

        Raises:
            InternalError: it ended before it was ready for the first time.
        """
        wait = 0.0
        while True:
            self._child = self._start()
            steady = await self._watch(self._child) > _STEADY_SECONDS
            self.state = "waiting"
            end = _end_of(self._child.returncode)
            if not self.was_ready.is_set():
                raise InternalError(f"{self.name} ended with {end} before it was ready")
            if self._is_replaced:
                self._is_replaced, wait = False, 0.0
            else:
                wait = 0.0 if steady else min(_LONGEST_WAIT, max(_SHORTEST_WAIT, 2 * wait))
                note(f"{self.name} ended with {end}: it starts again in {wait:g} s")
                await asyncio.sleep(wait)
            self.restarts += 1

    async def restart(self, seconds: float) -> None:
        """Replaces the process by a new one, and returns once that is ready.

        Args:
            seconds: the old process is killed after this time.

        Raises:
            InternalError: the new process ended before it was ready. It is started again.
        """
        count, self._is_replaced = self.restarts, self.pid is not None
        self.end(signal.SIGTERM)
        await self.ended(seconds)
        while self.restarts == count or self.state != "ready":
            if self.restarts > count + 1:
                raise InternalError(f"the new {self.name} ended before it was ready")
            await asyncio.sleep(CHECK_SECONDS)

    def end(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it runs."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    async def ended(self, seconds: float) -> None:
        """Waits for the end of the process, and kills it after this time."""
        deadline, child = asyncio.get_running_loop().time() + seconds, self._child
        while child is not None and child.poll() is None:
            if asyncio.get_running_loop().time() >= deadline:
                child.kill()
            await asyncio.sleep(CHECK_SECONDS / 5)
        if self._child is child:  # else the next one runs
            self.state = "ended"

    def _start(self) -> subprocess.Popen[bytes]:
        launcher = os.getpid()

        def prepare() -> None:  # runs in the child; the launcher has no other Python threads
            _libc.prctl(_PR_SET_PDEATHSIG, int(self.last_signal))
            if os.getppid() != launcher:  # it died before
                os._exit(1)
            if self.cpus:
                os.sched_setaffinity(0, self.cpus)

        self.state = "starting"
        # In a session of its own it does not get the terminal's Ctrl-C, which the launcher handles.
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self.environment,
            pass_fds=self.descriptors,
            start_new_session=True,
            preexec_fn=prepare,
        )

    async def _watch(self, child: subprocess.Popen[bytes]) -> float:
        """Follows the state until the process has ended. Returns the seconds since it was ready."""
        loop = asyncio.get_running_loop()
        ready_at, answered_at, unanswered = None, loop.time(), 0
        while child.poll() is None:
            state, now = await self.check(), loop.time()
            if state:
                self.state, answered_at, unanswered = state, now, 0
                if state == "ready":
                    ready_at = ready_at or now
                    self.was_ready.set()
            elif self.state != "starting" and not self._is_replaced:
                self.state, unanswered = "silent", unanswered + 1
                if unanswered >= _SILENT_CHECKS and now - answered_at >= SILENT_SECONDS:
                    note(f"{self.name} has not answered for {now - answered_at:.0f} s: killed")
                    child.kill()
                    answered_at, unanswered = now, 0
            await asyncio.sleep(CHECK_SECONDS)
        return loop.time() - ready_at if ready_at else 0.0


def _end_of(code: int) -> str:
    """Returns "exit code 1" or "SIGKILL"."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
