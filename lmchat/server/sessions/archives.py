"""Routes that export a session as a zip and import one."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, StreamingResponse

from lmchat.public_text import public_notice
from lmchat.server.sessions import views
from lmchat.server.sessions.access import in_thread, session_of
from lmchat.server.sessions.records import flag
from lmchat.server.state import owner_of, state_of

router = APIRouter(tags=["sessions"])

_PIECE = 1 << 20  # bytes read or written at once


@router.get("/v1/sessions/{session_id}/export")
async def export(request: Request) -> StreamingResponse:
    """Returns the session as a zip, with its KV if `pages=true`."""
    session = await session_of(request)
    pages = flag(request, "pages")
    path = _temporary()
    notices: list[str] = []
    try:
        done = await in_thread(
            lambda: session.export(path, pages, force=True, notify=notices.append)
        )
        file = path.open("rb")
    finally:
        _remove(path)  # the open file stays readable, and nothing is left if the client goes
    headers = {
        "Content-Length": str(os.fstat(file.fileno()).st_size),
        "Content-Disposition": f'attachment; filename="session-{session.id}.zip"',
        "X-Lmchat-Turns": str(done.turns),
        "X-Lmchat-Pages": str(done.pages),
        "X-Lmchat-Left-Out": json.dumps([public_notice(text) for text in notices])[:4000],
    }
    return StreamingResponse(_pieces(file), media_type="application/zip", headers=headers)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await in_thread(lambda: file.read(_PIECE)):
            yield piece


@router.post("/v1/sessions/import", status_code=201)
async def import_(request: Request) -> JSONResponse:
    """Creates a session from a zip that `export` has made. `name` is its new name.

    KV in it is left out unless the server was started with `--import-pages`.
    """
    state, owner = state_of(request), owner_of(request)
    engine, name = state.engine.sync, request.query_params.get("name")
    details = flag(request, "details")
    pages = state.config.import_pages and request.query_params.get("pages") != "false"
    path = _temporary()
    notices: list[str] = []

    def take() -> dict[str, Any]:
        with state.session_limit.room(owner):
            session = engine.import_(path, name, owner=owner, pages=pages, notify=notices.append)
        session.fresh = False
        return views.whole(session, details=details)

    try:
        await _receive(request, path)
        found = await in_thread(take)
    finally:
        _remove(path)
    return JSONResponse({**found, "left_out": [public_notice(text) for text in notices]}, 201)


async def _receive(request: Request, path: Path) -> None:
    """Writes the body to a file."""
    pending = bytearray()
    with path.open("wb") as file:
        async for piece in request.stream():
            pending += piece
            if len(pending) >= _PIECE:
                data, pending = pending, bytearray()
                await in_thread(lambda data=data: file.write(data))  # type: ignore[misc]
        await in_thread(lambda: file.write(pending))


def _temporary() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="lmchat-", suffix=".zip")
    os.close(descriptor)
    return Path(name)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
