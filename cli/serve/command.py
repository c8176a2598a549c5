"""`lmchat serve`: checks the options, binds the address, loads the model and serves."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmchat.bundled import find_model
from lmchat.deploy.replica import check_weights
from lmchat.errors import InvalidRequest

from ..errors import INTERRUPTED, note
from ..options import DiskQuota, Model, with_engine_options
from ..output import drop_unread_output, say
from .options import Usage, config_of, engine_options, example, log_level

if TYPE_CHECKING:
    from lmchat import AsyncChatEngine
    from lmchat.server.config import MountedApp, ServerConfig

PORT = 23333
_OTHER_FILES = 1024

Mounts = Callable[["AsyncChatEngine", "ServerConfig"], Iterable["MountedApp"]]
"""Makes the apps that are mounted on the server. It is called while the model loads."""


def _no_mounts(_engine: AsyncChatEngine, _config: ServerConfig) -> Iterable[MountedApp]:
    return ()


@dataclass(frozen=True)
class Serving:
    """A server to run: its model, its options and its address."""

    model: str | None
    options: dict[str, Any]
    config: ServerConfig
    host: str
    port: int
    uds: Path | None
    log_level: str

    def run(self, mounts: Mounts, usage: Usage) -> None:
        """Serves until a signal."""
        from lmchat.server.logs import logged

        drop_unread_output()
        _allow_files(self.config.limits.connections)
        # With the default of 5 ms, the event loop waits that long for each busy thread.
        sys.setswitchinterval(0.001)
        bound = _bound(self.host, self.port, self.uds)
        try:
            with logged(self.log_level, sys.stderr), _exit_at_once():
                asyncio.run(self._serve(bound, mounts, usage))
        finally:
            for one in bound:
                one.close()
            if self.uds is not None:
                self.uds.unlink(missing_ok=True)

    async def _serve(self, bound: list[socket.socket], mounts: Mounts, usage: Usage) -> None:
        from lmchat import AsyncChatEngine

        engine = AsyncChatEngine(self.model, **self.options)
        loading = asyncio.ensure_future(engine.start())
        await asyncio.sleep(0)  # the model loads in another thread, the server's modules here
        from lmchat.server import create_app
        from lmchat.server.http.process import Server
        from lmchat.server.http.sockets import url_of

        apps = tuple(mounts(engine, self.config))
        await loading
        check_weights(engine.model, engine.sync.core.fingerprint)
        app = create_app(engine, self.config, mounts=apps)
        root = self.config.root_path
        url = f"unix:{self.uds}" if self.uds is not None else f"{url_of(bound[0])}{root}"

        def ready() -> None:
            name = app.state.model_name
            how = usage(url, self.uds, name, bool(self.config.keys))
            say(f"lmchat serves {name} at {url}\n{how}")

        await Server(app, engine, bound).run(ready)


def serving(
    help_text: str, mounts: Mounts = _no_mounts, usage: Usage = example
) -> Callable[..., None]:
    """Returns a command that serves a model over HTTP until a signal.

    Args:
        help_text: the command's help.
        mounts: further apps of the server.
        usage: what is printed below the server's address once it runs.
    """

    @functools.wraps(checked)
    def command(**options: Any) -> None:
        checked(**options).run(mounts, usage)

    command.__doc__ = help_text
    return command


@with_engine_options
def checked(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = PORT,
    uds: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Listen on this Unix socket (mode 0600) instead."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME:]KEY",
            help="Accept this key; repeatable. NAME owns the sessions made with it. [default: "
            "$LMCHAT_API_KEY]",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with one [NAME:]KEY per line, of mode 0600."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve other machines without a key, and any Host header."),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let programs of this origin in a browser use the API, such as "
            "https://notes.example; repeatable. *: of any, with a key.",
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Path of a proxy below which the server and its page are, such as /chat.",
        ),
    ] = "",
    model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model for clients. [default: the last part of MODEL]"),
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Requests that may wait for a slot. [default: 256]")
    ] = None,
    max_wait: Annotated[
        float | None,
        typer.Option(
            help="Predicted seconds to the first token above which a request is refused. "
            "[default: 30]"
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests that are computed at once. [default: 16]")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV tier in host memory, such as 8GiB.")
    ] = None,
    disk_quota: DiskQuota = None,
    import_pages: Annotated[
        bool, typer.Option("--import-pages", help="Use KV pages in imported archives.")
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(help="Time that running replies get to finish after SIGTERM.")
    ] = 30.0,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Set a limit of requests; repeatable. See docs/server.md."
        ),
    ] = None,
    log_to: Annotated[
        str,
        typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
    ] = "info",
    *,
    engine: dict[str, Any],
) -> Serving:
    """Checks the options of the command and returns the server to run."""
    options = engine_options(
        engine,
        max_queue=max_queue,
        max_wait=max_wait,
        max_batch_size=max_batch_size,
        host_memory=host_memory,
        disk_quota=disk_quota,
    )
    level = log_level(log_to)
    if not 0 <= port <= 65535:
        raise InvalidRequest(f"--port is {port}, expected 0 to 65535")
    config = config_of(
        host=None if uds is not None else host,
        api_key=api_key or (),
        api_keys=api_keys,
        insecure=insecure,
        model_name=model_name,
        import_pages=import_pages,
        drain_seconds=drain_seconds,
        limit=limit or (),
        allow_origin=allow_origin or (),
        root_path=root_path,
    )
    find_model(model)
    return Serving(model, options, config, host, port, uds, level)


def _allow_files(connections: int) -> None:
    """Raises the soft limit of open files, so that all connections fit beside the engine's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _bound(host: str, port: int, uds: Path | None) -> list[socket.socket]:
    from lmchat.server.http.sockets import tcp_sockets, unix_socket

    if uds is not None:
        return [unix_socket(uds)]
    return tcp_sockets(host, port)


@contextlib.contextmanager
def _exit_at_once() -> Iterator[None]:
    """Lets the signals that end a server end the process while the model loads, which cannot be
    interrupted. The server replaces these handlers once it runs."""

    from lmchat.server.signals import ending_signals

    def leave(number: int, _frame: object) -> None:
        note("interrupted")
        os._exit(INTERRUPTED if number == signal.SIGINT else 128 + number)

    before = {n: signal.signal(n, leave) for n in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


command = serving(
    """Serve a model over HTTP: OpenAI's API, durable sessions, and more.

    Sessions are those of lmchat chat. Without keys only programs of this machine are served. The
    log goes to stderr; prompts are not in it.

    SIGTERM, SIGHUP or Ctrl-C ends the server once running replies have finished; a second one but
    SIGHUP ends it at once. No token that a client has seen is lost.

    \b
    Examples:
      lmchat serve
      lmchat serve Qwen/Qwen2.5-0.5B-Instruct --port 8000
      lmchat serve ./model --host 0.0.0.0 --api-keys keys.txt
      lmchat serve ./model --uds /run/user/1000/lmchat.sock
      lmchat serve ./model --max-wait 1 --limit body=1MiB
    """
)
