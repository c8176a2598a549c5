"""The first thing that sees a request: who sends it, and whether it may pass.

Everything but `/health` and `/ready` needs a key where keys are configured. Without keys only
requests that name this machine's loopback address are accepted, so that web pages in a browser
cannot use the server (DNS rebinding, cross-site requests).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmchat.server.config import LOCAL, ServerConfig
from lmchat.server.errors import HttpError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Keys:
    """API keys and their owners. Looking one up takes the same time for every key."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(_digest(key.encode()), owner) for key, owner in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: bytes) -> str | None:
        """Returns the owner that a key names, or None for a wrong key."""
        found, seen = None, _digest(key)
        for digest, owner in self._digests:  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, seen):
                found = owner
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """An ASGI app around another one. Sets the request's owner, or refuses the request.

    Args:
        app: the app.
        config: keys, accepted Host headers and limits.
        own_logins: paths of mounted apps that identify their users themselves.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, own_logins: tuple[str, ...] = ()
    ) -> None:
        self._app = app
        self._config = config
        self._keys = Keys(config.keys)
        self._own_logins = own_logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its owner, or answers with a refusal."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = _headers(scope)
        try:
            scope["lmchat.owner"] = self._owner(scope, headers)
            limit = self._body_limit(scope["path"], headers)
        except HttpError as error:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, limited(receive, limit), send)

    def _owner(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        path = scope["path"]
        if not self._keys:
            self._check_origin(headers)
            return LOCAL
        if path in OPEN_PATHS or any(
            path == own or path.startswith(own + "/") for own in self._own_logins
        ):
            return LOCAL
        owner = self._keys.owner(_key(headers))
        if owner is None:
            raise HttpError(
                401,
                "the API key is missing or wrong, expected 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuses requests that a web page of another site has caused."""
        if self._config.any_host:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        name = _name(f"//{host}")
        if name not in _LOOPBACK | self._config.hosts:
            raise HttpError(
                403, f"the Host header is {host[:100]!r}, expected a loopback name", code="host"
            )
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin.decode("latin-1")).netloc != host:
            raise HttpError(
                403, f"the Origin is {origin[:100]!r}, expected this server's own", code="origin"
            )

    def _body_limit(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        limits = self._config.limits
        most = limits.import_body if path == "/v1/sessions/import" else limits.body
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            raise too_large(most)
        return most


def too_large(most: int) -> HttpError:
    """Returns the refusal of a body of more than `most` bytes."""
    return HttpError(413, f"the body is larger than {most} bytes", code="body_too_large")


def limited(receive: Receive, most: int) -> Receive:
    """Returns a `receive` that raises HttpError once a body is larger than `most` bytes."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > most:
                raise too_large(most)
        return message

    return counted


def _headers(scope: Scope) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in scope.get("headers", ()):
        found.setdefault(name, value)
    return found


def _key(headers: Mapping[bytes, bytes]) -> bytes:
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"")


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
