"""Mounted apps: their routes among the server's own, and their lifespans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmchat.server.config import MountedApp
from lmchat.server.root_path import PATH

log = logging.getLogger("lmchat.server")


class MountRoute(Mount):
    """The route of a mounted app. A path that the app does not claim is not its path here.

    Args:
        mount: the app.
    """

    def __init__(self, mount: MountedApp) -> None:
        self.mount = mount
        """The app and its rules."""
        self.lifespan = Lifespan(mount.app)
        """Its start and end."""
        super().__init__(mount.path, app=self.lifespan.with_state)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns whether the app answers the request."""
        claims = self.mount.claims
        if scope["type"] != "http" or (claims is not None and not claims(scope[PATH])):
            return Match.NONE, {}
        return super().matches(scope)


class Lifespan:
    """The start and the end of an ASGI app that no ASGI server runs.

    Protocol: https://asgi.readthedocs.io/en/stable/specs/lifespan.html

    Args:
        app: the app.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: dict[str, Any] = {}

    async def with_state(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the app, with what the app's start has put into `state`."""
        scope["state"] = self._state.copy()
        await self._app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts the app, and ends it at the end. An app without a lifespan is left alone.

        Raises:
            RuntimeError: the app reported that it could not start.
        """
        events: asyncio.Queue[Message] = asyncio.Queue()
        answers: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            if events.empty():
                answers.put_nowait(None)  # it asks for more: what it has not answered it ignores
            return await events.get()

        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self._state,
        }

        async def exchange(event: str) -> bool:
            """Sends an event. Returns whether the app has answered it."""
            while not answers.empty():
                answers.get_nowait()
            events.put_nowait({"type": f"lifespan.{event}"})
            answering = asyncio.ensure_future(answers.get())
            await asyncio.wait({answering, task}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.cancel():
                return _is_complete(event, answering.result())
            return False

        task = asyncio.ensure_future(self._app(scope, receive, answers.put))
        try:
            if await exchange("startup"):
                yield
                await exchange("shutdown")
            else:
                yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            # An app may refuse the protocol by any error, which is retrieved here.
            _ = task.cancelled() or task.exception()


def _is_complete(event: str, answer: Message | None) -> bool:
    """Returns whether an app's answer to an event is that of the protocol.

    Raises:
        RuntimeError: the app failed.
    """
    kind = None if answer is None else answer["type"]
    if answer is not None and kind == f"lifespan.{event}.failed":
        reason = str(answer.get("message", "")).rstrip()
        log.error("a mounted app failed at %s: %s", event, reason)
        raise RuntimeError(f"a mounted app failed at {event}: {reason}")
    return kind == f"lifespan.{event}.complete"


@contextlib.asynccontextmanager
async def running(routes: Iterable[MountRoute]) -> AsyncIterator[None]:
    """Starts mounted apps in order, and ends them in the opposite order."""
    async with contextlib.AsyncExitStack() as stack:
        for route in routes:
            await stack.enter_async_context(route.lifespan.running())
        yield
