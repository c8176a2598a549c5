"""The first thing that sees a request: who sends it, and whether it may pass.

Everything but `/health` and `/ready` needs a key where keys are configured. Without keys only
requests that name this machine's loopback address are accepted, so that web pages in a browser
cannot use the server (DNS rebinding, cross-site requests). All checks use `scope[PATH]`, from
which the router chooses a route.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import unquote_to_bytes, urlsplit

from fastapi import FastAPI
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from lmchat.server.config import MountedApp, ServerConfig
from lmchat.server.errors import HttpError, error_response
from lmchat.server.http.cors import with_origins
from lmchat.server.http.event_stream import ABORT, Disconnected
from lmchat.server.http.exchange import Exchange
from lmchat.server.http.mounts import MountRoute
from lmchat.server.http.parameters import NAMING
from lmchat.server.root_path import PATH, below
from lmchat.server.state import OWNER, ServerState
from lmchat.store.records import LOCAL_OWNER
from turbomind.shown import shown

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key."""

PROBES = OPEN_PATHS | {"/metrics", "/version"}
"""Paths that answer while the server ends, and for whose requests it does not wait."""

_JSON = "application/json"
_BINARY = frozenset({_JSON, "application/octet-stream", "application/zip"})
_ENDING = ("/stop", "/cancel")  # requests that end a generation pass while the server ends
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:[0-9]{1,5})?", re.IGNORECASE)


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
    """The server as an ASGI app. Sets each request's owner, or refuses the request.

    Args:
        app: the app with all routes.
        state: the state of the server: keys, accepted Host headers and limits.
        mounts: the routes of mounted apps.
    """

    def __init__(self, app: FastAPI, state: ServerState, mounts: tuple[MountRoute, ...]) -> None:
        self.app = app
        """The app behind this one."""
        self.state = state
        """What all routes share."""
        self._keys = Keys(state.config.keys)
        self._mounts = mounts
        self._origins = state.config.allow_origins
        self._shared = with_origins(self._checked, self._origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its owner, or answers with a refusal."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        method = scope["method"]
        scope = below(self.state.config.root_path, scope)
        if method == "HEAD":  # routes answer GET, and the exchange sends the head of their answers
            scope["method"] = "GET"
        exchange = Exchange(scope, send, self.state, method, scope[PATH] in OPEN_PATHS)
        app = self._shared if self._is_shared(scope) else self._checked
        try:
            await app(scope, receive, exchange.send)
        except Disconnected:
            pass
        except Exception:  # it was logged, and answered unless the response had begun
            if not exchange.is_complete:
                scope.get(ABORT, _nothing)()
        finally:
            exchange.end()

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request if it may pass."""
        if not scope[PATH]:  # relative links of a page need the slash at the end
            return await _with_slash(scope)(scope, receive, send)
        mount = self._mount(scope)
        try:
            self._identify(scope, mount)
            if _is_about_server(scope):
                return await Response(status_code=204)(scope, receive, send)
            _check_names(scope)
            body = Body(scope, self.state, mount)
            self._check_accepting(scope)
        except HttpError as error:
            return await error_response(error, scope[PATH])(scope, receive, send)
        counted = _Counted(self.state, scope[PATH] not in PROBES)

        async def answer(message: Message) -> None:
            if mount is not None and message["type"] == "http.response.start":
                counted.leave()  # it may be a stream without an end
            await send(message)

        try:
            await self.app(scope, body.limited(receive), answer)
        finally:
            body.drop()
            counted.leave()

    def _is_shared(self, scope: Scope) -> bool:
        """Returns whether a program of an allowed origin asks. Apps with logins of their own, whose
        cookies browsers send, are for their own pages alone."""
        if not self._origins or _allowed_origin(Headers(scope), self._origins) is None:
            return False
        mount = self._mount(scope)
        return mount is None or not mount.own_login

    # --- who sends it -----------------------------------------------------------------------------

    def _identify(self, scope: Scope, mount: MountedApp | None) -> None:
        """Sets the owner of the request, but for an app that identifies its users itself."""
        headers = Headers(scope)
        if mount is not None and mount.own_login:
            # A browser sends a cookie only to the host that has set it. So any host is safe there.
            _check_origin(headers, self.state.config, any_host=bool(self._keys))
            return
        if not self._keys:
            _check_origin(headers, self.state.config, allowed=self._origins)
        is_open = not self._keys or scope[PATH] in OPEN_PATHS or _is_about_server(scope)
        scope[OWNER] = LOCAL_OWNER if is_open else self._keyed(headers)

    def _keyed(self, headers: Headers) -> str:
        owner = self._keys.owner(_key(headers))
        if owner is None:
            raise HttpError(
                401,
                "the API key is missing or wrong, expected 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner

    def _mount(self, scope: Scope) -> MountedApp | None:
        """Returns the mounted app that the router passes the request to."""
        if any(route.matches(scope)[0] is Match.FULL for route in self._mounts):
            for route in self.app.router.routes:
                if route.matches(scope)[0] is Match.FULL:
                    return route.mount if isinstance(route, MountRoute) else None
        return None

    def _check_accepting(self, scope: Scope) -> None:
        """Refuses requests that may start a generation while the server ends."""
        is_harmless = scope["method"] in ("GET", "DELETE")
        if self.state.draining and not is_harmless and not scope[PATH].endswith(_ENDING):
            raise shutting_down()


class _Counted:
    """Counts a request as being answered, until `leave()`.

    Args:
        state: the state of the server.
        is_awaited: whether the server waits for the request before it ends.
    """

    def __init__(self, state: ServerState, is_awaited: bool) -> None:
        self._state, self._is_counted = state, is_awaited
        state.in_flight += is_awaited

    def leave(self) -> None:
        """Counts the request no longer. Idempotent."""
        self._state.in_flight -= self._is_counted
        self._is_counted = False


def shutting_down() -> HttpError:
    """Returns the refusal of a request while the server ends."""
    return HttpError(503, "the server is shutting down", code="shutting_down")


def _with_slash(scope: Scope) -> Response:
    """Returns the redirect from the root path to the path below it."""
    query = scope["query_string"].decode("latin-1")
    return RedirectResponse(f"{scope['root_path']}/{'?' if query else ''}{query}", 308)


def _is_about_server(scope: Scope) -> bool:
    """Returns whether a request asks for the server itself, which a client does to see that it
    answers (RFC 9110 9.3.7)."""
    return bool(scope["method"] == "OPTIONS" and scope[PATH] == "*")


def _nothing() -> None:
    """Stands for dropping the connection where the ASGI server cannot."""


class Headers:
    """The headers of a request by name; a name may occur several times."""

    def __init__(self, scope: Scope) -> None:
        self._all: list[tuple[bytes, bytes]] = scope["headers"]

    def all(self, name: bytes) -> list[str]:
        """Returns the values of all headers of that name."""
        return [value.decode("latin-1") for found, value in self._all if found.lower() == name]

    def one(self, name: bytes) -> str | None:
        """Returns the value of a header, or None.

        Raises:
            HttpError: it occurs several times.
        """
        found = self.all(name)
        if len(found) > 1:
            raise HttpError(
                400, f"the header {name.decode()} is given {len(found)} times, expected once"
            )
        return found[0] if found else None


def _key(headers: Headers) -> bytes:
    kind, _, key = (headers.one(b"authorization") or "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip().encode("latin-1")
    return (headers.one(b"x-api-key") or "").encode("latin-1")


def _check_origin(
    headers: Headers,
    config: ServerConfig,
    any_host: bool = False,
    allowed: Collection[str] = (),
) -> None:
    """Refuses requests that a web page of another site has caused, unless its origin is allowed."""
    host = headers.one(b"host") or ""
    if not (any_host or config.any_host or is_own_host(host, config.hosts)):
        raise HttpError(
            403, f"the Host header is {host[:100]!r}, expected a loopback name", code="host"
        )
    if _allowed_origin(headers, allowed) is not None:
        return
    origin = headers.one(b"origin")
    if origin is not None and _netloc(origin) != host.lower():
        raise HttpError(
            403, f"the Origin is {origin[:100]!r}, expected this server's own", code="origin"
        )
    site = headers.one(b"sec-fetch-site")
    if site in ("cross-site", "same-site") and headers.one(b"sec-fetch-mode") != "navigate":
        raise HttpError(403, f"Sec-Fetch-Site is {site!r}, expected 'same-origin'", code="origin")


def _allowed_origin(headers: Headers, allowed: Collection[str]) -> str | None:
    """Returns the origin of a request, if it is given once and is allowed."""
    origins = headers.all(b"origin")
    is_allowed = len(origins) == 1 and ("*" in allowed or origins[0] in allowed)
    return origins[0] if is_allowed else None


def _check_names(scope: Scope) -> None:
    """Refuses names that routes would read in another way than other programs: bytes that are not
    UTF-8, which would become equal to each other, and headers that are given twice."""
    parts: dict[str, bytes | None] = {"path": scope.get("raw_path"), "query": scope["query_string"]}
    for part, raw in parts.items():
        sent = raw or b""
        try:
            unquote_to_bytes(sent).decode("utf-8")
        except UnicodeDecodeError:
            seen = shown(sent.decode("latin-1"))
            raise HttpError(
                400, f"the {part} is {seen}, expected percent-encoded UTF-8", code="invalid_utf8"
            ) from None
    headers = Headers(scope)
    for name in NAMING:
        headers.one(name.encode())


def is_own_host(host: str, more: frozenset[str] = frozenset()) -> bool:
    """Returns whether a Host header names this machine's loopback address, or one of `more`."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").removesuffix(".").lower()
    if name == "localhost" or name in more:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class Body:
    """A request's body: it is checked before it is read, and its size while it is read.

    Args:
        scope: the request, with its owner.
        state: the state of the server: its limits, and the bodies of other requests.
        mount: the mounted app that gets the request.

    Raises:
        HttpError: its length, coding or type is refused.
    """

    def __init__(self, scope: Scope, state: ServerState, mount: MountedApp | None) -> None:
        headers, path, limits = Headers(scope), scope[PATH], state.limits
        is_import = mount is None and path == "/v1/sessions/import"
        most = mount.body if mount is not None else limits.import_body if is_import else None
        self.most = limits.body if most is None else most
        """Largest size, in bytes."""
        self._bodies = state.bodies if most is None else None  # archives are written to a file
        self._owner: str = scope.get(OWNER) or f"{mount and mount.path}/"  # no owner has a slash
        self._size = 0
        lengths, codings = headers.all(b"content-length"), headers.all(b"transfer-encoding")
        length = lengths[0] if lengths else "0"
        if not (length.isascii() and length.isdigit()):
            raise HttpError(400, f"Content-Length is {length[:100]!r}, expected a number")
        if len(length) > 20 or int(length) > self.most:
            raise too_large(self.most)
        if mount is None and (codings or int(length)):
            is_inference = path.startswith("/v2/")
            _check_type(headers, _BINARY if is_import or is_inference else {_JSON}, is_inference)

    def limited(self, receive: Receive) -> Receive:
        """Returns a `receive` that raises HttpError once the body, or all bodies of its owner, are
        too large."""

        async def counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                self._add(len(message.get("body", b"")))
            return message

        return counted

    def _add(self, size: int) -> None:
        if self._size + size > self.most:
            raise too_large(self.most)
        if self._bodies is not None and size:
            self._bodies.add(self._owner, size)
        self._size += size

    def drop(self) -> None:
        """Counts the body no longer, after its request."""
        if self._bodies is not None and self._size:
            self._bodies.remove(self._owner, self._size)
        self._size = 0


def _check_type(headers: Headers, allowed: frozenset[str] | set[str], may_lack: bool) -> None:
    """Refuses bodies that a web page can send without asking (forms), and compressed ones.

    Args:
        headers: the headers.
        allowed: media types.
        may_lack: whether the type may be missing, as from Triton's clients.
    """
    coding = headers.one(b"content-encoding")
    if coding not in (None, "", "identity"):
        raise HttpError(415, f"Content-Encoding is {str(coding)[:100]!r}, expected none")
    given = headers.one(b"content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind in allowed or (may_lack and given is None and not headers.all(b"origin")):
        return
    expected = " or ".join(sorted(allowed))
    raise HttpError(415, f"Content-Type is {kind[:100]!r}, expected {expected}")


def too_large(most: int) -> HttpError:
    """Returns the refusal of a body of more than `most` bytes."""
    return HttpError(413, f"the body is larger than {most} bytes", code="body_too_large")
