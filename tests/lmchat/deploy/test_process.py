"""A watched child process: restarts, back-off, the end of a silent one."""

import asyncio
import signal
import subprocess

import pytest

from lmchat.deploy import process
from lmchat.deploy.process import Process
from lmchat.errors import InternalError

ENDLESS = ["sleep", "1000"]


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds that were waited between two starts; checks follow each other at once."""
    waits, sleep = [], asyncio.sleep
    monkeypatch.setattr(process, "CHECK_SECONDS", 0.0)

    async def recorded(seconds):
        if seconds:
            waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(process.asyncio, "sleep", recorded)
    return waits


async def ready():
    return "ready"


async def silent():
    return ""


async def until(child, wanted):
    """Supervises a process until `wanted()` is true, and ends it."""
    task = asyncio.ensure_future(child.supervise())
    while not wanted() and not task.done():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    child.end(signal.SIGKILL)
    await child.ended(60)
    if not task.cancelled():
        task.result()


def test_a_process_that_never_gets_ready_is_started_again_and_its_failure_known():
    child = Process("replica 1", ["sh", "-c", "exit 3"], silent)
    asyncio.run(until(child, lambda: child.restarts == 2))
    assert child.failure == "replica 1 ended with exit code 3 before it was ready"


def test_a_process_that_cannot_be_started_is_tried_again(waits, monkeypatch, caplog):
    """Whatever the reason is, until it is gone; what runs meanwhile is not touched."""
    real, errors = subprocess.Popen, iter([
        BlockingIOError(11, "Resource temporarily unavailable"),
        FileNotFoundError(2, "No such file or directory", "python"),
        subprocess.SubprocessError("Exception occurred in preexec_fn."),
        MemoryError(),
    ])  # fmt: skip

    def start(*arguments, **options):
        for error in errors:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(process.subprocess, "Popen", start)
    child = Process("replica 1", ENDLESS, ready)
    asyncio.run(until(child, lambda: child.state == "ready"))
    assert waits[:4] == [0.5, 1, 2, 4]
    assert child.restarts == 4
    text = caplog.text
    assert (
        "replica 1 cannot be started ([Errno 11] Resource temporarily unavailable): it st" in text
    )


def test_what_fails_before_a_start_is_a_failed_start():
    tries = []

    def prepare():
        tries.append(1)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    child = Process("the proxy", ENDLESS, ready, prepare=prepare)
    asyncio.run(until(child, lambda: child.state == "ready"))
    assert len(tries) == 3
    assert "No space left on device" in child.failure


def test_a_check_that_fails_is_a_process_that_does_not_answer():
    answers = iter([ValueError("one"), OSError("two"), "ready"])

    async def check():
        if isinstance(answer := next(answers, "ready"), str):
            return answer
        raise answer

    child = Process("replica 1", ENDLESS, check)
    asyncio.run(until(child, lambda: child.state == "ready"))
    assert child.restarts == 0


@pytest.mark.parametrize("moment", ["before it starts", "while it starts"])
def test_a_start_that_does_nothing_is_ended_and_tried_again(monkeypatch, caplog, moment):
    """A stopped process is the surest: no thread of it runs."""
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.0)
    first = ["sh", "-c", "kill -STOP $$; exit 1"]
    if moment == "while it starts":
        first = ["sh", "-c", "i=0; while [ $i -lt 9999 ]; do i=$((i+1)); done; kill -STOP $$"]
    commands = iter([first])
    child = Process("replica 1", first, silent)
    child.prepare = lambda: setattr(child, "command", next(commands, ["false"]))
    asyncio.run(until(child, lambda: child.restarts))
    assert child.failure.startswith("replica 1 ended with ")
    text = caplog.text
    assert "replica 1 does nothing for 0 s while it starts: killed" in text
    assert "replica 1 ended with SIGKILL: it starts again in 0.5 s" in text


def test_a_start_that_takes_too_long_is_ended(caplog):
    child = Process("replica 1", ["sh", "-c", "while :; do :; done"], silent, start_seconds=0.0)
    asyncio.run(until(child, lambda: child.restarts))
    assert child.failure.endswith("before it was ready")
    assert "replica 1 is not ready after 0 s: killed" in caplog.text


def test_a_restart_does_not_wait_for_the_next_try(monkeypatch):
    async def sleep(seconds, sleep=asyncio.sleep):
        if seconds >= 0.5:
            waiting.set()
            await asyncio.Event().wait()
        await sleep(0)

    async def run():
        child = Process("replica 1", ["false"], silent)
        task = asyncio.ensure_future(child.supervise())
        await waiting.wait()
        child.command, child.check = ENDLESS, ready
        await child.restart(60.0)
        assert (child.state, child.restarts) == ("ready", 1)
        task.cancel()
        child.end(signal.SIGKILL)
        await child.ended(60)

    waiting = asyncio.Event()
    monkeypatch.setattr(process.asyncio, "sleep", sleep)
    asyncio.run(run())


def test_a_restart_ends_where_the_old_or_the_new_process_hangs(monkeypatch):
    """Both are stopped, which no signal but the last ends."""
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.0)

    async def check():
        return "" if child.command is stopped else "ready"

    async def run():
        task = asyncio.ensure_future(child.supervise())
        await child.was_ready.wait()
        child.end(signal.SIGSTOP)
        child.command = stopped
        with pytest.raises(InternalError, match="the new replica 1 ended with SIGKILL before"):
            await child.restart(1e6)
        task.cancel()
        child.end(signal.SIGKILL)
        await child.ended(60)

    stopped = ["sh", "-c", "kill -STOP $$"]
    child = Process("replica 1", ENDLESS, check)
    asyncio.run(run())


def test_cpus_that_are_gone_do_not_keep_a_process_from_starting():
    child = Process("replica 1", ENDLESS, ready, cpus={1023})
    asyncio.run(until(child, lambda: child.state == "ready"))
    assert child.restarts == 0


def test_a_process_that_ends_is_started_again_later_and_later(waits, caplog):
    async def run():
        child = Process("replica 1", ["false"], ready)
        child.was_ready.set()
        task = asyncio.ensure_future(child.supervise())
        while child.restarts < 9:
            await asyncio.sleep(0)
        task.cancel()
        await child.ended(60)

    asyncio.run(run())
    assert waits[:9] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert "replica 1 ended with exit code 1: it starts again in 0.5 s" in caplog.text


def test_a_process_is_replaced_at_once(waits, caplog):
    async def run():
        child = Process("replica 1", ENDLESS, ready)
        task = asyncio.ensure_future(child.supervise())
        await child.was_ready.wait()
        before = child.pid
        await child.restart(60.0)
        assert child.pid not in (None, before)
        assert (child.state, child.restarts) == ("ready", 1)
        task.cancel()
        child.end(signal.SIGKILL)
        await child.ended(60)

    asyncio.run(run())
    assert not set(waits) - {process.CHECK_SECONDS}
    assert not caplog.text


def test_a_new_process_that_ends_at_once_is_reported():
    child = None

    async def check():
        return "" if child.command == ["false"] else "ready"

    async def run():
        nonlocal child
        child = Process("replica 1", ENDLESS, check)
        task = asyncio.ensure_future(child.supervise())
        await child.was_ready.wait()
        child.command = ["false"]
        with pytest.raises(
            InternalError, match="the new replica 1 ended with .* before it was ready"
        ):
            await child.restart(60.0)
        task.cancel()
        await child.ended(60)

    asyncio.run(run())


def test_a_silent_process_is_killed_after_several_checks(monkeypatch, caplog):
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.0)
    states = iter(["ready", "", "", "ready"])
    asked = []

    async def check():
        asked.append(next(states, ""))
        return asked[-1]

    async def run():
        child = Process("replica 1", ENDLESS, check)
        child._child = child._start()
        await child._watch(child._child)
        assert child._child.returncode == -signal.SIGKILL

    asyncio.run(run())
    assert len(asked) >= 7
    assert "replica 1 has not answered for 0 s: killed" in caplog.text


def test_a_process_that_was_silent_for_a_short_time_lives(monkeypatch):
    states = iter(["ready", "", "", "", "", "ready"])

    async def check():
        try:
            return next(states)
        except StopIteration:
            child.end(signal.SIGTERM)
            return "draining"

    child = None

    async def run():
        nonlocal child
        child = Process("replica 1", ENDLESS, check)
        child._child = child._start()
        await child._watch(child._child)
        assert child._child.returncode == -signal.SIGTERM

    asyncio.run(run())


def test_a_process_that_does_not_end_in_time_is_killed():
    async def run():
        child = Process("replica 1", ["sh", "-c", "trap '' TERM; sleep 1000"], ready)
        child._child = child._start()
        child.end(signal.SIGTERM)
        await child.ended(0.0)
        assert child.state == "ended"
        assert child.pid is None

    asyncio.run(run())


def test_a_process_uses_its_cpus_only():
    async def run():
        child = Process("replica 1", ENDLESS, ready, cpus={0})
        child._child = child._start()
        shown = subprocess.run(
            ["grep", "Cpus_allowed_list", f"/proc/{child.pid}/status"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert shown.stdout.split()[-1] == "0"
        child._child.kill()
        child._child.wait()

    asyncio.run(run())
