"""The C++ core. Everything here speaks token ids; `turbomind.Engine` is the public face."""
# ruff: noqa: N818, N999  (the names are the public ones)

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str

class Error(Exception):
    """Base of the core's errors; `turbomind.errors` names the tree."""

class InvalidRequest(Error): ...
class ContextFull(InvalidRequest): ...
class Busy(Error): ...
class NotFound(Error): ...
class ModelError(Error): ...
class EngineClosed(Error): ...
class InternalError(Error): ...

class RopeTable:
    inv_freq: list[float]
    attention_factor: float
    interleaved: bool
    def __init__(self) -> None: ...

class LayerConfig:
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    rope: int
    attn_scale: float
    softcap: float
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    intermediate: int
    mlp_bias: bool
    residual_scale: float
    def __init__(self) -> None: ...

class ModelConfig:
    """Lists are copied in and out: assign them whole."""

    fingerprint: str
    hidden: int
    vocab: int
    max_context: int
    norm_eps: float
    norm_weight_offset: float
    embed_scale: float
    final_softcap: float
    tied_head: bool
    weight_format: str  # "bfloat16" | "float16" | "float32"
    kv_dtype: str  # "bfloat16" | "float32"
    ropes: list[RopeTable]
    layers: list[LayerConfig]
    def __init__(self) -> None: ...

class CacheGroup:
    @property
    def kind(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def page_bytes(self) -> int: ...

def plan_cache(config: ModelConfig) -> list[CacheGroup]: ...

class Slot:
    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def linear(self) -> bool: ...

class DecoderBuilder:
    """Packs weights. Segments are (buffer, dtype name, first row, rows, columns) of row-major
    tensors; the buffers are read during the call only."""

    def __init__(self, config: ModelConfig, isa: str, threads: int) -> None: ...
    @property
    def slots(self) -> list[Slot]: ...
    def set(self, slot: str, segments: Sequence[tuple[Any, str, int, int, int]]) -> None: ...
    def fill_dummy(self, seed: int) -> None: ...
    def finish(self, check_finite: bool) -> Model: ...

class Model:
    @property
    def vocab(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def groups(self) -> list[CacheGroup]: ...

class EngineOptions:
    max_batch_size: int
    max_context_tokens: int
    cache_bytes: int
    cache_pages: int
    prefill_chunk: int
    step_ms: float
    prefix_reuse: bool
    def __init__(self) -> None: ...

class SamplingParams:
    """Lists are copied in and out: assign them whole."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    bad_words: list[list[int]]
    stop_token_ids: list[int]
    eos_token_ids: list[int]
    ignore_eos: bool
    seed: int
    attempt: int
    continued: int
    n: int
    logprobs: int
    def __init__(self) -> None: ...

class RequestOptions:
    kind: str  # "generate" | "score" | "logits"
    priority: int
    keep_value: float
    salt: str
    adapter: int
    def __init__(self) -> None: ...

class HandleOptions:
    salt: str
    adapter: int
    keep_value: float
    def __init__(self) -> None: ...

class TokenLogprobs:
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...

class Event:
    """One step's news of one choice of a request."""

    @property
    def choice(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenLogprobs]: ...
    @property
    def progress(self) -> tuple[int, int] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def terminal(self) -> bool: ...
    @property
    def error(self) -> Error | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def reused_tokens(self) -> int: ...

class Waker:
    def __init__(self) -> None: ...
    @property
    def fd(self) -> int: ...
    def drain(self) -> list[int]: ...
    def wake(self) -> None: ...

class Request:
    @property
    def id(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def wait(self, seconds: float) -> bool: ...
    def drain(self) -> list[Event]: ...
    def scores(self) -> list[float]: ...
    def logits(self) -> npt.NDArray[np.float32]: ...

class Engine:
    def __init__(self, options: EngineOptions, model: Model) -> None: ...
    def open(self, options: HandleOptions) -> int: ...
    def append(self, handle: int, token_ids: Sequence[int]) -> None: ...
    def length(self, handle: int) -> int: ...
    def token_ids(self, handle: int) -> list[int]: ...
    def truncate(self, handle: int, length: int) -> None: ...
    def fork(self, handle: int, keep_value: float | None) -> int: ...
    def fork_later(self, handle: int, keep_value: float | None) -> int: ...
    def park(self, handle: int) -> None: ...
    def set_keep_value(self, handle: int, keep_value: float) -> None: ...
    def close(self, handle: int) -> None: ...
    def generate(
        self, handle: int, params: SamplingParams, options: RequestOptions, waker: Waker | None
    ) -> Request: ...
    def advance(
        self,
        handle: int,
        keep: int,
        append: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        keep_value: float | None,
        waker: Waker | None,
    ) -> Request: ...
    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        waker: Waker | None,
    ) -> Request: ...
    def stats(self) -> dict[str, Any]: ...
    def evict(self) -> None: ...
    def set_profiling(self, on: bool) -> None: ...
    def check_invariants(self) -> None: ...
    def shutdown(self) -> None: ...

def available_isas() -> list[str]: ...
def resolve_isa(name: str) -> str: ...
def cpu_name() -> str: ...

# Benchmarks' ceilings and bare products; see cpp/cpu/ceilings.h.
def measure_read(isa: str, threads: int, buffer_bytes: int, seconds: float) -> float: ...
def measure_tiles(isa: str, threads: int, seconds: float) -> float: ...
def measure_linear(
    isa: str, threads: int, weight_format: str, m: int, n: int, k: int, seconds: float
) -> float: ...

# Tests: one op on plain arrays. Kept small; the engine's own paths are the real tests.
# test_linear: w and bias in packed row order; epilogue "add" starts from y = 1.
def test_linear(
    isa: str,
    threads: int,
    weight_format: str,
    x: npt.NDArray[np.float32],
    w: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None,
    epilogue: str,
    x_dtype: str,
) -> npt.NDArray[np.float32]: ...

# One token from a row of logits [vocab]: (id, its log-probability or None without logprobs, top).
def test_sample(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    produced: Sequence[int],
    choice: int,
    position: int,
) -> tuple[int, float | None, list[tuple[int, float]]]: ...
