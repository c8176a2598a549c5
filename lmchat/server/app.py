"""The ASGI app: all routes over one engine, behind the guard."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

import lmchat
from lmchat.aio.engine import AsyncChatEngine
from lmchat.server import errors, health, openai, sessions
from lmchat.server.config import MountedApp, ServerConfig
from lmchat.server.http.event_stream import Disconnected
from lmchat.server.http.exchange import CLIENT_CLOSED
from lmchat.server.http.guard import OPEN_PATHS, Guard
from lmchat.server.http.mounts import MountRoute, running
from lmchat.server.http.openapi import App
from lmchat.server.inference import routes as inference
from lmchat.server.loop_lag import watched
from lmchat.server.responses import conversations
from lmchat.server.responses import routes as responses
from lmchat.server.responses.cleanup import delete_forever, delete_oldest
from lmchat.server.retries.entries import Entries
from lmchat.server.state import ServerState
from lmchat.server.unknown_routes import REFUSALS

ROUTERS = (
    health.router,
    *openai.routers,
    *sessions.routers,
    responses.router,
    conversations.router,
    inference.router,
)


async def no_answer(_request: Request, _error: Exception) -> Response:
    """Returns a response that no client reads, for a request whose client has disconnected."""
    return Response(status_code=CLIENT_CLOSED)


def create_app(
    engine: AsyncChatEngine,
    config: ServerConfig | None = None,
    *,
    mounts: Iterable[MountedApp] = (),
) -> Guard:
    """Returns the server as an ASGI app.

    Args:
        engine: a started engine. The caller closes it after the app has ended.
        config: the configuration; None: all defaults.
        mounts: further ASGI apps. They start and end with the server.
    """
    # Programs do not know that each stored response is a session: those unused for the longest time
    # make room.
    make_room = functools.partial(delete_oldest, engine.sync)
    state = ServerState(engine, config or ServerConfig(), make_room)
    routes = tuple(map(MountRoute, mounts))

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        cleaning = asyncio.ensure_future(delete_forever(engine.sync))
        try:
            with watched(state.metrics.lagged):
                async with running(routes):
                    yield
        finally:
            state.part(Entries).flush()
            cleaning.cancel()
            await asyncio.wait({cleaning})
            state.metrics.close()

    app = App(
        open_paths=OPEN_PATHS,
        needs_key=bool(state.config.keys),
        title="lmchat",
        version=lmchat.__version__,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.server = state
    errors.install(app, REFUSALS)
    for gone in (ClientDisconnect, Disconnected):
        app.add_exception_handler(gone, no_answer)
    for router in ROUTERS:
        app.include_router(router)
    app.router.routes.extend(routes)
    return Guard(app, state, routes)
