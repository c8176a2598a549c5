"""Chat sessions that last: conversations with a language model on this machine.

    with lmchat.ChatEngine("./model") as engine:
        chat = engine.session("trip", system="You are brief.")
        print(chat.send("Plan a day in Kyoto.").text)

`lmchat.ChatEngine()` opens memo, the small model that ships with the package.

Importing this package loads nothing heavy; names are looked up when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lmchat.aio import AsyncChatEngine, AsyncReplyStream, AsyncSession
    from lmchat.bundled import bundled_model
    from lmchat.engine import ChatEngine, SessionInfo
    from lmchat.errors import (
        Busy,
        ContextFull,
        EngineClosed,
        Error,
        InternalError,
        InvalidRequest,
        ModelError,
        NotFound,
        Overloaded,
        SessionBusy,
        StoreError,
    )
    from lmchat.generation.generation import Delta, Progress, Reply, ReplyStream
    from lmchat.generation.state import State
    from lmchat.sessions.session import Branch, Session
    from lmchat.store.turns import Timings, Turn, Usage

_MODULES = {
    "lmchat.aio": ("AsyncChatEngine", "AsyncReplyStream", "AsyncSession"),
    "lmchat.bundled": ("bundled_model",),
    "lmchat.engine": ("ChatEngine", "SessionInfo"),
    "lmchat.errors": (
        "Busy",
        "ContextFull",
        "EngineClosed",
        "Error",
        "InternalError",
        "InvalidRequest",
        "ModelError",
        "NotFound",
        "Overloaded",
        "SessionBusy",
        "StoreError",
    ),
    "lmchat.generation.generation": ("Delta", "Progress", "Reply", "ReplyStream"),
    "lmchat.sessions.session": ("Branch", "Session"),
    "lmchat.generation.state": ("State",),
    "lmchat.store.turns": ("Timings", "Turn", "Usage"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncChatEngine",
    "AsyncReplyStream",
    "AsyncSession",
    "Branch",
    "Busy",
    "ChatEngine",
    "ContextFull",
    "Delta",
    "EngineClosed",
    "Error",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "Overloaded",
    "Progress",
    "Reply",
    "ReplyStream",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "State",
    "StoreError",
    "Timings",
    "Turn",
    "Usage",
    "__version__",
    "bundled_model",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'lmchat' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
