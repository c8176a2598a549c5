"""What the server tells systemd."""

import asyncio
import os
import socket

import pytest

from lmchat.server.http.notify import READY, notify, report_alive, report_ready


@pytest.fixture(params=["file", "abstract"])
def manager(request, tmp_path, monkeypatch):
    """The socket of a service manager."""
    path = str(tmp_path / "notify")
    name = path if request.param == "file" else f"@lmchat-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(name.replace("@", "\0"))
        found.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield found


def test_a_message_arrives(manager):
    notify(READY)
    assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("path", [None, "", "/no/such/socket"])
def test_without_a_manager_nothing_is_sent(path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if path is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify(READY)


def test_a_full_queue_is_waited_for(manager):
    count = 0
    while notify("STATUS=another service"):
        count += 1

    async def run():
        sending = asyncio.ensure_future(report_ready())
        await asyncio.sleep(0)  # a first try
        found = [manager.recv(100) for _ in range(count)]
        await sending
        return found, manager.recv(100)

    found, last = asyncio.run(run())
    assert set(found) == {b"STATUS=another service"}
    assert last == b"READY=1"


@pytest.mark.parametrize("pid", [None, str(os.getpid())])
def test_a_watchdog_is_fed_again_and_again(manager, pid, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "2")
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)

    async def run():
        task = asyncio.ensure_future(report_alive())
        found = [await asyncio.to_thread(manager.recv, 100) for _ in range(3)]
        task.cancel()
        return found

    assert asyncio.run(run()) == [b"WATCHDOG=1"] * 3


@pytest.mark.parametrize(
    ("microseconds", "pid"), [(None, None), ("", None), ("x", None), ("2", "1")]
)
def test_without_a_watchdog_nothing_is_sent(microseconds, pid, monkeypatch):
    for name, value in (("WATCHDOG_USEC", microseconds), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    asyncio.run(report_alive())  # it ends
