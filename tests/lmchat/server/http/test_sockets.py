"""Sockets that a server listens on."""

import asyncio
import contextlib
import socket

import pytest

from lmchat.errors import InvalidRequest
from lmchat.server.http import sockets


@pytest.fixture
def needs_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"needs IPv6 ({error})")


@pytest.mark.usefixtures("needs_ipv6")
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST."])
def test_localhost_has_both_addresses(host):
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(one) for one in sockets.tcp_sockets(host, 0)]
        ports = {one.getsockname()[1] for one in bound}
        assert [one.getsockname()[0] for one in bound] == ["127.0.0.1", "::1"]
        assert len(ports) == 1
        (port,) = ports
        assert sockets.addresses_of(host, port) == [f"127.0.0.1:{port}", f"[::1]:{port}"]


@pytest.mark.usefixtures("needs_ipv6")
def test_a_port_in_use_at_one_address_of_a_name_is_refused():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as used:
        port = used.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"port {port} of localhost is in use"):
            sockets.tcp_sockets("localhost", port)
        socket.create_server(("127.0.0.1", port)).close()  # the other one was closed


def test_an_address_that_the_machine_has_not_is_left_out(monkeypatch):
    monkeypatch.setattr(sockets, "_LOOPBACK", ("192.0.2.1", "127.0.0.1"))
    with contextlib.closing(*sockets.tcp_sockets("localhost", 0)) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    assert sockets.addresses_of("localhost", 80) == ["127.0.0.1:80"]


@pytest.mark.parametrize("what", ["socket", "folder"])
def test_a_socket_whose_file_is_removed_is_made_again(tmp_path, monkeypatch, what):
    """Once its folder is there; nothing is done to a file that is in its place."""
    monkeypatch.setattr(sockets, "LOOK_SECONDS", 0.0)
    path = tmp_path / "folder" / "socket"
    path.parent.mkdir()
    servers = []

    async def listen(bound):
        servers.append(await asyncio.start_unix_server(answer, sock=bound))

    async def answer(_reader, writer):
        writer.write(b"%d" % len(servers))
        writer.close()

    async def asked():
        while not path.exists():
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_unix_connection(path)
        answer = int(await reader.read())
        writer.close()
        return answer

    async def run():
        keeping = asyncio.ensure_future(sockets.keep_listening(path, listen))
        assert await asked() == 1
        assert await asked() == 1
        path.unlink()
        if what == "folder":
            path.parent.rmdir()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not keeping.done()
            path.parent.mkdir()
        assert await asked() == 2
        assert path.stat().st_mode & 0o777 == 0o600
        keeping.cancel()
        for server in servers:
            server.close()
            await server.wait_closed()

    asyncio.run(run())
