"""Refusals of requests that no route answers: they name what was asked for, and what there is."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Match, Mount
from starlette.types import Scope

from lmchat.server.errors import HttpError
from lmchat.server.root_path import PATH
from turbomind.shown import cut, printable

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""Methods that routes have. HEAD is answered where GET is."""

_API = "/v1"  # what the base URL of OpenAI's clients ends with
_MOST_PARTS = 12  # of a path for which the right one is looked up


def no_route(scope: Scope) -> HttpError:
    """Returns the refusal of a path that is unknown. It has the right path and the base URL where
    the client has put another one before the path, such as one with /v1 twice."""
    method = scope["method"]
    message = f"no such route: {method} {_shown(scope['path'])}"
    if meant := _meant(scope):
        base = _base(scope) + (_API if meant.startswith(f"{_API}/") else "")
        message += (
            f", expected {method} {scope['root_path']}{_shown(meant)}: the base URL is {base}"
        )
    return HttpError(404, message, code="unknown_url")


def not_allowed(scope: Scope) -> HttpError:
    """Returns the refusal of a method that the path does not have."""
    methods = [method for method in METHODS if _is_route(scope, method, scope["path"])]
    if "GET" in methods:
        methods.insert(1, "HEAD")
    message = f"{scope['method']} is not a method of {_shown(scope['path'])}"
    expected = f", expected {' or '.join(methods)}" if methods else ""
    return HttpError(
        405, message + expected, code="method_not_allowed", headers={"Allow": ", ".join(methods)}
    )


def _meant(scope: Scope) -> str | None:
    """Returns the path of a route for the last parts of the request's path, without the root path;
    None: there is none."""
    path, root = scope[PATH], scope["root_path"]
    parts = [part for part in path.split("/") if part]
    if len(parts) > _MOST_PARTS:
        return None
    for first in range(len(parts)):
        end = "/" + "/".join(parts[first:])
        for meant in (end, _API + end):
            if meant != path and _is_route(scope, scope["method"], root + meant):
                return meant
    return None


def _is_route(scope: Scope, method: str, path: str) -> bool:
    """Returns whether the app has a route. Those of mounted apps do not count."""
    app: FastAPI = scope["app"]
    asked = {**scope, "method": method, "path": path}
    return any(
        route.matches(asked)[0] is Match.FULL
        for route in app.router.routes
        if not isinstance(route, Mount)
    )


def _base(scope: Scope) -> str:
    """Returns the address of the server as the client has named it."""
    host = next((value for name, value in scope["headers"] if name == b"host"), b"HOST")
    name = _shown(host.decode("latin-1"))
    return f"{scope.get('scheme', 'http')}://{name}{scope['root_path']}"


def _shown(text: str) -> str:
    return printable(cut(text, 200))


REFUSALS = {404: no_route, 405: not_allowed}
"""What `errors.install()` answers for the router."""
