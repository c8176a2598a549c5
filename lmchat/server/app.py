"""The ASGI app: all routes over one engine, behind the guard."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.types import ASGIApp

import lmchat
from lmchat.aio import AsyncChatEngine
from lmchat.server import errors, health, openai
from lmchat.server.config import MountedApp, ServerConfig
from lmchat.server.guard import Guard
from lmchat.server.state import ServerState

ROUTERS = (health.router, *openai.routers)


def create_app(
    engine: AsyncChatEngine,
    config: ServerConfig | None = None,
    *,
    mounts: Iterable[MountedApp] = (),
) -> ASGIApp:
    """Returns the server as an ASGI app.

    Args:
        engine: a started engine. The caller closes it after the app has ended.
        config: the configuration; None: all defaults.
        mounts: further ASGI apps.
    """
    config = config or ServerConfig()
    mounts = tuple(mounts)
    app = FastAPI(title="lmchat", version=lmchat.__version__, redirect_slashes=False)
    app.state.server = ServerState(engine, config)
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    for mount in mounts:
        app.mount(mount.path, mount.app)
    return Guard(app, config, tuple(mount.path for mount in mounts if mount.own_login))
