"""Whether the server lives, whether it takes requests, its version, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

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


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus' text format."""
    return Response(await state_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
