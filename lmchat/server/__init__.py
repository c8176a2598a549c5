"""The HTTP server: one ASGI app over an engine, in several API dialects.

`create_app()` makes the app. A dialect is a folder or file of routes that turns its requests into
calls of `AsyncChatEngine` and its results into replies. `http` carries requests and answers,
`dialects` has checks that dialects share; errors, metrics and state are files of this folder.

Not here: sessions, generation and admission (`lmchat`), web pages (mounted by the caller), the
command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmchat.server.app import create_app
    from lmchat.server.config import Limits, MountedApp, ServerConfig

_MODULES = {
    "create_app": "lmchat.server.app",
    "Limits": "lmchat.server.config",
    "MountedApp": "lmchat.server.config",
    "ServerConfig": "lmchat.server.config",
}

__all__ = ["Limits", "MountedApp", "ServerConfig", "create_app"]


def __getattr__(name: str) -> Any:
    """Imports a name when it is used: options are checked before FastAPI is imported."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'lmchat.server' has no attribute {name!r}")
    return getattr(import_module(module), name)
