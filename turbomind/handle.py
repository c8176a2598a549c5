"""A sequence that stays with the engine between requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Protocol

import turbomind._C as _C
from turbomind.errors import EngineClosed, Error, InvalidRequest
from turbomind.inbox import Inbox
from turbomind.params import (
    MAX_SIZE,
    SAMPLING,
    integer,
    refuse_unknown,
    request_options,
    retention_priority_of,
    sampling_params,
    token_id_list,
)
from turbomind.stream import Face, Stream


class HandleOwner(Protocol):
    """The part of an engine that its handles use."""

    _core: _C.Engine
    vocab_size: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    def _reader(self, inbox: Inbox | None) -> tuple[Face | None, _C.Waker | None]: ...


class Handle:
    """A sequence whose tokens and keys and values stay between requests. From `Engine.open()`.

    Dropping a handle closes it. All methods may be called from any thread and raise NotFound after
    `close()`; those that change tokens raise Busy while the handle generates.
    """

    def __init__(self, engine: HandleOwner, core_id: int, persist: bool) -> None:
        self._engine = engine
        self._persist = persist
        self._core = engine._core
        self._id = core_id
        self._closed = False

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._core.length(self._id)

    @property
    def token_ids(self) -> list[int]:
        """The committed tokens."""
        return self._core.token_ids(self._id)

    def append(self, token_ids: Iterable[int]) -> None:
        """Adds tokens; they are computed by the next `generate()`."""
        self._core.append(self._id, token_id_list(token_ids, self._engine.vocab_size))

    def generate(self, *, inbox: Inbox | None = None, **params: Any) -> Stream:
        """Continues the sequence; the tokens are appended to it as they come. Keywords as
        `Engine.stream()` without `salt` and `retention_priority`, which are the handle's, and `n`
        must be 1. Raises InvalidRequest, Busy."""
        sampling, seed = self._sampling(params)
        face, waker = self._engine._reader(inbox)
        request = self._core.generate(self._id, sampling, request_options(params), waker)
        return Stream(request, seed, face, self)

    def advance(
        self,
        keep: int,
        append: Iterable[int],
        *,
        inbox: Inbox | None = None,
        retention_priority: float | None = None,
        **params: Any,
    ) -> Stream:
        """In one message, not waited for: the sequence becomes its first `keep` tokens and `append`
        and is continued as by `generate()`; `retention_priority`, if given, becomes the handle's.

        Raises InvalidRequest for parameters and token ids. What only the engine can see ends the
        stream with an "error" and leaves the handle as it was: NotFound, Busy, ContextFull,
        InvalidRequest for `keep` beyond the length or `continued` beyond the prompt.
        """
        sampling, seed = self._sampling(params)
        keep = integer("keep", keep, 0, MAX_SIZE)
        ids = token_id_list(append, self._engine.vocab_size, "append")
        options = request_options(params)
        value = None if retention_priority is None else retention_priority_of(retention_priority)
        face, waker = self._engine._reader(inbox)
        request = self._core.advance(self._id, keep, ids, sampling, options, value, waker)
        return Stream(request, seed, face, self)

    def _sampling(self, params: Mapping[str, Any]) -> tuple[_C.SamplingParams, int]:
        refuse_unknown("parameter", params, (*SAMPLING, "priority", "exact"))
        if params.get("n") not in (None, 1):
            raise InvalidRequest(f"n is {params['n']!r}, expected 1 for a handle, which can fork")
        return sampling_params(params, self._engine.eos_token_ids)

    def truncate(self, length: int) -> None:
        """Drops the tokens from `length` on; nothing is computed."""
        self._core.truncate(self._id, integer("length", length, 0, self.length))

    def fork(self, retention_priority: float | None = None, wait: bool = True) -> Handle:
        """A new handle with the same committed tokens, sharing pages, and the same retention
        priority unless one is given. Works during generate. Without `wait` it does not wait for the
        engine, and if it cannot be made the new handle's methods raise NotFound."""
        fork = self._core.fork if wait else self._core.fork_later
        value = None if retention_priority is None else retention_priority_of(retention_priority)
        return Handle(self._engine, fork(self._id, value), self._persist)

    def park(self) -> None:
        """Gives up the pages (full ones stay cached while there is room); tokens stay."""
        self._core.park(self._id)

    def set_retention_priority(self, retention_priority: float) -> None:
        """How much its pages are worth keeping once nothing refers to them."""
        self._core.set_retention_priority(self._id, retention_priority_of(retention_priority))

    def save(self) -> None:
        """Posts a copy of all its pages, the unfinished one too, to the tiers below; for the end of
        a turn. Does not wait; `Engine.flush_pages()` does, until they are there. Raises
        InvalidRequest for a handle that was not opened with `persist`."""
        if not self._persist:
            raise InvalidRequest("save() of a handle that was opened with persist=False")
        self._core.save(self._id)

    def warm(self) -> None:
        """Brings what the tiers below have of its tokens up to the device in the background, as far
        as there is room and it is faster than computing. Never waits."""
        self._core.warm(self._id)

    def close(self, save: bool = False) -> None:
        """Ends the handle, cancelling what it generates; with `save` as `save()` before, if it
        persists. Idempotent; does not wait."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(EngineClosed):  # which has closed its handles
                self._core.close(self._id, bool(save))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        with contextlib.suppress(Error):
            self.close()

    def __reduce__(self) -> NoReturn:
        # A copy would close the original's sequence when it is dropped.
        raise TypeError("a Handle cannot be copied or pickled: use fork()")
