"""A watched child process: restarts, back-off, the end of a silent one."""

import asyncio
import signal
import subprocess

import pytest

from lmchat.cli.deploy import process
from lmchat.cli.deploy.process import Process
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


def test_a_process_that_never_gets_ready_is_not_started_again():
    async def silent():
        return ""

    with pytest.raises(InternalError, match="replica 1 ended with exit code 3 before it was ready"):
        asyncio.run(Process("replica 1", ["sh", "-c", "exit 3"], silent).supervise())


def test_a_process_that_ends_is_started_again_later_and_later(waits, capfd):
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
    assert "replica 1 ended with exit code 1: it starts again in 0.5 s" in capfd.readouterr().err


def test_a_process_is_replaced_at_once(waits, capfd):
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
    assert not capfd.readouterr().err


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
        with pytest.raises(InternalError, match="the new replica 1 ended before it was ready"):
            await child.restart(60.0)
        task.cancel()
        await child.ended(60)

    asyncio.run(run())


def test_a_silent_process_is_killed_after_several_checks(monkeypatch, capfd):
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
    assert "replica 1 has not answered for 0 s: killed" in capfd.readouterr().err


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
