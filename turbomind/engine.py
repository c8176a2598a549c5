"""The engine: token ids in, token ids out, with handles whose keys and values stay."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

import turbomind._C as _C
from turbomind.defaults import CacheSize, defaults
from turbomind.descriptors import telling_of_descriptors
from turbomind.device import device_name, gpu_options, is_automatic
from turbomind.errors import EngineClosed, Error, InternalError, InvalidRequest, ModelError
from turbomind.handle import Handle
from turbomind.inbox import Inbox
from turbomind.loading.loader import ModelInfo, describe, load
from turbomind.machine import physical_cores
from turbomind.params import (
    MAX_SIZE,
    REQUEST,
    SAMPLING,
    integer,
    refuse_unknown,
    request_options,
    sampling_params,
    set_option,
    token_id_list,
)
from turbomind.stream import Face, Generation, LoopFaces, Stream, collect
from turbomind.tiers import (
    Flushed,
    Residence,
    Tiers,
    TierStats,
    key_list,
    warn_of_last_saves,
)

OPTIONS = (
    "device", "dtype", "kv_dtype", "threads", "max_batch_size", "max_context_tokens",
    "cache_memory", "cache_pages", "prefill_chunk", "step_ms", "prefix_reuse", "load_format",
    "seed", "rope_length", "isa", "revision", "weights_digests", "host_memory", "page_folder",
    "disk_quota", "deterministic", "warm_up",
)  # fmt: skip
_log = logging.getLogger(__name__)
_INT_MAX = (1 << 31) - 1
_MAX_THREADS = 1024  # of the core's pool


@dataclass(frozen=True)
class Stats:
    """Counters since the start, and what is in use now.

    pages_free + pages_referenced + pages_cached = pages_total. `tokens_prefilled` are prompt tokens
    computed, `tokens_reused` prompt tokens whose KV was found. On a GPU `steps_overlapped` of the
    `steps` were submitted before the one before had been read. `rows` are in use, requests
    `waiting` have none. `max_context` is in tokens, `cache_bytes` are those of all pages. `ops` is
    the profiler's table; on a GPU its times are the device's.

    Of the tiers below: `tiers` by name, "host" and "disk"; `tokens_loaded` of those reused came up
    for a request; `pages_loaded` and `pages_saved` on this engine's account, and those that
    `failed_`, which are computed again.
    """

    pages_total: int
    pages_free: int
    pages_referenced: int
    pages_cached: int
    tokens_prefilled: int
    tokens_decoded: int
    tokens_reused: int
    steps: int
    steps_overlapped: int
    preemptions: int
    slots: int
    waiting: int
    handles: int
    max_context: int
    last_step_ms: float
    ops: Mapping[str, Any] = field(default_factory=dict)
    tokens_loaded: int = 0
    pages_loaded: int = 0
    pages_saved: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    tiers: Mapping[str, TierStats] = field(default_factory=dict)
    cache_bytes: int = 0


class Engine:
    """One model on this machine, serving any number of threads and asyncio loops.

    Args:
        path: a model folder, a hub name, or (load_format "dummy") a config.json.
        device: "cpu"; "cuda" or "cuda:1", a GPU; "auto", $TURBOMIND_DEVICE or else a GPU where one
            works, but the CPU for an `isa` or float32 asked for by name; "cuda_emulated", the GPU's
            kernels run by the host, for tests (turbomind/device.py).
        dtype: format weights are kept in: "bfloat16", "float16", "float32" (not on a GPU), or
            "auto", the config's own (bfloat16 where it does not say, and on a GPU for float32).
        kv_dtype: "bfloat16", "float32", or "auto": float32 for float32 weights, else bfloat16. On a
            GPU that of the weights, bfloat16 or float16.
        threads: None for the usable physical cores.
        max_batch_size: sequences that run at once.
        max_context_tokens: tokens of one sequence; None for the model's. Never more than the cache
            holds.
        cache_memory: bytes of keys and values, an int or a text like "2GiB"; or a share like "90%":
            on the CPU of what is available once the weights are loaded, on a GPU of what is free
            beside weights and the memory of steps (256 MiB of that, or what the share leaves if
            it is more, are for captured graphs and others).
            None: "2GiB", on a GPU "90%", emulated "64MiB". `stats().cache_bytes` is what became of
            it.
        cache_pages: pages per cache group instead of cache_memory.
        prefill_chunk: most prompt tokens of one step; None: 512, on a GPU 2048.
        step_ms: target time of a step that ends with somebody's token; other steps may take four
            times as long. None: 100, on a GPU 25.
        prefix_reuse: whether a request may use pages of others with the same beginning.
        load_format: "auto", or "dummy": weights made from the config and `seed`.
        rope_length: tokens that dynamic NTK rope scaling is computed for.
        isa: instruction set; "auto" is the best here, or TURBOMIND_ISA.
        revision: branch, tag or commit of a hub name.
        weights_digests: a JSON file that remembers the SHA-256 of whole weight files, so that keys
            and values are never taken for those of other weights; None looks at samples only.
        host_memory: bytes of a tier of keys and values in the host's memory, below the cache; None
            for none. It keeps those of handles opened with `persist`. For a GPU it is pinned, taken
            64 MiB at a time as it fills; where the system pins no more, the tier is full.
        page_folder: where their keys and values live on disk and outlast the process; None for
            nowhere. Made if it is missing, readable by its owner only; processes may share it.
        disk_quota: bytes the folder may take; None for no limit.
        deterministic: on a GPU, only kernels that give a row the same bits in any company; the CPU
            has no others. None: $TURBOMIND_DETERMINISTIC, 0 or 1, or else False.
        warm_up: on a GPU, runs steps of all kinds before the first request (at most 5 seconds), so
            that it is served as later ones are; the CPU has nothing to warm up. None: True, but
            not on an emulated one.

    Where "auto" has chosen a GPU that refuses the model or has no room for it, the CPU computes:
    `device` then says so, `device_note` why, and a warning is logged.

    Raises InvalidRequest (an option is wrong), NotFound (no such model), ModelError (it cannot be
    used). A context manager; `close()` ends all requests.
    """

    @telling_of_descriptors("the engine")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        threads: int | None = None,
        max_batch_size: int = 16,
        max_context_tokens: int | None = None,
        cache_memory: int | str | None = None,
        cache_pages: int | None = None,
        prefill_chunk: int | None = None,
        step_ms: float | None = None,
        prefix_reuse: bool = True,
        load_format: str = "auto",
        seed: int = 0,
        rope_length: int | None = None,
        isa: str = "auto",
        revision: str | None = None,
        weights_digests: str | os.PathLike[str] | None = None,
        host_memory: int | str | None = None,
        page_folder: str | os.PathLike[str] | None = None,
        disk_quota: int | str | None = None,
        deterministic: bool | None = None,
        warm_up: bool | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("engine option", unknown, OPTIONS)
        gpu = gpu_options(device, deterministic, isa=isa, dtype=dtype, kv_dtype=kv_dtype)
        self.threads = (
            physical_cores() if threads is None else integer("threads", threads, 1, _MAX_THREADS)
        )
        first = integer("seed", seed, 0, (1 << 64) - 1)
        if not isinstance(isa, str):
            raise InvalidRequest(f"isa is {isa!r}, expected a text")
        self.isa = _C.resolve_isa(isa)
        self._closed = False

        def options_on(gpu: _C.GpuOptions | None) -> tuple[_C.EngineOptions, CacheSize]:
            options, absent = _C.EngineOptions(), defaults(gpu)
            options.prefill_chunk, options.step_ms = absent.prefill_chunk, absent.step_ms
            options.warm_up = absent.warm_up
            for name, value, most in (
                ("max_batch_size", max_batch_size, _INT_MAX),
                ("max_context_tokens", max_context_tokens, MAX_SIZE),
                ("cache_pages", cache_pages, MAX_SIZE),
                ("prefill_chunk", prefill_chunk, _INT_MAX),
            ):
                if value is not None:
                    setattr(options, name, integer(name, value, 1, most))
            if step_ms is not None:
                set_option(options, "step_ms", step_ms, "a number of milliseconds")
            if warm_up is not None:
                set_option(options, "warm_up", warm_up, "True, False or None")
            set_option(options, "prefix_reuse", prefix_reuse, "True or False")
            return options, CacheSize(absent.cache_memory if cache_memory is None else cache_memory)

        def open_on(gpu: _C.GpuOptions | None) -> None:
            options, cache = options_on(gpu)
            tiers = Tiers(options, host_memory, page_folder, disk_quota)
            info = describe(
                path,
                dtype=dtype,
                kv_dtype=kv_dtype,
                rope_length=rope_length,
                revision=revision,
                weights=load_format != "dummy",
                gpu=gpu is not None,
            )
            model = load(
                info,
                isa=self.isa,
                threads=self.threads,
                load_format=load_format,
                seed=first,
                digests=_path("weights_digests", weights_digests),
                gpu=gpu,
            )
            self._begin(gpu, options, cache, tiers, info, model)

        self.device_note: str | None = None
        try:
            open_on(gpu)
            return
        except (InvalidRequest, ModelError, InternalError) as refusal:
            if gpu is None or not is_automatic(device):
                raise
            note = f"{device_name(gpu)} does not take the model: {refusal}"
        open_on(None)  # where what is wrong on both is told as it is there
        self.device_note = note
        _log.warning("%s; the CPU computes", note)

    def _begin(
        self,
        gpu: _C.GpuOptions | None,
        options: _C.EngineOptions,
        cache: CacheSize,
        tiers: Tiers,
        info: ModelInfo,
        model: _C.Model,
    ) -> None:
        self.device: str = device_name(gpu)  # "cpu", "cuda:0", "cuda_emulated"
        self.info = info
        self._tiers = tiers
        self.vocab_size: int = model.vocab
        self.weight_bytes: int = model.weight_bytes
        self.cache_groups: int = len(model.groups)  # each has as many pages as the others
        cache.set(options, model, gpu)
        self._faces = LoopFaces()
        self._core = _C.Engine(options, model)
        self.max_context: int = self.stats().max_context  # tokens one sequence can have
        self.max_batch_size: int = options.max_batch_size  # sequences that run at once
        done, kinds, seconds = self._core.warmed_up
        if kinds:
            _log.info("warmed up in %.1f s: %d of %d kinds of steps", seconds, done, kinds)
        if gpu is not None:
            _on_gpus.add(self)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation unless `ignore_eos`."""
        return self.info.eos_token_ids

    def open(
        self, salt: str = "", retention_priority: float = 0.0, persist: bool = False
    ) -> Handle:
        """A new, empty sequence. Pages are shared only among equal salts; of pages that nothing
        refers to, those with a higher retention_priority stay longer. `persist` copies full pages
        to the tiers below in the background; InvalidRequest when the engine has none. Does not wait
        for the engine."""
        options = _C.HandleOptions()
        set_option(options, "persist", persist, "True or False")
        set_option(options, "salt", salt, "a text")
        set_option(options, "retention_priority", retention_priority, "a number")
        return Handle(self, self._core.open(options), options.persist)

    def stream(
        self, token_ids: Iterable[int], *, inbox: Inbox | None = None, **params: Any
    ) -> Stream:
        """Starts a stateless request; does not wait for the engine. `inbox` is told its news.

        Keywords: the sampling parameters `max_new_tokens` (None: to the end of the context),
        `min_new_tokens`, `temperature` (default 1.0; 0 is greedy), `top_k`, `top_p`, `min_p`,
        `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias` {id: number},
        `bad_words`, `stop_token_ids`, `eos_token_ids` (default: the model's), `ignore_eos`, `seed`
        (None draws one), `attempt`, `n`, `logprobs` (k: the sampled token's and the k most likely),
        `continued` (last tokens of the prompt that presence and frequency penalty count as output,
        so that what was stopped goes on as if it had not been); and `priority` (lower first),
        `retention_priority`, `salt`, `exact` (computes again what another build or
        machine computed, which is good but may differ in its last bits). Raises InvalidRequest.
        """
        refuse_unknown("parameter", params, (*SAMPLING, *REQUEST))
        sampling, seed = sampling_params(params, self.eos_token_ids)
        return self._submit(token_ids, sampling, request_options(params), seed, inbox)

    def generate(self, token_ids: Iterable[int], **params: Any) -> Generation:
        """As `stream()`, but waits for the end. Raises the request's error. Blocks its thread: in
        asyncio code use `await engine.stream(...).aresult()`."""
        with self.stream(token_ids, **params) as stream:
            return stream.result()

    def logits(self, token_ids: Iterable[int], **params: Any) -> npt.NDArray[np.float32]:
        """The model's logits [len(token_ids), vocab_size] after each token. Keywords: `priority`,
        `retention_priority`, `salt`."""
        return self._run(token_ids, "logits", params).logits()

    def score(self, token_ids: Iterable[int], **params: Any) -> list[float]:
        """Log-probability of each token after the first, given those before it; len - 1 of them.
        Keywords as `logits()`."""
        return self._run(token_ids, "score", params).scores()

    def _run(self, token_ids: Iterable[int], kind: str, params: Mapping[str, Any]) -> _C.Request:
        refuse_unknown("parameter", params, REQUEST)
        options = request_options(params, kind)
        with self._submit(token_ids, _C.SamplingParams(), options, 0) as stream:
            if collect(stream).finish_reason == "cancelled":  # what there is of it is only a part
                raise EngineClosed(f"the engine was closed during a request of kind {kind!r}")
            return stream.request

    def _submit(
        self,
        token_ids: Iterable[int],
        sampling: _C.SamplingParams,
        options: _C.RequestOptions,
        seed: int,
        inbox: Inbox | None = None,
    ) -> Stream:
        ids = token_id_list(token_ids, self.vocab_size)
        if not ids:
            raise InvalidRequest("token_ids is empty, expected at least one token")
        face, waker = self._reader(inbox)
        return Stream(self._core.submit(ids, sampling, options, waker), seed, face, self)

    def _reader(self, inbox: Inbox | None) -> tuple[Face | None, _C.Waker | None]:
        """Who is told of a new request's news: the inbox, else the loop that runs here, if any."""
        if inbox is not None:
            if not isinstance(inbox, Inbox):
                raise InvalidRequest(f"inbox is {inbox!r}, expected an Inbox or None")
            return None, inbox.waker
        face = self._faces.current()
        return face, face[0].waker if face else None

    def residence(self, token_ids: Iterable[int], salt: str = "") -> Residence:
        """Where the keys and values of these tokens are, as far as they reach."""
        ids = token_id_list(token_ids, self.vocab_size)
        return self._tiers.residence(self._core.residence(ids, _text("salt", salt)))

    def predict_ttft(self, token_ids: Iterable[int], new_tokens: int, salt: str = "") -> float:
        """Seconds to the first token of a turn of `new_tokens` behind `token_ids`, if it ran now
        and alone; an estimate from what was measured so far, 0.0 before anything was."""
        ids = token_id_list(token_ids, self.vocab_size)
        added = integer("new_tokens", new_tokens, 1, MAX_SIZE)
        return self._core.predict_ttft(ids, added, _text("salt", salt))

    def speeds(self) -> dict[str, float]:
        """What was measured so far (0.0: nothing): "host_read" and "disk_read" in bytes/s,
        "prefill" in tokens/s at the beginning of a prompt, and "kv_bytes_per_token"."""
        return self._tiers.speeds(self._core.speeds())

    @property
    def numerics_fingerprint(self) -> str:
        """Who computes: equal ids give equal bits."""
        return self._core.numerics_fingerprint

    @property
    def library_note(self) -> str | None:
        """On a GPU: which cuBLASLt multiplies large matrices, or why none does, and what has gone
        another way than it should since, such as steps that could not be captured, or a warm-up
        that ended early."""
        return self._core.library_note

    @property
    def fingerprint(self) -> str:
        """Of everything that keys and values depend on but the tokens: pages of another one are
        never used."""
        return self._core.fingerprint

    def page_keys(self, token_ids: Iterable[int], salt: str = "") -> list[bytes]:
        """Keys of the pages of these tokens, 64 tokens each but for the last. Does not wait."""
        return self._core.page_keys(token_id_list(token_ids, self.vocab_size), _text("salt", salt))

    def remove_pages(self, keys: Iterable[bytes]) -> None:
        """Removes pages of these keys from the cache and from all tiers below (there in the
        background: `flush_pages()` waits), with the unfinished pages behind them. What a handle or
        request still uses leaves the device when it is done."""
        self._core.remove_pages(key_list(keys))

    def refresh_pages(self) -> None:
        """Takes over what other processes have written to the page folder, or removed."""
        self._core.refresh_pages()

    def flush_pages(self, timeout: float | None = None) -> Flushed:
        """Waits until every save and removal asked for before has come to its end; other threads
        and requests go on. The result is true when all is below as asked, and false when `timeout`
        seconds have passed or the engine was closed before (not `ended`), or when pages could not
        be saved (`unsaved` has their keys)."""
        if timeout is None:
            return self._flush(-1)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
            raise InvalidRequest(f"timeout is {timeout!r}, expected seconds, or None for no limit")
        return self._flush(timeout)

    def _flush(self, seconds: float) -> Flushed:
        ended, unsaved = self._core.flush_pages(seconds)
        return Flushed(ended, tuple(unsaved))

    def stats(self) -> Stats:
        """Counters and what is in use now."""
        values = self._core.stats()
        values["tiers"] = self._tiers.stats(values["tiers"])
        return Stats(**{f.name: values[f.name] for f in fields(Stats)})

    def evict(self) -> None:
        """Drops all cached pages: those that no handle and no request refers to."""
        self._core.evict()

    def profile(self, on: bool = True) -> None:
        """Starts (with an empty table) or stops the profiler behind `stats().ops`."""
        self._core.set_profiling(bool(on))

    def check_invariants(self) -> None:
        """Raises InternalError when the engine's books do not balance; call it when idle."""
        self._core.check_invariants()

    def close(self) -> None:
        """Cancels everything, delivers the finish events, saves what persists (unfinished pages
        too, for at most 20 seconds), ends the engine thread. Idempotent. What could not be saved is
        logged as a warning; a disk that hangs is left behind after 5 more seconds."""
        closed, self._closed = self._closed, True
        last_saves = self._core.shutdown()
        if not closed:
            warn_of_last_saves(*last_saves)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be copied or pickled: it owns a thread and its memory")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_on_gpus: weakref.WeakSet[Engine] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # a child has none of their threads
    os.register_at_fork(after_in_child=_on_gpus.clear)


@atexit.register
def _close_on_gpus() -> None:
    """At the end of the process the driver goes, whoever still computes."""
    for engine in list(_on_gpus):
        with contextlib.suppress(Error):
            engine.close()


def _text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {value!r}, expected a text")
    return value


def _path(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{name} is {value!r}, expected the path of a file or None")
    return Path(text)
