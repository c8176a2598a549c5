"""Handles: sequences that the engine holds between requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

import turbomind._C as _C
from turbomind.closing import Closing
from turbomind.engine.inbox import Inbox
from turbomind.engine.stream import LoopReader, Stream, collect
from turbomind.errors import EngineClosed, Error, InvalidRequest
from turbomind.params import (
    MAX_SIZE,
    integer,
    refuse_unknown,
    request_options,
    retention_priority_of,
    sampling_params,
    token_id_list,
    wrong,
)
from turbomind.settings import SAMPLING, HandleSettings


class HandleOwner(Protocol):
    """The part of an engine that its handles use."""

    _core: _C.Engine
    vocab_size: int

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    def _reader(self, inbox: Inbox | None) -> tuple[LoopReader | None, _C.Waker | None]: ...


class Handle(Closing):
    """A sequence whose tokens and KV stay in the engine between requests (SGLang: session).

    `Engine.open()` and `fork()` make handles. Dropping a handle closes it. All methods may be
    called from any thread.

    Raises:
        NotFound: From every method after `close()`.
        Busy: From methods that change the tokens, while the handle generates.
        EngineClosed: From every method but `close()`, after the engine was closed.
    """

    def __init__(self, engine: HandleOwner, core_id: int, persist: bool) -> None:
        self._engine = engine
        self._persist = persist
        self._core = engine._core
        self._id = core_id
        self._closed = False

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._core.length(self._id)

    @property
    def token_ids(self) -> list[int]:
        """The committed token ids, a copy."""
        return self._core.token_ids(self._id)

    def append(self, token_ids: Iterable[int]) -> None:
        """Appends tokens; the next `generate()` computes their KV.

        Args:
            token_ids: Token ids, each from 0 to the engine's `vocab_size` - 1.

        Raises:
            InvalidRequest: A token id is out of range.
            Busy: The handle generates.
        """
        self._core.append(self._id, token_id_list(token_ids, self._engine.vocab_size))

    def generate(self, *, inbox: Inbox | None = None, **params: Unpack[HandleSettings]) -> Stream:
        """Continues the sequence and appends each generated token to it.

        Args:
            inbox: Reports the stream's events to its reader. None: no inbox.
            params: `turbomind.settings.SamplingSettings`, with `n` 1 only, and `priority` and
                `exact`.

        Returns:
            The stream of the request's events.

        Raises:
            InvalidRequest: A setting is unknown or out of range, or the handle has no tokens.
            Busy: The handle generates already.
        """
        sampling, seed = self._sampling(params)
        reader, waker = self._engine._reader(inbox)
        request = self._core.generate(self._id, sampling, request_options(params), waker)
        return Stream(request, seed, reader, self)

    def advance(
        self,
        prefix_length: int,
        append: Iterable[int],
        *,
        inbox: Inbox | None = None,
        retention_priority: float | None = None,
        **params: Unpack[HandleSettings],
    ) -> Stream:
        """Truncates, appends and generates in one message, without waiting for the engine.

        Errors that only the engine can detect end the stream with an "error" event and leave the
        handle unchanged: NotFound, Busy, ContextFull, and InvalidRequest for a `prefix_length`
        beyond the sequence or `continued` beyond the prompt.

        Args:
            prefix_length: Number of first tokens of the sequence that stay.
            append: Token ids that follow them.
            inbox: As in `generate()`.
            retention_priority: New retention priority of the handle. None: unchanged.
            params: As in `generate()`.

        Returns:
            The stream of the request's events.

        Raises:
            InvalidRequest: A setting is unknown or out of range, or a token id is.
        """
        sampling, seed = self._sampling(params)
        prefix = integer("prefix_length", prefix_length, 0, MAX_SIZE)
        ids = token_id_list(append, self._engine.vocab_size, "append")
        options = request_options(params)
        value = None if retention_priority is None else retention_priority_of(retention_priority)
        reader, waker = self._engine._reader(inbox)
        request = self._core.advance(self._id, prefix, ids, sampling, options, value, waker)
        return Stream(request, seed, reader, self)

    def _logits(self, first: int, params: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Computes the logits after the tokens from position `first` on: [length - first, vocab].

        `params` are `priority` and `exact`."""
        options = request_options(params, "logits")
        options.first_row = first
        reader, waker = self._engine._reader(None)
        request = self._core.generate(self._id, _C.SamplingParams(), options, waker)
        with Stream(request, 0, reader, self) as stream:
            if collect(stream).finish_reason == "cancelled":  # its values are incomplete
                raise EngineClosed("the engine was closed during a request of kind 'logits'")
            return stream.request.logits()

    def _sampling(self, params: Mapping[str, Any]) -> tuple[_C.SamplingParams, int]:
        refuse_unknown("parameter", params, (*SAMPLING, "priority", "exact"))
        if params.get("n") not in (None, 1):
            raise wrong("n", params["n"], "1 for a handle, which can fork")
        return sampling_params(params, self._engine.eos_token_ids, self._engine.vocab_size)

    def truncate(self, length: int) -> None:
        """Drops the tokens from position `length` on; computes nothing.

        Raises:
            InvalidRequest: `length` is not from 0 to the handle's length.
            Busy: The handle generates.
        """
        self._core.truncate(self._id, integer("length", length, 0, self.length))

    def fork(self, retention_priority: float | None = None, wait: bool = True) -> Handle:
        """Opens a handle with the same committed tokens, which shares its pages (copy-on-write).

        It works while this handle generates.

        Args:
            retention_priority: That of the new handle. None: the same.
            wait: Waits for the engine. Without it the call returns at once, and methods of the new
                handle raise NotFound if the engine could not fork.

        Returns:
            The new handle.
        """
        fork = self._core.fork if wait else self._core.fork_later
        value = None if retention_priority is None else retention_priority_of(retention_priority)
        return Handle(self._engine, fork(self._id, value), self._persist)

    def park(self) -> None:
        """Releases the pages, which stay cached while there is room; the tokens stay."""
        self._core.park(self._id)

    def set_retention_priority(self, retention_priority: float) -> None:
        """Sets the retention priority of its pages; pages of a lower one are evicted first."""
        self._core.set_retention_priority(self._id, retention_priority_of(retention_priority))

    def save(self) -> None:
        """Posts a copy of all its pages, the partial one too, to the lower tiers.

        Call it at the end of a turn. It does not wait; `Engine.flush_pages()` waits for the copies.

        Raises:
            InvalidRequest: The handle was opened without `persist`.
        """
        if not self._persist:
            raise InvalidRequest("save() of a handle that was opened with persist=False")
        self._core.save(self._id)

    def warm(self) -> None:
        """Loads its KV from the lower tiers to the device in the background, without waiting.

        It loads as much as there is room for and as loads faster than it is computed.
        """
        self._core.warm(self._id)

    def close(self, save: bool = False) -> None:
        """Closes the handle and cancels what it generates. Idempotent; does not wait.

        Args:
            save: Saves the pages first, as `save()` does, if the handle persists.
        """
        if not self._closed:
            self._closed = True
            with contextlib.suppress(EngineClosed):  # a closed engine has closed its handles
                self._core.close(self._id, bool(save))

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        with contextlib.suppress(Error):
            self.close()

    def __reduce__(self) -> NoReturn:
        # A copy would close the original's sequence when it is dropped.
        raise TypeError("a Handle cannot be copied or pickled: use fork()")
