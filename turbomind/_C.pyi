"""The C++ core, in token ids. The public API is `turbomind`; this module may change at any time."""
# ruff: noqa: N818, N999  (the names are the public ones)

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str
PAGE_TOKENS: int  # tokens of a KV page

class Error(Exception):
    """Base of the core's errors; `turbomind.errors` has the tree."""
class InvalidRequest(Error):
    param: str | None
class ContextFull(InvalidRequest): ...
class Busy(Error): ...
class NotFound(Error): ...
class ModelError(Error): ...
class EngineClosed(Error): ...
class InternalError(Error): ...

class RopeTable:
    """Inverse frequencies of a rotary embedding, head_dim / 2 values, scaled."""

    inv_freq: list[float]
    attention_factor: float
    interleaved: bool
    def __init__(self) -> None: ...

class ExpertsConfig:
    """Experts in place of an MLP, or beside it; `intermediate` is the width of one."""

    count: int
    top_k: int
    intermediate: int
    renormalize: bool  # the weights of a token's experts have the sum 1
    router_bias: bool
    bias: bool
    scaled: bool
    own_norms: bool  # of the MLP and of the experts beside it
    def __init__(self) -> None: ...

class LayerConfig:
    """One decoder layer; sizes in elements, `window` in tokens (0: full attention)."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    kv_layer: int  # earlier layer whose KV attention reads; -1: its own
    rope: int
    attn_scale: float
    softcap: float
    qk_norm: bool
    v_norm: bool
    qkv_bias: bool
    o_bias: bool
    intermediate: int  # 0: no MLP beside experts
    experts: ExpertsConfig
    activation: str  # "silu" | "gelu_tanh" | "swiglu"
    mlp_bias: bool
    mlp_gate: bool
    qk_norm_all: bool
    sinks: bool
    post_norms: bool
    residual_scale: float
    scaled: bool
    def __init__(self) -> None: ...

# Names of weight formats: "bfloat16", "float16", "float32", "int8" (one scale per row), and those
# that these functions return. See cpp/linear/code_layout.h.
# bits: 4 or 8. group: values of K per scale, 16 to 256; 0: one float32 scale per row.
# scales: "float32", "float16", "bfloat16", or "int8": times a float16 per 256 values.
# offsets: "none": scale * (code - 2^(bits-1)); "zero": scale * (code - zero), a byte per group;
# "minimum": scale * code + minimum. ordered: code column j is for column columns[j] of the input.
def code_format(
    bits: int, group: int, scales: str, offsets: str = "none", ordered: bool = False
) -> str: ...
def block_formats() -> list[tuple[str, tuple[int, int, str, str]]]: ...  # of types of GGUF blocks
def parts_format(parts: Sequence[tuple[int, str]]) -> str: ...  # rows and format of each part

class ModelConfig:
    """A decoder-only model. Lists are copied in and out: assign them whole."""

    fingerprint: str
    hidden: int
    vocab: int
    max_context: int
    norm_eps: float
    norm_weight_offset: float
    embed_scale: float
    logit_scale: float
    final_softcap: float
    tied_head: bool
    per_layer: int
    weight_format: str  # of slots that slot_formats does not have: "bfloat16", "float16", "float32"
    slot_formats: dict[str, str]  # by the name of a matrix's slot
    kv_dtype: str  # "bfloat16" | "float32"
    ropes: list[RopeTable]
    layers: list[LayerConfig]
    def __init__(self) -> None: ...

class CacheGroup:
    """Layers of equal attention window, which share pages."""

    @property
    def kind(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def page_bytes(self) -> int: ...

def pool_sizes(
    groups: list[CacheGroup], *, bytes: int, pages: int, rows: int, chunk: int
) -> list[int]:
    """Returns the pages of each cache group: in `bytes`, or with `pages`, unless it is 0, for the group
    that reaches the furthest back. Steps have at most `rows` sequences and `chunk` prompt tokens."""

def plan_cache(
    config: ModelConfig, ranks: int = 1, gpu: bool = False
) -> list[CacheGroup]:
    """Returns the cache groups of a model with the pages of all ranks. Raises ModelError for a config
    out of range, InvalidRequest for one that cannot be cut over so many ranks."""

class Slot:
    """A place for one weight of a model, [rows][cols] elements."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def linear(self) -> bool: ...
    @property
    def format(self) -> str: ...  # name of the weight format; "float32" for vectors
    @property
    def bytes(self) -> int: ...  # packed, padding included

class SourceFile:
    """A row-major tensor in an open file: `offset` and `bytes` are its place. The caller keeps
    the descriptor open."""

    def __init__(self, path: str, descriptor: int, offset: int, bytes: int) -> None: ...

class CodeSource:
    """A matrix of codes of a quantized checkpoint, which the core reads in pieces."""

def block_codes(tensor: str, type: str, file: SourceFile, rows: int, cols: int) -> CodeSource:
    """Returns the rows of a tensor of GGUF blocks, of one of the types of block_formats()."""

class PackedIntegers:
    """A matrix [rows, n] of integers of 4 or 8 bits, packed in words of 32 bits from the low ones.

    packing: "bytes": [rows, n] int8, less 2^(bits-1). "inputs": [rows, words of n].
    "inputs_first": [words of n, rows]. "outputs": [words of rows, n]. "outputs_last":
    [n, words of rows]. interleaved: the fields of a word are its outputs 0 2 4 6 1 3 5 7.
    add: is added to each word, modulo 2^32.
    """

    def __init__(
        self, tensor: str, file: SourceFile, packing: str, interleaved: bool = False, add: int = 0
    ) -> None: ...

class PackedScales:
    """Scales [rows, groups], or [groups, rows] with `groups_first`."""

    def __init__(
        self, tensor: str, file: SourceFile, dtype: str, groups_first: bool = False
    ) -> None: ...

def packed_codes(
    rows: int,
    cols: int,
    bits: int,
    group: int,  # columns of a scale; 0: one for a row
    codes: PackedIntegers,
    scales: PackedScales,
    zeros: PackedIntegers | None = None,
    columns: Any = None,  # int32 [cols]: the column of x that each column of codes multiplies
) -> CodeSource:
    """Returns codes, scales and zero points that are in tensors of their own."""

class DecoderBuilder:
    """Packs weights. Segments are (buffer or SourceFile, dtype name, first row, rows, columns) of
    row-major tensors, or (codes, first row, rows); `set` reads them during the call only, files in pieces of 2 MiB, and raises
    ModelError for a file that cannot be read or has become shorter. `finish` raises ModelError for
    slots not set or a weight that is not finite."""

    def __init__(
        self,
        config: ModelConfig,
        isa: str,
        threads: int,
        gpus: Sequence[GpuOptions] = (),
        tile_order: TileOrder | None = None,
        ranks: int = 1,
    ) -> None: ...
    @property
    def slots(self) -> list[Slot]: ...
    def set(
        self,
        slot: str,
        segments: Sequence[tuple[Any, str, int, int, int] | tuple[CodeSource, int, int]],
    ) -> None: ...
    def fill_dummy(self, seed: int) -> None: ...
    def finish(self, check_finite: bool) -> Model: ...

def weight_slots(config: ModelConfig, gpu: bool = False) -> list[Slot]: ...  # without packing
def plan_memory(
    config: ModelConfig, gpu: bool = False, ranks: int = 1
) -> tuple[int, list[tuple[int, list[int]]]]:
    """Returns (bytes of weights that ranks share, [(bytes of weights, [bytes of a page of each cache
    group]) of each rank]) of a model, without making one."""


class GpuOptions:
    """The GPU of a rank of a model, and the mode of its kernels."""

    def __init__(
        self, kind: str, index: int, deterministic: bool, library_folders: list[str]
    ) -> None: ...
    @property
    def kind(self) -> str: ...  # "cuda" | "emulated"
    @property
    def index(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...

class Model:
    """Packed weights, until an Engine takes them over."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def groups(self) -> list[CacheGroup]: ...

class EngineOptions:
    """Sizes and targets of an engine; `turbomind.Engine` documents each."""

    max_batch_size: int
    max_context_tokens: int
    cache_bytes: int
    cache_share: float  # above 0: share of the device's free memory, in place of cache_bytes
    cache_pages: int
    prefill_chunk: int
    step_ms: float
    prefix_reuse: bool
    warm_up: bool
    host_bytes: int  # 0: no tier in the host's memory
    page_folder: str  # "": no tier on disk
    disk_quota: int  # 0: no limit; -1: chosen when the folder is opened
    def __init__(self) -> None: ...

class SamplingParams:
    """Settings as in `turbomind.settings.SamplingSettings`; -1 stands for None in `max_new_tokens` and
    `logprobs`. Lists are copied in and out: assign them whole."""

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
    """Kind, priority and owner of one request."""

    kind: str  # "generate" | "score" | "logits"
    priority: int
    retention_priority: float
    exact: bool
    salt: str
    adapter: int
    first_row: int
    def __init__(self) -> None: ...

class HandleOptions:
    """Owner and persistence of a handle's pages."""

    salt: str
    adapter: int
    retention_priority: float
    persist: bool
    def __init__(self) -> None: ...

class TokenLogprobs:
    """Log-probabilities of one produced token; `turbomind.TokenLogprobs` documents the fields."""

    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...

class Event:
    """The outcome of one step for one choice; `turbomind.Event` documents the fields."""

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
    @property
    def loaded_tokens(self) -> int: ...
    @property
    def foreign_tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class Waker:
    """A file descriptor that becomes readable when any of its requests has new events. `drain` clears
    it and returns their ids; `wake` makes it readable without events, from any thread."""

    def __init__(self) -> None: ...
    @property
    def fd(self) -> int: ...
    def drain(self) -> list[int]: ...
    def wake(self) -> None: ...

class Request:
    """A submitted request. `wait` returns False after `seconds` (negative: no limit) without events;
    `drain` returns the events since the last call; `scores` (len - 1 values) and `logits` ([len,
    vocab], a view of its memory) need a request that is done."""

    @property
    def id(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def cancel_choice(self, choice: int) -> None: ...
    def set_priority(self, priority: int) -> None: ...
    def wait(self, seconds: float) -> bool: ...
    def drain(self) -> list[Event]: ...
    def scores(self) -> list[float]: ...
    def logits(self) -> npt.NDArray[np.float32]: ...

class Engine:
    """An engine thread that owns scheduler and cache; `turbomind.Engine` documents the methods."""

    def __init__(self, options: EngineOptions, model: Model) -> None: ...
    def open(self, options: HandleOptions) -> int: ...
    def append(self, handle: int, token_ids: Sequence[int]) -> None: ...
    def length(self, handle: int) -> int: ...
    def token_ids(self, handle: int) -> list[int]: ...
    def truncate(self, handle: int, length: int) -> None: ...
    def fork(self, handle: int, retention_priority: float | None) -> int: ...
    def fork_later(self, handle: int, retention_priority: float | None) -> int: ...
    def park(self, handle: int) -> None: ...
    def set_retention_priority(self, handle: int, retention_priority: float) -> None: ...
    def save(self, handle: int) -> None: ...
    def warm(self, handle: int) -> None: ...
    def close(self, handle: int, save: bool) -> None: ...
    # Lower tiers. Keys are 16 bytes each. A negative timeout is no limit; the result is (all saves
    # and removals have ended, keys of pages that could not be saved).
    def flush_pages(self, timeout: float) -> tuple[bool, list[bytes]]: ...
    def residence(self, token_ids: Sequence[int], salt: str) -> tuple[int, list[int]]: ...
    def predict_ttft(self, token_ids: Sequence[int], new_tokens: int, salt: str) -> float: ...
    def forecasts(
        self, queries: Sequence[tuple[Sequence[int], str]], new_tokens: int
    ) -> list[tuple[int, list[int], float]]: ...
    def speeds(self) -> tuple[list[float], float, int]: ...
    def page_keys(self, token_ids: Sequence[int], salt: str) -> list[bytes]: ...
    def remove_pages(self, keys: Sequence[bytes]) -> None: ...
    def refresh_pages(self) -> None: ...
    @property
    def numerics_fingerprint(self) -> str: ...
    @property
    def library_note(self) -> str | None: ...  # None on the CPU
    @property
    def warmed_up(self) -> tuple[int, int, float]: ...  # (kinds of steps run, kinds in all, seconds)
    @property
    def fingerprint(self) -> str: ...
    def generate(
        self, handle: int, params: SamplingParams, options: RequestOptions, waker: Waker | None
    ) -> Request: ...
    def advance(
        self,
        handle: int,
        prefix_length: int,
        append: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        retention_priority: float | None,
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
    def shutdown(self) -> tuple[bool, int, bool]: ...  # (saves ended, pages not saved, a tier hangs)

class PageStore:
    """The disk tier of pages, wrapped by `turbomind.engine.pages.PageStore`. Keys are 16 bytes."""

    def __init__(self, folder: str, quota: int, numerics: str, segment: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def contains(self, key: bytes, group: int) -> bool: ...
    def bytes_of(self, keys: Iterable[bytes]) -> int: ...
    def pages(self) -> list[tuple[bytes, int]]: ...
    def find_prefix(
        self, parent: bytes, token_ids: Sequence[int], group: int
    ) -> tuple[bytes, int] | None: ...
    def groups(self, key: bytes) -> list[int]: ...
    def verify(self, key: bytes, group: int) -> bool: ...
    def read(self, key: bytes, group: int) -> dict[str, Any] | None: ...
    def write(
        self,
        parent: bytes,
        token_ids: Sequence[int],
        payload: bytes,
        group: int,
        fingerprint: str,
        numerics: str,
        first_head: int,
        heads: int,
        retention_priority: float,
    ) -> bool: ...
    def touch(self, keys: Iterable[bytes], retention_priority: float) -> None: ...
    def remove(self, keys: Iterable[bytes]) -> None: ...
    def retain_only(self, keys: Iterable[bytes]) -> None: ...
    def evict(self, bytes: int, needed: Iterable[bytes]) -> int: ...
    def refresh(self) -> None: ...
    def sync(self) -> None: ...
    def maintain(self) -> None: ...
    def close(self) -> None: ...

def root_key(fingerprint: str, salt: str, adapter: int) -> bytes: ...
def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes: ...
def page_keys(
    fingerprint: str, token_ids: Sequence[int], salt: str, adapter: int
) -> list[bytes]: ...

class TileOrder:
    """The order in which the AMX kernel of many rows walks a product. Every order gives the same
    bits."""

    def __init__(self, chunk_k_blocks: int, stays: str, stream: bool) -> None: ...
    @property
    def chunk_k_blocks(self) -> int: ...
    @property
    def stays(self) -> str: ...  # "weights" or "rows"
    @property
    def stream(self) -> bool: ...

def available_isas() -> list[str]: ...
def resolve_isa(name: str) -> str: ...
def amx_hindrance() -> str: ...  # why AMX is not used although the processor has it
def amx_hindrance_of(processor_has_it: bool, saved: bool, error: int) -> str: ...
def cpu_name() -> str: ...

# Control groups of this process, the innermost first; `root` holds `proc` and `sys`.
def control_groups(controller: str, root: str) -> list[tuple[str, int]]: ...  # folder, version
def cpu_quota(root: str) -> int | None: ...  # CPUs, rounded down, at least 1
def attention_scratch_bytes(isa: str, threads: int, k_dim: int, v_dim: int) -> int: ...

# Benchmarks' ceilings and bare products; see cpp/ceilings/ceilings.h.
def measure_read(isa: str, threads: int, buffer_bytes: int, seconds: float) -> float: ...
def measure_tiles(isa: str, threads: int, seconds: float) -> float: ...
def measure_int8(isa: str, threads: int, seconds: float) -> float: ...
def measure_linear(
    isa: str,
    threads: int,
    weight_format: str,
    m: int,
    n: int,
    k: int,
    seconds: float,
    epilogue: str = "store",
    order: TileOrder | None = None,
) -> float: ...

class GpuCeilings:
    @property
    def read(self) -> float: ...  # bytes per second
    @property
    def copy(self) -> float: ...  # bytes read and written
    @property
    def flops(self) -> float: ...

def measure_gpu(
    gpu: GpuOptions, buffer_bytes: int, size: int, seconds: float
) -> GpuCeilings: ...

class GpuDevice:
    @property
    def kind(self) -> str: ...  # "cuda" | "emulated"
    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...

def gpu_devices() -> list[GpuDevice]: ...
def cuda_status() -> str: ...  # "1 CUDA device", "no CUDA device: ..."
def gpu_fault(index: int) -> str: ...  # why its kernels do not run; "" if they run
def model_fault(
    config: ModelConfig, gpus: Sequence[GpuOptions]
) -> str: ...  # why it does not run with a rank on each; "" if it does
def gpu_free_bytes(gpu: GpuOptions) -> int: ...
def cublaslt_note(folders: Sequence[str]) -> str: ...  # path of the library, or why there is none

# Tests: one op on plain arrays. It stays small; the engine's own paths are the real tests.
# test_set_step_delay: lets every later step of this process begin so much later.
def test_set_step_delay(microseconds: int) -> None: ...

# test_unpack: the values that w [n, k] has once it is packed.
def test_unpack(weight_format: str, w: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...

# test_unpack_codes: the rows of codes from `begin` on.
def test_unpack_codes(
    weight_format: str, codes: CodeSource, begin: int = 0
) -> npt.NDArray[np.float32]: ...
def test_code_rows(
    rows: int,
    cols: int,
    codes: Any,
    scales: Any,
    offsets: Any = None,
    super_scales: Any = None,
    super_offsets: Any = None,
    columns: Any = None,
    code_bits: int = 8,
) -> CodeSource:
    """Returns codes that are in contiguous buffers, row-major.

    codes: [rows, cols] bytes, or with code_bits 4 two a byte, the even column in the low half.
    scales, offsets: [rows, groups] in the types of the format. super_scales, super_offsets:
    [rows, cols / 256] float16, of scales "int8". columns: [cols] int32, of ordered formats.
    """

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
