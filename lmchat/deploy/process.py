"""A child process that is watched, and started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lmchat.deploy.liveness import Idleness, Silence, within
from lmchat.errors import InternalError

log = logging.getLogger("lmchat.deploy")

CHECK_SECONDS = 0.25
SILENT_SECONDS = 15.0
"""Time without an answer after which a process is killed, so that the store frees its leases."""

IDLE_SECONDS = 20.0
"""Time after which a process is killed that starts or ends, but does nothing: no thread runs."""

_CHECK_LIMIT = 6.0  # seconds for one check
_LAST_WORDS = 5.0  # seconds for the end of a process that hangs, or that has nothing to write
_IDLE_CHECKS = 20
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
        prepare: is called before each start; an error is that of the start.
        start_seconds: time after which a process that is not ready is killed.
        state: "waiting" to be started, "starting", "ready", "draining", "silent" or "ended".
        restarts: how often it was started again, or was tried to be.
        failure: how it ended before it was ever ready, in a sentence; empty: it did not.
        was_ready: set once it has been ready.
    """

    name: str
    command: Sequence[str]
    check: Callable[[], Coroutine[Any, Any, str]]
    last_signal: signal.Signals = signal.SIGTERM
    cpus: Collection[int] = ()
    environment: Mapping[str, str] | None = None
    descriptors: Collection[int] = ()
    prepare: Callable[[], object] = lambda: None
    start_seconds: float = math.inf
    state: str = "waiting"
    restarts: int = 0
    failure: str = ""
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _child: subprocess.Popen[bytes] | None = None
    _end: str = ""  # how it ended the last time
    _paused: asyncio.Future[None] | None = None  # the time before the next start
    _is_replaced: bool = False  # the running process ends because `restart()` has asked it to

    @property
    def pid(self) -> int | None:
        """The number of the running process."""
        return self._child.pid if self._child and self._child.poll() is None else None

    async def supervise(self) -> NoReturn:
        """Runs the process, and starts it again whenever it ends or cannot be started."""
        wait = 0.0
        while True:
            self._end, steady = await self._run()
            self.state = "waiting"
            if not self.was_ready.is_set():
                self.failure = f"{self.name} {self._end} before it was ready"
            if self._is_replaced:
                self._is_replaced, wait = False, 0.0
            else:
                wait = 0.0 if steady else min(_LONGEST_WAIT, max(_SHORTEST_WAIT, 2 * wait))
                log.warning("%s %s: it starts again in %g s", self.name, self._end, wait)
                await self._pause(wait)
            self.restarts += 1

    async def restart(self, seconds: float) -> None:
        """Replaces the process by a new one, and returns once that is ready.

        Args:
            seconds: the old process is killed after this time, sooner if it hangs.

        Raises:
            InternalError: the new process ended before it was ready. It is started again.
        """
        count, self._is_replaced = self.restarts, self.pid is not None
        if self._paused is not None:
            self._paused.cancel()
        self.end(signal.SIGTERM)
        await self.ended(self.patience(seconds))
        while self.restarts == count or self.state != "ready":
            if self.restarts > count + 1:
                raise InternalError(f"the new {self.name} {self._end} before it was ready")
            await asyncio.sleep(CHECK_SECONDS)

    def patience(self, seconds: float) -> float:
        """Returns how long its end is waited for: less for a process that hangs, or only starts.

        Args:
            seconds: the time for one that answers.
        """
        if self.state in ("ready", "draining"):
            return seconds
        return min(seconds, SILENT_SECONDS if self.state == "silent" else _LAST_WORDS)

    def end(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it runs."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    async def ended(self, seconds: float) -> None:
        """Waits for the end of the process, and kills it after this time, or when it hangs."""
        loop, child = asyncio.get_running_loop(), self._child
        if child is None:
            return
        deadline, idleness = loop.time() + seconds, self._idleness(child)
        while child.poll() is None:
            if loop.time() >= deadline or idleness.is_over():
                child.kill()
            if loop.time() >= deadline + _LAST_WORDS:
                return  # such as one that waits for a disk; it ends with the disk's answer
            await asyncio.sleep(CHECK_SECONDS)
        if self._child is child:  # else the next one runs
            self.state = "ended"

    async def _run(self) -> tuple[str, bool]:
        """Runs the process once. Returns how it ended, and whether it ran well for long."""
        try:
            self._child = self._start()
        except Exception as error:  # such as a limit on processes, a full disk, a missing program
            return f"cannot be started ({error})", False
        seconds = await self._watch(self._child)
        return f"ended with {_end_of(self._child.returncode)}", seconds > _STEADY_SECONDS

    async def _pause(self, seconds: float) -> None:
        """Waits, until `restart()` is called."""
        self._paused = asyncio.ensure_future(asyncio.sleep(seconds))
        try:
            await asyncio.wait({self._paused})
        finally:
            self._paused.cancel()
            self._paused = None

    def _start(self) -> subprocess.Popen[bytes]:
        launcher = os.getpid()

        def prepare() -> None:  # runs in the child; the launcher has no other Python threads
            _libc.prctl(_PR_SET_PDEATHSIG, int(self.last_signal))
            if os.getppid() != launcher:  # it died before
                os._exit(1)
            with contextlib.suppress(OSError):  # the launcher's CPUs have changed meanwhile
                os.sched_setaffinity(0, self.cpus or os.sched_getaffinity(0))

        self.state = "starting"
        self.prepare()
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
        began, ready_at = loop.time(), None
        silence, idleness = Silence(SILENT_SECONDS, _SILENT_CHECKS), self._idleness(child)
        while child.poll() is None:
            if state := await self._ask():
                self.state = state
                silence.end()
                if state == "ready":
                    ready_at = ready_at or loop.time()
                    self.was_ready.set()
            elif self.state == "starting":
                if idleness.is_over():
                    self._kill(child, f"does nothing for {IDLE_SECONDS:g} s while it starts")
                    idleness = self._idleness(child)
                if loop.time() - began >= self.start_seconds:
                    self._kill(child, f"is not ready after {self.start_seconds:g} s")
                    began = loop.time()
            elif not self._is_replaced:
                self.state = "silent"
                if silence.is_over():
                    self._kill(child, f"has not answered for {silence.lasted:.0f} s")
                    silence.end()
            await asyncio.sleep(CHECK_SECONDS)
        return loop.time() - ready_at if ready_at else 0.0

    async def _ask(self) -> str:
        """Returns what the check returns, "" also where it fails or does not end."""
        try:
            return await within(_CHECK_LIMIT, self.check())
        except Exception:  # a launcher that ended here would end all its processes
            return ""

    def _idleness(self, child: subprocess.Popen[bytes]) -> Idleness:
        return Idleness(child.pid, IDLE_SECONDS, _IDLE_CHECKS)

    def _kill(self, child: subprocess.Popen[bytes], why: str) -> None:
        log.warning("%s %s: killed", self.name, why)
        child.kill()


def _end_of(code: int) -> str:
    """Returns "exit code 1" or "SIGKILL"."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
