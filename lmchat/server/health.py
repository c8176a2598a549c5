"""Whether the server lives, whether it takes requests, and its version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

import lmchat
from lmchat.server.errors import HttpError
from lmchat.server.state import state_of

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> JSONResponse:
    """Returns 200 while the process answers."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Returns 200 while new requests are accepted, 503 while the server ends."""
    if state_of(request).draining:
        raise HttpError(503, "the server is shutting down", code="shutting_down")
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> JSONResponse:
    """Returns the version of lmchat."""
    return JSONResponse({"version": lmchat.__version__})
