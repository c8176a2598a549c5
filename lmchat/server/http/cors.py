"""Answers for programs in a browser (cross-origin resource sharing).

Protocol: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from lmchat.server.http.parameters import SESSION_HEADER
from lmchat.server.unknown_routes import METHODS

EXPOSED = (
    SESSION_HEADER, "Allow", "Content-Disposition", "ETag", "Inference-Header-Content-Length",
    "Location", "Retry-After", "retry-after-ms", "X-Lmchat-Left-Out", "X-Lmchat-Pages",
    "X-Lmchat-Turns",
)  # fmt: skip
"""Headers of responses that these programs can read, beside those that all can."""


def with_origins(app: ASGIApp, origins: Collection[str]) -> CORSMiddleware:
    """Returns an app that answers preflights, and lets programs of the origins read its answers.
    No cookie goes with their requests."""
    # A page of the internet asks for it before it calls a server of a private network.
    private = "allow_private_network"
    known = inspect.signature(CORSMiddleware).parameters
    options: dict[str, Any] = {private: True} if private in known else {}
    return CORSMiddleware(
        app,
        allow_origins=sorted(origins),
        allow_methods=(*METHODS, "HEAD"),
        allow_headers=["*"],
        expose_headers=EXPOSED,
        **options,
    )
