"""The routes of a server, and other spellings of their paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmchat.server.http.guard import Guard

EXAMPLES = {"model": "memo"}
EXAMPLE_ID = "0" * 32
"""Stands in paths for parameters that are not in EXAMPLES."""


def routes(app: Guard) -> list[tuple[str, str]]:
    """Returns (method, path) of every route, with an example in place of each parameter."""
    described: dict[str, dict[str, Any]] = app.app.openapi()["paths"]
    found = {
        (method.upper(), re.sub(r"\{([^}]*)\}", lambda m: EXAMPLES.get(m[1], EXAMPLE_ID), path))
        for path, methods in described.items()
        for method in methods
    }
    for route in app.app.routes:  # those that are not described, such as the documentation
        path = getattr(route, "path", None)
        if path and "{" not in path:
            found |= {(method, path) for method in getattr(route, "methods", None) or ()}
    return sorted(found)


def spellings(path: str) -> list[bytes]:
    """Returns at least 60 ways to write a path in a request line."""
    return sorted(set(_spellings(path)))


def _spellings(path: str) -> Iterator[bytes]:
    raw, first, last = path.encode(), path.encode()[1:2], path.encode()[-1:]
    rest = raw[1:]
    parent, _, name = raw.rpartition(b"/")
    yield raw
    yield b"".join(b"%%%02x" % byte for byte in raw)  # its slashes too
    yield b"/" + b"".join(b"%%%02X" % byte for byte in rest)
    yield b"/%%%02x" % first[0] + raw[2:]
    yield raw[:-1] + b"%%%02x" % last[0]
    yield b"/" + b"".join(b"%%25%02x" % byte for byte in rest)  # encoded twice
    yield raw.replace(b"/", b"%2f")
    yield raw.replace(b"/", b"%2F")
    yield b"/" + rest.replace(b"/", b"%2f")
    yield raw.replace(b"/", b"%5c")
    yield raw.replace(b"/", b"\\")
    yield raw.upper()
    yield raw.swapcase()
    yield raw.title()
    for slashes in (b"//", b"///", b"/./", b"/.//", b"/%2e/", b"/../", b"/..%2f", b"/x/../"):
        yield slashes + rest
    for ending in (
        b"/", b"//", b"/.", b"/..", b"/./", b"%2f", b"%00", b"%0a", b"%0d%0a", b"%20", b"+", b";",
        b";a=b", b";/", b"?", b"?a=b", b"?/health", b"?path=/health", b"#", b"#/health", b"%23",
        b"%3f", b".json", b"~", b"*", b"%ff", b"%c0%af", b"%e2%80%8b", b"/../health", b"/%2e%2e/",
        b"%09", b"/;/", b"%2e", b"&", b"%25", b"/%2f/",
    ):  # fmt: skip
        yield raw + ending
    for origin in (b"http://localhost", b"https://localhost:1", b"http://evil.example", b"//x"):
        yield origin + raw
    yield b"/health/.." + raw
    yield b"/ready/../" + rest
    yield parent + b"//" + name
    yield parent + b"/;x/" + name
