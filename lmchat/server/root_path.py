"""The path of a proxy below which the server is, such as /chat of https://example.org/chat/.

A proxy may remove the path from its requests or not: both are understood. Routes and checks see
paths without it, links and redirects have it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest
from turbomind.shown import shown

if TYPE_CHECKING:
    from starlette.types import Scope

PATH = "lmchat.path"
"""Name in an ASGI scope of the path without the root path, from which the router chooses."""

TAKEN = frozenset(
    {
        "assets", "docs", "favicon.ico", "gradio_api", "health", "login", "logout", "metrics",
        "openapi.json", "page", "proxy", "ready", "redoc", "replicas", "static", "theme.css", "v1",
        "v2", "version", "tokenize", "detokenize",
    }
)  # fmt: skip
"""First parts of the paths of the server, the page and a deployment."""

_ROOT = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,63}){1,8}")


def parse_root_path(text: str) -> str:
    """Returns a root path without a slash at its end; empty: there is none.

    Raises:
        InvalidRequest: it is not a path, or one of the server's own.
    """
    root = text.removesuffix("/")
    if root and not _ROOT.fullmatch(root):
        raise InvalidRequest(
            f"--root-path is {shown(text)}, expected a path such as /chat, of A-Z, a-z, 0-9 and "
            "_ ~ - ."
        )
    if root.split("/")[1:2] and root.split("/")[1] in TAKEN:
        raise InvalidRequest(
            f"--root-path is {shown(text)}, which is a path of the server, expected another one"
        )
    return root


def below(root: str, scope: Scope) -> Scope:
    """Returns the scope of a request as ASGI has it below a root path, and its `PATH`."""
    root = root or scope.get("root_path", "")
    path: str = scope["path"]
    if path == root or path.startswith(f"{root}/"):
        path = path[len(root) :]
    full = root + path if path.startswith("/") or not path else path
    return {**scope, "root_path": root, "path": full, PATH: path}
