"""The engine: token ids in, token ids out, and handles whose KV stays between requests."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

import turbomind._C as _C
from turbomind.closing import Closing
from turbomind.config.device import is_automatic
from turbomind.config.engine_options import (
    EngineOptions,
    complete,
)
from turbomind.config.limits import explain_limits
from turbomind.config.memory_budget import check_logits, piece_rows
from turbomind.engine.handle import Handle
from turbomind.engine.inbox import Inbox
from turbomind.engine.plan import REFUSALS, Plan, check_options, planned
from turbomind.engine.stats import GroupStats, RankStats, Stats
from turbomind.engine.stream import Generation, LoopReader, LoopWakers, Stream, collect
from turbomind.engine.tiers import (
    Flushed,
    Forecast,
    Residence,
    key_list,
    warn_of_last_saves,
)
from turbomind.errors import EngineClosed, Error
from turbomind.params import (
    MAX_SIZE,
    in_form,
    integer,
    refuse_unknown,
    request_options,
    sampling_params,
    set_option,
    token_id_list,
    wrong,
)
from turbomind.settings import REQUEST, SAMPLING, RequestSettings, StreamSettings

_log = logging.getLogger(__name__)
_OF_HANDLES = ("salt", "retention_priority")  # of a request, but set where a handle is opened


class Engine(Closing):
    """One model on this machine, for any number of threads and asyncio loops.

    Where "auto" has chosen a GPU that refuses the model or has no room for it, the CPU computes:
    `device` is "cpu" then, `device_note` holds the reason, and a warning is logged.

    The engine is a context manager; `close()` ends all requests.

    Args:
        path: A model folder, a GGUF file, a hub name, or (load_format "dummy") a config.json.
        options: Those of `EngineOptions`; help(turbomind.EngineOptions) lists them.

    Raises:
        InvalidRequest: An option is wrong.
        NotFound: There is no such model.
        ModelError: The model cannot be used.
        InternalError: Memory, threads or file descriptors are short.
    """

    @explain_limits("the engine")
    def __init__(
        self,
        path: str | os.PathLike[str],
        **options: Unpack[EngineOptions],
    ) -> None:
        self._closed = False
        asked = complete(options)
        made = planned(path, asked, check_options(asked), weights=True)
        try:
            self._open(made)
        except REFUSALS as refusal:
            if not made.gpus or not is_automatic(asked["device"]):
                raise
            made = made.on_cpu(refusal)  # raises errors that both devices have, in the CPU's words
            self._open(made)
        self.device_note = made.device_note
        if made.device_note:
            _log.warning("%s; the CPU computes", made.device_note)

    @in_form()
    def _open(self, made: Plan) -> None:
        made.check()
        for note in made.notes:
            _log.warning("%s", note)
        model = made.load()
        self.device: str = made.device  # "cpu", "cuda:0", "cuda:0,1", "cuda_emulated"
        self.isa, self.threads, self.tp = made.isa, made.threads, made.tp
        self.info = replace(made.model, sources=None, source=None)
        self._tiers = made.tiers
        self.vocab_size: int = model.vocab
        self.weight_bytes: int = model.weight_bytes
        made.cache.set(made.core, model, made.gpus, made.kept_bytes)
        self._wakers = LoopWakers()
        self._core = _C.Engine(made.core, model)
        self.max_context: int = self.stats().max_context  # tokens one sequence can have
        self.max_batch_size: int = made.core.max_batch_size  # sequences that run at once
        self.prefill_chunk: int = made.core.prefill_chunk  # most prompt tokens of a step
        done, kinds, seconds = self.warmed_up
        if kinds:
            _log.info("warmed up in %.1f s: %d of %d kinds of steps", seconds, done, kinds)
        _open_engines.add(self)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation unless `ignore_eos`. Others can be set for generations to
        come; those outside of the vocabulary are left out."""
        return self.info.eos_token_ids

    @eos_token_ids.setter
    def eos_token_ids(self, ids: Iterable[int]) -> None:
        known = (i for i in dict.fromkeys(ids) if 0 <= i < self.vocab_size)
        self.info = replace(self.info, eos_token_ids=tuple(known))

    def open(
        self, salt: str = "", retention_priority: float = 0.0, persist: bool = False
    ) -> Handle:
        """Opens a new, empty sequence, without waiting for the engine.

        Args:
            salt: Owner of the KV; only requests and handles of equal salts share pages.
            retention_priority: Pages of a lower priority are evicted first once nothing refers to
                them; finite.
            persist: Copies full pages to the lower tiers in the background.

        Returns:
            The handle.

        Raises:
            InvalidRequest: An argument is wrong, or `persist` is set and the engine has no lower
                tier.
        """
        options = _C.HandleOptions()
        set_option(options, "persist", persist, "True or False")
        set_option(options, "salt", salt, "a string")
        set_option(
            options,
            "retention_priority",
            retention_priority,
            REQUEST["retention_priority"].expected,
        )
        if options.persist and not self._tiers.names:
            raise wrong("persist", persist, "False: the engine has no host_memory or page_folder")
        return Handle(self, self._core.open(options), options.persist)

    def stream(
        self,
        token_ids: Iterable[int],
        *,
        inbox: Inbox | None = None,
        **params: Unpack[StreamSettings],
    ) -> Stream:
        """Starts a request without a handle, and does not wait for the engine.

        Args:
            token_ids: The prompt: at least one token id, each from 0 to `vocab_size` - 1.
            inbox: Reports the stream's events to its reader. None: no inbox.
            params: `turbomind.settings.SamplingSettings` and `RequestSettings`, which list every
                keyword with its meaning, range and default: `max_new_tokens`, `temperature`,
                `top_k`, `seed`, `priority`, `salt`, ...

        Returns:
            The stream of the request's events.

        Raises:
            InvalidRequest: A token id or setting is wrong.
            EngineClosed: The engine was closed.
        """
        refuse_unknown("parameter", params, (*SAMPLING, *REQUEST))
        ids = token_id_list(token_ids, self.vocab_size)
        sampling, seed = sampling_params(params, self.eos_token_ids, self.vocab_size, len(ids))
        return self._submit(ids, sampling, request_options(params), seed, inbox)

    def generate(self, token_ids: Iterable[int], **params: Unpack[StreamSettings]) -> Generation:
        """Runs a request as `stream()` does and waits for its end.

        It blocks its thread; asyncio code awaits `engine.stream(...).aresult()`.

        Args:
            token_ids: As in `stream()`.
            params: As in `stream()`.

        Returns:
            The generated tokens of every choice.

        Raises:
            Error: The request's error, as in `stream()`, or ContextFull or ModelError.
        """
        with self.stream(token_ids, **params) as stream:
            return stream.result()

    def logits(
        self, token_ids: Iterable[int], **params: Unpack[RequestSettings]
    ) -> npt.NDArray[np.float32]:
        """Computes the model's logits after each token.

        Args:
            token_ids: As in `stream()`.
            params: `turbomind.settings.RequestSettings`.

        Returns:
            float32 array [len(token_ids), vocab_size].

        Raises:
            Error: As `generate()`, and EngineClosed if the engine is closed meanwhile.
            InvalidRequest: The array does not fit the memory that this process may use.
        """
        ids = token_id_list(token_ids, self.vocab_size)
        if len(ids) <= piece_rows(self.vocab_size):
            return self._run(ids, "logits", params).logits()
        check_logits(len(ids), self.vocab_size)
        whole = np.empty((len(ids), self.vocab_size), np.float32)
        done = 0
        for rows in self.iter_logits(ids, **params):
            whole[done : done + len(rows)] = rows
            done += len(rows)
        return whole

    def iter_logits(
        self, token_ids: Iterable[int], **params: Unpack[RequestSettings]
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Computes the same logits in pieces, each when it is asked for.

        Args:
            token_ids: As in `stream()`.
            params: `turbomind.settings.RequestSettings`.

        Yields:
            float32 arrays [rows, vocab_size] of at most 128 MiB (or 64 rows, if these are more), in
            order, `len(token_ids)` rows in all. The engine has no more than one of them at a time.

        Raises:
            Error: As `logits()`, but for its array's memory.
        """
        refuse_unknown("parameter", params, REQUEST)
        ids = token_id_list(token_ids, self.vocab_size)
        if not ids:
            raise wrong("token_ids", ids, "at least one token", seen="empty")
        request_options(params)  # refuses wrong values before a handle is opened
        given: dict[str, Any] = {k: v for k, v in params.items() if v is not None}
        opening = {name: given.pop(name) for name in _OF_HANDLES if name in given}
        with self.open(**opening) as handle:
            rows = piece_rows(self.vocab_size)
            for begin in range(0, len(ids), rows):
                handle.append(ids[begin : begin + rows])
                yield handle._logits(begin, given)

    def score(self, token_ids: Iterable[int], **params: Unpack[RequestSettings]) -> list[float]:
        """Computes the log-probability of each token given those before it.

        Args:
            token_ids: As in `stream()`.
            params: `turbomind.settings.RequestSettings`.

        Returns:
            len(token_ids) - 1 natural logarithms, of the second token to the last.

        Raises:
            Error: As `logits()`.
        """
        return self._run(token_ids, "score", params).scores()

    def start_score(
        self,
        token_ids: Iterable[int],
        *,
        inbox: Inbox | None = None,
        **params: Unpack[RequestSettings],
    ) -> Stream:
        """Starts the request of `score()` and does not wait for the engine.

        Args:
            token_ids: As in `stream()`.
            inbox: As in `stream()`.
            params: `turbomind.settings.RequestSettings`.

        Returns:
            The stream of the request's events. After its last event, which must not be "cancelled",
            `stream.request.scores()` returns what `score()` does.

        Raises:
            Error: As `stream()`.
        """
        refuse_unknown("parameter", params, REQUEST)
        options = request_options(params, "score")
        ids = token_id_list(token_ids, self.vocab_size)
        return self._submit(ids, _C.SamplingParams(), options, 0, inbox)

    def _run(self, token_ids: Iterable[int], kind: str, params: Mapping[str, Any]) -> _C.Request:
        refuse_unknown("parameter", params, REQUEST)
        options = request_options(params, kind)
        ids = token_id_list(token_ids, self.vocab_size)
        with self._submit(ids, _C.SamplingParams(), options, 0) as stream:
            if collect(stream).finish_reason == "cancelled":  # its values are incomplete
                raise EngineClosed(f"the engine was closed during a request of kind {kind!r}")
            return stream.request

    def _submit(
        self,
        ids: list[int],
        sampling: _C.SamplingParams,
        options: _C.RequestOptions,
        seed: int,
        inbox: Inbox | None = None,
    ) -> Stream:
        if not ids:
            raise wrong("token_ids", ids, "at least one token", seen="empty")
        reader, waker = self._reader(inbox)
        return Stream(self._core.submit(ids, sampling, options, waker), seed, reader, self)

    def _reader(self, inbox: Inbox | None) -> tuple[LoopReader | None, _C.Waker | None]:
        """Returns the waker of a new request's events and the view of the loop that it belongs to.

        The waker is the inbox's, else that of the asyncio loop of this thread, if one runs."""
        if inbox is not None:
            if not isinstance(inbox, Inbox):
                raise wrong("inbox", inbox, "an Inbox or None")
            return None, inbox.waker
        reader = self._wakers.current()
        return reader, reader[0].waker if reader else None

    def residence(self, token_ids: Iterable[int], salt: str = "") -> Residence:
        """Returns how long a prefix of these tokens has its KV in which tier.

        Args:
            token_ids: Token ids from the start of a sequence.
            salt: Owner of the KV.

        Returns:
            Prefix lengths in tokens.
        """
        ids = token_id_list(token_ids, self.vocab_size)
        return self._tiers.residence(self._core.residence(ids, _text("salt", salt)))

    def predict_ttft(self, token_ids: Iterable[int], new_tokens: int, salt: str = "") -> float:
        """Estimates the seconds to the first token of a request, if it ran now and alone.

        Args:
            token_ids: The sequence so far.
            new_tokens: Number of prompt tokens that follow it, at least 1.
            salt: Owner of the KV.

        Returns:
            Seconds, from speeds measured so far; 0.0 before the first measurement.
        """
        ids = token_id_list(token_ids, self.vocab_size)
        added = integer("new_tokens", new_tokens, 1, MAX_SIZE)
        return self._core.predict_ttft(ids, added, _text("salt", salt))

    def forecasts(
        self, sequences: Iterable[tuple[Iterable[int], str]], new_tokens: int = 1
    ) -> list[Forecast]:
        """Returns `residence()` and `predict_ttft()` of many sequences.

        It waits for the engine once, not once per sequence. Steps run in between when the list
        takes more than a few milliseconds.

        Args:
            sequences: Pairs of token ids and salt.
            new_tokens: Number of prompt tokens that follow each sequence, at least 1.

        Returns:
            One forecast per sequence, in order.
        """
        queries = [
            (token_id_list(ids, self.vocab_size), _text("salt", salt)) for ids, salt in sequences
        ]
        added = integer("new_tokens", new_tokens, 1, MAX_SIZE)
        return self._tiers.forecasts(self._core.forecasts(queries, added))

    def speeds(self) -> dict[str, float]:
        """Returns measured speeds; 0.0 means not measured yet.

        Returns:
            "host_read" and "disk_read" in bytes/s, "prefill" in tokens/s at the start of a prompt,
            and "kv_bytes_per_token".
        """
        return self._tiers.speeds(self._core.speeds())

    @property
    def numerics_fingerprint(self) -> str:
        """Fingerprint of the arithmetic: engines with equal ones produce bit-identical results."""
        return self._core.numerics_fingerprint

    @property
    def library_note(self) -> str | None:
        """On a GPU: the cuBLASLt in use, or the reason why none is, and what deviated since.

        Deviations are what `TM_CUDA_OVERLAP=0`, `TM_CUDA_GRAPHS=0` and `TM_CUDA_RANK_WAITS=1`
        switch, steps that could not be captured, a warm-up that ended early, and the pair of GPUs
        that cannot use each other's memory, so that sums over ranks go through the host's."""
        return self._core.library_note

    @property
    def warmed_up(self) -> tuple[int, int, float]:
        """The warm-up: kinds of steps that were run, of how many, and its seconds."""
        return self._core.warmed_up

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all that the KV depends on beside the tokens: weights, config, dtypes.

        The engine never uses pages of another fingerprint."""
        return self._core.fingerprint

    def page_keys(self, token_ids: Iterable[int], salt: str = "") -> list[bytes]:
        """Returns the block hashes of the pages of these tokens, without waiting for the engine.

        Args:
            token_ids: Token ids from the start of a sequence.
            salt: Owner of the KV.

        Returns:
            16 bytes for each page of 64 tokens, and for the partial last page if there is one.
        """
        return self._core.page_keys(token_id_list(token_ids, self.vocab_size), _text("salt", salt))

    def remove_pages(self, keys: Iterable[bytes]) -> None:
        """Removes pages and the partial pages that follow them from the cache and all lower tiers.

        Lower tiers remove in the background; `flush_pages()` waits for it. Pages that a handle or
        request uses leave the device after their use.

        Args:
            keys: Block hashes, 16 bytes each.
        """
        self._core.remove_pages(key_list(keys))

    def refresh_pages(self) -> None:
        """Reads what other processes have written to the page folder or removed from it."""
        self._core.refresh_pages()

    def flush_pages(self, timeout: float | None = None) -> Flushed:
        """Waits until every save and removal posted before has ended; other requests continue.

        Args:
            timeout: Most seconds to wait, 0 or more. None: no limit.

        Returns:
            A result that is true if all pages were saved and removed as posted. It is false if the
            time has passed or the engine was closed before (not `ended`), and if pages could not
            be saved (`unsaved` has their block hashes).
        """
        if timeout is None:
            return self._flush(-1)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
            raise wrong("timeout", timeout, "seconds, or None for no limit")
        return self._flush(timeout)

    def _flush(self, seconds: float) -> Flushed:
        ended, unsaved = self._core.flush_pages(seconds)
        return Flushed(ended, tuple(unsaved))

    def stats(self) -> Stats:
        """Returns the counters since opening, and what is in use now."""
        values = self._core.stats()
        values["tiers"] = self._tiers.stats(values["tiers"])
        values["groups"] = tuple(GroupStats(**group) for group in values["groups"])
        values["ranks"] = tuple(RankStats(**rank) for rank in values["ranks"])
        return Stats(**{f.name: values[f.name] for f in fields(Stats)})

    def evict(self) -> None:
        """Evicts all pages that no handle and no request refers to."""
        self._core.evict()

    def profile(self, on: bool = True) -> None:
        """Starts (with empty tables) or stops the profiler of every rank, for `stats().ops`."""
        self._core.set_profiling(bool(on))

    def check_invariants(self) -> None:
        """Raises InternalError if page counts and references disagree; call it when idle."""
        self._core.check_invariants()

    def close(self) -> None:
        """Cancels all requests, delivers their finish events, saves and ends the engine thread.

        It saves the pages of handles that persist, partial ones too, for at most 20 seconds, and
        logs a warning about pages that it could not save. It abandons a disk that hangs after 5
        more seconds. Idempotent.
        """
        closed, self._closed = self._closed, True
        last_saves = self._core.shutdown()
        if not closed:
            warn_of_last_saves(*last_saves)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be copied or pickled: it owns a thread and its memory")


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open_engines.clear)  # a child process has no engine threads
_LEAVING = 0.05  # seconds for threads that wait for an engine to return to Python


@atexit.register
def _close_at_exit() -> None:
    """Closes engines while the process can still save pages and use a GPU's driver.

    Threads that read a stream then get its end. One that still waited inside the core when the
    interpreter ends would end the process with SIGABRT.
    """
    engines = [engine for engine in _open_engines if not engine._closed]
    for engine in engines:
        with contextlib.suppress(Error):
            engine.close()
    if engines:
        time.sleep(_LEAVING)


def _text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value
