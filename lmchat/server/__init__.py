"""The HTTP server: one ASGI app over an engine, in several API dialects.

`create_app()` makes the app. A dialect is a folder or file of routes that turns its requests into
calls of `AsyncChatEngine` and its results into replies; everything that dialects share (owners,
errors, limits, event streams, metrics) is in the files of this folder.

Not here: sessions, generation and admission (`lmchat`), web pages (mounted by the caller), the
command line (`lmchat.cli`).
"""

from lmchat.server.app import create_app
from lmchat.server.config import Limits, MountedApp, ServerConfig

__all__ = ["Limits", "MountedApp", "ServerConfig", "create_app"]
