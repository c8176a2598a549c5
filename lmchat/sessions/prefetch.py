"""Prefetch: loads a session's KV from lower tiers before its next turn."""

from __future__ import annotations

import contextlib
import functools

from lmchat.errors import Error
from lmchat.generation.state import State
from lmchat.sessions.context import SessionContext
from turbomind import Handle


class Prefetch:
    """The prefetch of one session, whose context closes the handle that is being loaded."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context

    def begin(self) -> None:
        """Starts loading in the background, unless the session generates."""
        record = self._context.record
        self._context.activity.check_open()
        ids, leaf = record.tree.token_ids(record.leaf), record.leaf
        with self._context.lock:
            if not self._is_idle() or not ids or not self._context.runtime.pages.persist:
                return
            handle = self._context.handles.fits(record.tree, leaf, len(ids))
        if handle is not None:
            with contextlib.suppress(Error):  # the engine no longer has the handle
                handle.warm()
            return
        self._context.runtime.durability.soon(functools.partial(self._load, leaf, ids))

    def _load(self, leaf: int | None, ids: list[int]) -> None:
        """Opens a handle and loads its pages, on a background thread."""
        with contextlib.suppress(Error):
            handle = self._context.runtime.pages.open(
                self._context.record.owner, self._context.handles.retention_priority
            )
            with self._context.lock:
                if self._is_idle():
                    self._context.loading = handle
            try:
                if self._context.loading is handle:
                    handle.append(ids)
                    handle.warm()
            except Error:
                leaf = None  # matches no transcript
            self._adopt(handle, leaf, len(ids))

    def _adopt(self, handle: Handle, leaf: int | None, length: int) -> None:
        with self._context.lock:
            wanted = self._context.loading is handle and self._is_idle()
            self._context.loading = None
            if wanted and leaf is not None and self._context.record.leaf == leaf:
                return self._context.handles.adopt(handle, leaf, length)
        handle.close()
        return None

    def _is_idle(self) -> bool:
        return self._context.activity.state is State.IDLE
