"""The objects that everything which acts on one session shares."""

from __future__ import annotations

import threading

from lmchat.generation.state import State
from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION, HandleCache
from lmchat.sessions.activity import Activity
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session_writer import SessionWriter
from lmchat.store.records import SessionRecord
from turbomind import Handle


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
        self.loading: Handle | None = None
        """Handle that a prefetch fills, which is not in `handles` yet."""

    @property
    def record(self) -> SessionRecord:
        """The session's turns and settings as they are now. While a caller holds `lock` it stays
        the same."""
        return self.writer.record

    def close(self) -> bool:
        """Closes the handles, unless a reply is being generated. Returns False then, or if it is
        closed already."""
        with self.lock:
            if self.activity.generation is not None or self.activity.state is State.CLOSED:
                return False
            self.activity.state = State.CLOSED
            self.release_handles(save=not self.writer.is_deleted)
            return True

    def release_handles(self, save: bool) -> None:
        """Closes the handles. The caller holds the lock."""
        if self.loading is not None:
            self.loading.close()
        self.handles.close(save)

    @property
    def lock(self) -> threading.RLock:
        """The session's lock. It guards the record, the handles and the activity."""
        return self.activity.lock
