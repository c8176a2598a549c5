"""Sockets that a server listens on."""

import asyncio

import pytest

from lmchat.server.http import sockets


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
