"""What a server is configured with: addresses, keys, limits, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from lmchat.server.origins import parse_origins
from lmchat.server.root_path import parse_root_path
from turbomind.params import wrong

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PORT = 23333
"""Default port, that of LMDeploy's server."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what a client may send and of how slowly it may do so.

    Attributes:
        body: bytes of a request's body.
        import_body: bytes of an uploaded archive.
        archives: archives of one owner that are exported or imported at once. Each has a temporary
            file.
        bodies: bytes of all bodies of one owner, each until its request is answered.
        head: bytes of a request's line and headers.
        receive_seconds: time in which a request's head, and then each 64 KiB of its body, arrive.
        send_seconds: time in which a client takes some of what was sent to it.
        idle_seconds: time that a connection may stay open without a request.
        connections: open connections.
        choices: `n`, choices of one request.
        top_logprobs: alternatives per token.
        stop_strings: number of stop strings.
        stop_bytes: bytes of one stop string.
        messages: messages of one request.
        prompts: prompts of one completion request.
        counted: bytes of a text whose tokens are counted or returned.
        logit_bias: entries of `logit_bias`.
        sessions: sessions of one owner.
    """

    body: int = 8 << 20
    import_body: int = 1 << 30
    archives: int = 2
    bodies: int = 256 << 20
    head: int = 16 << 10
    receive_seconds: float = 30.0
    send_seconds: float = 30.0
    idle_seconds: float = 75.0
    connections: int = 1024
    choices: int = 8
    top_logprobs: int = 20
    stop_strings: int = 16
    stop_bytes: int = 256
    messages: int = 1024
    prompts: int = 64
    counted: int = 1 << 20
    logit_bias: int = 1024
    sessions: int = 10_000

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            kinds = (int, float) if one.type == "float" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                expected = "a number" if one.type == "float" else "an integer"
                raise wrong(f"limit {one.name}", value, f"{expected} greater than 0")


@dataclass(frozen=True)
class MountedApp:
    """A further ASGI app under a path.

    Its bodies may have any type. Its open streams do not delay the end of the server.

    Attributes:
        path: the path below which it gets requests, such as "/chat" for "/chat/" and "/chat/x".
        app: the app.
        own_login: whether it identifies its users itself. Its requests then have no owner.
            Otherwise it needs an API key as all routes do.
        body: bytes of a request's body, which the app reads in pieces. None: `Limits.body`, and
            bodies count towards `Limits.bodies`, those of an app with its own login together.
        claims: returns whether a path is the app's; other paths get the server's 401, 404 or 405.
            None: all paths below `path` that no route of the server has.
    """

    path: str
    app: ASGIApp
    own_login: bool = False
    body: int | None = None
    claims: Callable[[str], bool] | None = None


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server.

    Raises:
        InvalidRequest: an origin or the root path is malformed.

    Attributes:
        keys: API keys and the owners that they name. Empty: no key is needed, every request is of
            the owner "local", and only loopback Host headers are accepted.
        hosts: further Host names that are accepted without keys.
        any_host: whether every Host header is accepted without keys. Requests that a web page of
            another site causes are refused nevertheless.
        limits: bounds of requests.
        keep_alive_seconds: silence of an event stream after which a comment is sent.
        drain_seconds: time that running streams get to finish after SIGTERM.
        import_pages: whether KV pages in imported archives are used.
        model_name: name of the model for clients. None: the last part of the model's name.
        allow_origins: origins whose programs in a browser may use the API: "SCHEME://HOST[:PORT]".
            With keys also "*", which is any, and "null".
        root_path: path of a proxy below which the server is, such as "/chat". Requests may have it
            or not.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    hosts: frozenset[str] = frozenset()
    any_host: bool = False
    limits: Limits = field(default_factory=Limits)
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    import_pages: bool = False
    model_name: str | None = None
    allow_origins: Collection[str] = frozenset()
    root_path: str = ""

    def __post_init__(self) -> None:
        origins = parse_origins(self.allow_origins, bool(self.keys))
        object.__setattr__(self, "allow_origins", origins)
        object.__setattr__(self, "root_path", parse_root_path(self.root_path))
