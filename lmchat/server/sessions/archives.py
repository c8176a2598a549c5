"""Routes that export a session as a zip and import one."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from lmchat.errors import InvalidRequest, StoreError, loggable, with_public
from lmchat.public_text import public_notice
from lmchat.server.archive_limit import threads
from lmchat.server.http.json_answer import json_answer
from lmchat.server.http.parameters import Details, Text
from lmchat.server.sessions import views
from lmchat.server.sessions.access import Opened, in_thread
from lmchat.server.state import owner_of, state_of
from lmchat.store.temporary import temporary_folder

router = APIRouter(tags=["sessions"])

_PIECE = 1 << 20  # bytes read or written at once


@router.get("/v1/sessions/{session_id}/export")
async def export(request: Request, session: Opened, pages: bool = False) -> StreamingResponse:
    """Returns the session as a zip, with its KV if `pages=true`."""
    with contextlib.ExitStack() as held:
        held.enter_context(state_of(request).archive_limit.room(owner_of(request)))
        path = _temporary()
        notices: list[str] = []
        try:
            with _named(path):
                done = await threads.run(
                    session.export, path, pages, force=True, notify=notices.append
                )
            file = held.enter_context(path.open("rb"))
        finally:
            _remove(path)  # the open file stays readable, and nothing is left if the client goes
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": f'attachment; filename="session-{session.id}.zip"',
            "X-Lmchat-Turns": str(done.turns),
            "X-Lmchat-Pages": str(done.pages),
            "X-Lmchat-Left-Out": json.dumps([public_notice(text) for text in notices])[:4000],
        }
        return _Archive(file, held.pop_all(), headers)


class _Archive(StreamingResponse):
    """Sends a file, and closes what is `held` for it, however that ends."""

    def __init__(self, file: BinaryIO, held: contextlib.ExitStack, headers: dict[str, str]) -> None:
        super().__init__(_pieces(file), media_type="application/zip", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await in_thread(lambda: file.read(_PIECE)):
        yield piece


@router.post("/v1/sessions/import", status_code=201)
async def import_(
    request: Request, name: Text = None, pages: bool = True, details: Details = False
) -> JSONResponse:
    """Creates a session from a zip that `export` has made. `name` is its new name.

    KV in it is left out unless the server was started with `--import-pages`.
    """
    state, owner = state_of(request), owner_of(request)
    engine, pages = state.engine.sync, pages and state.config.import_pages
    notices: list[str] = []

    def take(path: Path) -> dict[str, Any]:
        with state.session_limit.room(owner):
            session = engine.import_(path, name, owner=owner, pages=pages, notify=notices.append)
        session.fresh = False
        return views.whole(session, details=details)

    with state.archive_limit.room(owner):
        path = _temporary()
        try:
            with _named(path):
                await _receive(request, path)
            found = await threads.run(take, path)
        finally:
            _remove(path)
    return await json_answer({**found, "left_out": [public_notice(text) for text in notices]}, 201)


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


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raises StoreError, which names the folder, where the temporary file cannot be written."""
    try:
        yield
    except (OSError, InvalidRequest) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        why = os.strerror(cause.errno or 0)
        refused = StoreError(
            f"the folder for temporary files, {path.parent}, cannot hold the archive: {why}. Set "
            "TMPDIR to a folder with room"
        )
        public = f"the server's folder for temporary files cannot hold the archive: {why}"
        raise with_public(loggable(refused), public) from error


def _temporary() -> Path:
    descriptor, name = tempfile.mkstemp(".zip", "lmchat-", temporary_folder())
    os.close(descriptor)
    return Path(name)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
