"""Durable chat sessions with a language model on this machine.

    with lmchat.ChatEngine("./model") as engine:
        chat = engine.session("trip", system="You are brief.")
        print(chat.send("Plan a day in Kyoto.").text)

`ChatEngine` loads a model; without an argument it opens memo, the small model that ships with the
package. `ChatEngine.session()` opens a `Session`, a conversation that is persisted on disk and can
be undone, edited, forked and resumed after a crash. `Session.send()` returns a `Reply`,
`Session.stream()` a `ReplyStream`. `ChatEngine.chat()` answers a list of messages without a
session. `AsyncChatEngine` is the same for asyncio. `connect()` returns an engine behind `lmchat
serve`, with the same names; `EngineApi` and `SessionApi` are the types of both. All errors derive
from `Error`.

The folders, from the lowest layer to the highest:

- `text`: tokenizer, chat templates, and the parser that splits a reply into reasoning and text.
- `store`: records of sessions, the store on disk (SQLite) and the one in memory.
- `kv`: which engine handles hold the KV of which branch, and what goes to lower tiers.
- `generation`: settings, admission to the engine, the reader of its events, replies and streams.
- `interface`: the names and verbs of engines and sessions, here and behind a server.
- `sessions`: the verbs of a session, planning and execution of a turn, recovery after a crash.
- `conversations`: chat without a session, whose replies and KV are kept in memory for a while.
- `archive`: export and import of sessions as files.
- `aio`: the same verbs for asyncio.
- `server`: the HTTP server.
- `client`: engines and sessions of such a server, with the names of the local ones.
- `deploy`: several such servers behind HAProxy.

Importing this package loads nothing heavy: each name is imported at its first use.

Not here: the engine, which knows token ids alone (`turbomind`), the terminal (`cli`) and the
chat page (`webui`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lmchat.aio.engine import AsyncChatEngine
    from lmchat.aio.session import AsyncSession
    from lmchat.aio.stream import AsyncFollower, AsyncReplyStream
    from lmchat.bundled import bundled_model
    from lmchat.client.engine import RemoteEngine, connect
    from lmchat.client.session import RemoteSession
    from lmchat.engine import ChatEngine
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
        Unreachable,
    )
    from lmchat.generation.parts import Delta, Progress
    from lmchat.generation.reply import Reply
    from lmchat.generation.reply_stream import Follower, ReplyStream
    from lmchat.generation.state import State
    from lmchat.generation.ticket import QueueStats
    from lmchat.interface.engine import EngineApi, SessionInfo
    from lmchat.interface.session import Branch, SessionApi
    from lmchat.sessions.session import Session
    from lmchat.store.turns import Timings, Turn, Usage

_MODULES = {
    "lmchat.aio.engine": ("AsyncChatEngine",),
    "lmchat.aio.session": ("AsyncSession",),
    "lmchat.aio.stream": ("AsyncFollower", "AsyncReplyStream"),
    "lmchat.bundled": ("bundled_model",),
    "lmchat.client.engine": ("RemoteEngine", "connect"),
    "lmchat.client.session": ("RemoteSession",),
    "lmchat.engine": ("ChatEngine",),
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
        "Unreachable",
    ),
    "lmchat.generation.parts": ("Delta", "Progress"),
    "lmchat.generation.reply": ("Reply",),
    "lmchat.generation.reply_stream": ("Follower", "ReplyStream"),
    "lmchat.interface.engine": ("EngineApi", "SessionInfo"),
    "lmchat.interface.session": ("Branch", "SessionApi"),
    "lmchat.sessions.session": ("Session",),
    "lmchat.generation.state": ("State",),
    "lmchat.generation.ticket": ("QueueStats",),
    "lmchat.store.turns": ("Timings", "Turn", "Usage"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncChatEngine",
    "AsyncFollower",
    "AsyncReplyStream",
    "AsyncSession",
    "Branch",
    "Busy",
    "ChatEngine",
    "ContextFull",
    "Delta",
    "EngineApi",
    "EngineClosed",
    "Error",
    "Follower",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "Overloaded",
    "Progress",
    "QueueStats",
    "RemoteEngine",
    "RemoteSession",
    "Reply",
    "ReplyStream",
    "Session",
    "SessionApi",
    "SessionBusy",
    "SessionInfo",
    "State",
    "StoreError",
    "Timings",
    "Turn",
    "Unreachable",
    "Usage",
    "__version__",
    "bundled_model",
    "connect",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'lmchat' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
