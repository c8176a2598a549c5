"""The objects that everything which acts on one session shares."""

from __future__ import annotations

import threading

from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION, HandleCache
from lmchat.sessions.activity import Activity
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session_writer import SessionWriter
from lmchat.store.records import SessionRecord


class SessionContext:
    """One open session: its record, its engine handles, its activity and its writer.

    Args:
        runtime: the model, the engine and the store that all sessions of a `ChatEngine` share.
        record: the session's turns and settings.
        handles: engine handles with KV of the session; None: an empty cache. The context owns them.
    """

    def __init__(
        self, runtime: Runtime, record: SessionRecord, handles: HandleCache | None = None
    ) -> None:
        self.runtime = runtime
        self.handles = handles or HandleCache(
            runtime.pages, record.owner, RETENTION_PINNED if record.pinned else RETENTION_SESSION
        )
        self.activity = Activity(lambda: self.record.name)
        self.writer = SessionWriter(runtime, record, self.activity.lock)

    @property
    def record(self) -> SessionRecord:
        """The session's turns and settings as they are now. While a caller holds `lock` it stays
        the same."""
        return self.writer.record

    @property
    def lock(self) -> threading.RLock:
        """The session's lock. It guards the record, the handles and the activity."""
        return self.activity.lock
