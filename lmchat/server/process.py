"""Runs the app: sockets, the HTTP protocol, and an orderly end."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from lmchat.server.config import ServerConfig


def uvicorn_config(app: ASGIApp, config: ServerConfig, **address: object) -> uvicorn.Config:
    """Returns uvicorn's configuration for the app.

    Args:
        app: the app of `create_app()`.
        config: the server's configuration.
        address: `host` and `port`, or `uds`.
    """
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=config.limits.head,
        **address,  # type: ignore[arg-type]
    )
