"""The page as an ASGI app: its paths, its headers, and the owner of each request."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from lmchat.server import errors
from lmchat.server.config import MountedApp, ServerConfig
from lmchat.server.http.exchange import EXCHANGE
from lmchat.server.http.logins import Logins
from lmchat.server.root_path import PATH
from lmchat.server.sessions import archives
from lmchat.server.state import OWNER, STATE, state_of
from lmchat.server.unknown_routes import REFUSALS
from lmchat.store.records import LOCAL_OWNER
from lmchat.store.temporary import use_temporary_folder

from .chat import Chat
from .login import COOKIE, log_in, log_out
from .login import page as login_page
from .marks import Tabs
from .paths import FILES, REPEATED, STATIC, claims

if TYPE_CHECKING:
    from lmchat.aio.engine import AsyncChatEngine

_OFF = ("run_history", "ssr_mode", "enable_monitoring", "pwa", "mcp_server", "show_error")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def mounts(engine: AsyncChatEngine, config: ServerConfig) -> Iterable[MountedApp]:
    """Returns the page, to be mounted on a server of this engine.

    Args:
        engine: the engine. It need not have started.
        config: the server's configuration.
    """
    most, logins, chat = config.limits.import_body, Logins(config.keys), Chat(engine)
    app = gradio_app(chat, bool(logins), config.root_path)
    page = Page(app, logins, chat.tabs)
    files = Page(files_app(), logins, chat.tabs)
    return [
        MountedApp("/", page, own_login=True, claims=claims),
        MountedApp(
            "/",
            files,
            own_login=True,
            claims=lambda path: re.fullmatch(FILES, path) is not None,
            body=most,
        ),
    ]


class Page:
    """Passes requests to an app with their owner, and adds headers to the responses.

    Args:
        app: the app.
        logins: the users.
        tabs: the tabs, whose events only their owner reads.
    """

    def __init__(self, app: Any, logins: Logins, tabs: Tabs) -> None:
        self._app, self._logins, self._tabs = app, logins, tabs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request of the page."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        scope[STATE] = self._app.state.server = state_of(request)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), text.encode()) for name, text in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        app = await self._own_answer(request) or self._app
        await app(scope, receive, answer)

    async def _own_answer(self, request: Request) -> Response | None:
        """Sets the request's owner, or returns an answer that Gradio has no part in."""
        path, method, has_login = request.scope[PATH], request.method, bool(self._logins)
        if has_login and path == "/login":
            return await log_in(self._logins, request) if method == "POST" else login_page()
        if has_login and path == "/logout" and method == "POST":
            return log_out(request)
        owner = self._logins.owner(request.cookies.get(COOKIE, "")) if has_login else LOCAL_OWNER
        if path in ("/login", "/logout") or (owner is None and path == "/"):
            root = request.scope["root_path"]
            return RedirectResponse(f"{root}/login" if owner is None else f"{root}/", 303)
        tab = request.query_params.get("session_hash", "")
        if owner is None or self._tabs.is_foreign(owner, tab):
            request.scope[EXCHANGE].is_routine = path in REPEATED
            return PlainTextResponse(f"log in at {request.scope['root_path']}/login", 401)
        request.scope[OWNER] = owner
        return None


def files_app() -> FastAPI:
    """Returns the server's routes of archives, for visitors of the page."""
    app = FastAPI(openapi_url=None)
    errors.install(app, REFUSALS)
    app.include_router(archives.router, prefix="/page")
    return app


def gradio_app(chat: Chat, has_login: bool, root_path: str = "") -> Any:
    """Returns Gradio's app. Nothing of it calls other machines."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    use_temporary_folder()
    import gradio as gr

    from .blocks import blocks, theme

    app = FastAPI(openapi_url=None)
    app.mount(STATIC, StaticFiles(directory=Path(__file__).parent / "static"))
    head = (
        f'<meta name="lmchat-login" content="{int(has_login)}">'
        f'<link rel="stylesheet" href="{root_path}{STATIC}/page.css">'
        f'<script src="{root_path}{STATIC}/page.js" defer></script>'
    )
    off = dict.fromkeys(_OFF, False)
    return gr.mount_gradio_app(
        app,
        blocks(chat),
        path="/",
        root_path=root_path or None,
        footer_links=[],
        theme=theme(),
        head=head,
        **off,
    )
