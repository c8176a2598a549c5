"""Options of an engine: a row for each, and the core's struct that they become.

A row is the one place that says what an option is: its type, its range, its default and its text.
From the rows come the keywords of `Engine` and `ChatEngine`, the options of the command line, and
the tables of the documentation.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

import turbomind._C as _C
from turbomind.config.defaults import CacheSize, defaults
from turbomind.machine import physical_cores
from turbomind.params import MAX_SIZE, integer, refuse_unknown, set_option, wrong
from turbomind.settings import MAX_INT, MAX_SEED

_MAX_THREADS = 1024  # limit of the core's thread pool


@dataclass(frozen=True)
class Option:
    """A row.

    Attributes:
        text: What the option is, for people at a command line.
        more: What programs want to know beside it.
        default: The value of an option that is not given.
        absent: What the default stands for, where its value does not say it.
        low: Least value of an integer, as a check needs it.
        high: Largest value of an integer.
        flags: Spelling on the command line, where the name does not give it.
        metavar: Word for the value on the command line, where the type does not give it.
        command: Commands that open an engine take it.
        loading: The time to load a model depends on it, so `lmchat bench load` takes it.
        describing: Facts about the model depend on it, so `lmchat info` takes it.
        computing: It changes what a model computes, not only where or how fast. A session stores
            it.
    """

    text: str
    more: str = ""
    default: Any = None
    absent: str = ""
    low: int | None = None
    high: int | None = None
    flags: str = ""
    metavar: str | None = None
    command: bool = True
    loading: bool = False
    describing: bool = False
    computing: bool = False

    @property
    def range_text(self) -> str:
        """The range of an integer; "" where the text says what is possible."""
        if self.low is None or self.high is None:
            return ""
        if self.high in (MAX_SIZE, MAX_INT):
            return f"at least {self.low}"
        return f"{self.low} to {'2**64 - 1' if self.high == MAX_SEED else self.high}"

    @property
    def default_text(self) -> str:
        """The default in words; "" where nothing is to be said."""
        if self.absent or self.default is None:
            return self.absent
        return str(self.default)


class ChatEngineOptions(TypedDict, total=False):
    """Options of `turbomind.Engine` that `lmchat.ChatEngine` passes on, all optional.

    Wrong values and unknown names raise InvalidRequest.
    """

    device: Annotated[
        str,
        Option(
            "auto, cpu, cuda, cuda:N, or the GPU of each rank: cuda:0,1. auto: $TURBOMIND_DEVICE, "
            "else GPUs that work, else the CPU.",
            'Also "cuda_emulated", a GPU\'s kernels on the host, for tests. "auto" takes the CPU '
            "where `isa` or float32 is asked for, and where GPUs refuse the model or have no room "
            "for it: `device_note` holds the reason then.",
            default="auto",
            metavar="DEVICE",
            loading=True,
            describing=True,
        ),
    ]
    tp: Annotated[
        int | None,
        Option(
            "Tensor parallelism: ranks that the model is cut over, each on a GPU or with a part of "
            "the CPU's threads.",
            "It divides heads and intermediate sizes. KV of another number of ranks is used; "
            "`exact` requests compute it again.",
            absent="$TURBOMIND_TP, else the number of GPUs of --device, else 1",
            loading=True,
            describing=True,
        ),
    ]
    deterministic: Annotated[
        bool | None,
        Option(
            "On a GPU: bit-identical replies, whatever else is in the batch.",
            "Only batch-invariant kernels run; those of the CPU all are.",
            absent="$TURBOMIND_DETERMINISTIC, else fast",
            flags="--deterministic/--fast",
        ),
    ]
    dtype: Annotated[
        str,
        Option(
            "Data type of the weights: auto, bfloat16, float16 or float32.",
            '"auto" is the config\'s own, bfloat16 where it has none, and on a GPU in place of '
            "float32, which a GPU has not.",
            default="auto",
            loading=True,
            computing=True,
            describing=True,
        ),
    ]
    quantize: Annotated[
        str | None,
        Option(
            "Quantize the weights while loading, on the CPU: int8, int4, or none.",
            "int8: symmetric, a scale per output. int4: asymmetric, a scale and a minimum per "
            "group of inputs. Products round their input to int8 per group.",
            absent="none",
            loading=True,
            computing=True,
            describing=True,
        ),
    ]
    head: Annotated[
        str | None,
        Option(
            "With --quantize, the head's format: int8, int4 or keep. [default: int8] Of a "
            "quantized checkpoint with a 16-bit head: int8.",
            "Also that of an embedding that shares the head's memory. int4 needs int4 weights.",
            loading=True,
            computing=True,
            describing=True,
        ),
    ]
    group_size: Annotated[
        int | None,
        Option(
            "Of --quantize int4, inputs per scale: 32, 64 or 128.",
            absent="128",
            loading=True,
            computing=True,
            describing=True,
        ),
    ]
    kv_dtype: Annotated[
        str,
        Option(
            "Data type of the KV cache: auto, bfloat16, float16 or float32.",
            '"auto" is float32 for float32 weights, else bfloat16. float16 keeps 11 significant '
            "bits where bfloat16 keeps 8, up to 65,504. On a GPU that of the weights.",
            default="auto",
            computing=True,
            describing=True,
        ),
    ]
    threads: Annotated[
        int | None,
        Option("CPU threads.", absent="the physical cores", low=1, high=_MAX_THREADS, loading=True),
    ]
    isa: Annotated[
        str,
        Option(
            "CPU instruction set.",
            default="auto",
            absent="$TURBOMIND_ISA, else the best supported one",
            loading=True,
        ),
    ]
    cache_memory: Annotated[
        int | str | None,
        Option(
            "Memory of the KV cache: a size such as 4GiB or a share of free memory such as 80%.",
            "Bytes as an int, too. It is that of all ranks. A share is taken on the CPU of what is "
            "available after the weights are loaded; on a GPU of what is free beside weights and "
            "steps, which reserves 256 MiB of it (or the rest of the share, if more) for captured "
            "graphs and libraries. `stats().cache_bytes` is the result.",
            absent="2GiB, at most 80% of what is free; on a GPU 90%",
            describing=True,
        ),
    ]
    cache_pages: Annotated[
        int | None,
        Option(
            "Pages of full attention, in place of `cache_memory`.",
            "Windows get the pages that `max_batch_size` sequences and some idle ones need, at "
            "most as many.",
            low=1,
            high=MAX_SIZE,
            command=False,
        ),
    ]
    max_batch_size: Annotated[
        int,
        Option("Most sequences in one step.", default=16, low=1, high=4096, command=False),
    ]
    max_context_tokens: Annotated[
        int | None,
        Option(
            "Longest sequence, in tokens.",
            "The cache may hold fewer.",
            absent="the model's",
            low=1,
            high=MAX_SIZE,
        ),
    ]
    prefill_chunk: Annotated[
        int | None,
        Option(
            "Prompt tokens per step, at most.",
            "Longer prompts take several steps (chunked prefill).",
            absent="512; on a GPU 2048",
            low=1,
            high=MAX_INT,
        ),
    ]
    step_ms: Annotated[
        float | None,
        Option(
            "Target step time in ms while other sequences decode.",
            "Steps in which none does may take four times as long.",
            absent="100; on a GPU 25",
        ),
    ]
    prefix_reuse: Annotated[
        bool,
        Option(
            "Prefix caching: requests may use pages of others with the same prefix.",
            default=True,
            command=False,
        ),
    ]
    warm_up: Annotated[
        bool | None,
        Option(
            "Runs steps before the first request, so that first requests are as fast as later "
            "ones.",
            "On a GPU steps of all kinds, for at most 5 seconds, and on any device two or more "
            "whose times decide how the first prompt is cut.",
            absent="True, but not on an emulated GPU",
            command=False,
        ),
    ]
    load_format: Annotated[
        str,
        Option(
            "auto, or dummy for random weights.",
            "Dummy weights are made from the config and `seed`.",
            default="auto",
            computing=True,
        ),
    ]
    seed: Annotated[
        int,
        Option(
            "Seed of dummy weights.",
            default=0,
            low=0,
            high=MAX_SEED,
            command=False,
            computing=True,
        ),
    ]
    rope_length: Annotated[
        int | None,
        Option(
            "Sequence length assumed by dynamic and longrope scaling.",
            computing=True,
            describing=True,
        ),
    ]
    revision: Annotated[
        str | None,
        Option("Branch, tag or commit of a hub name.", command=False, computing=True),
    ]
    weights_digests: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "JSON file that caches the SHA-256 of whole weight files, so that the fingerprint "
            "covers every byte.",
            absent="it covers samples of the files only",
            command=False,
        ),
    ]
    host_memory: Annotated[
        int | str | None,
        Option(
            "Bytes of a KV tier in host memory, as an int or a text.",
            "It holds pages of handles opened with `persist`. For a GPU the memory is pinned, in "
            "pieces of 64 MiB as it fills; where the system pins no more, the tier is full.",
            absent="no such tier",
            command=False,
        ),
    ]


class EngineOptions(ChatEngineOptions, total=False):
    """Options of `turbomind.Engine`, all optional: those of `ChatEngineOptions`, and the KV tier on
    disk, which `lmchat.ChatEngine` puts beside its store."""

    page_folder: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Folder of a KV tier on disk, which outlasts the process.",
            "The engine makes a missing one, readable by its owner only; processes may share it.",
            absent="no such tier",
            command=False,
        ),
    ]
    disk_quota: Annotated[
        int | str | None,
        Option(
            "Most KV on disk: a size such as 20GiB, none, or auto: a tenth of what is free or KV "
            "already, at least 1GiB, and 5GiB or 5% of the disk stay free.",
            "Pages above it are evicted. None is no limit, but 64 MiB (or a twentieth) stay free.",
            default="auto",
            metavar="SIZE",
            command=False,
        ),
    ]


def rows_of(options: type) -> dict[str, Option]:
    """Returns the rows of a class of options by name."""
    hints = get_type_hints(options, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items()}


def _document(options: type) -> None:
    """Adds the rows to the docstring of a class of options, for help()."""
    lines = [f"{options.__doc__}".rstrip(), "", "    Keys:"]
    for name, row in rows_of(options).items():
        default = repr(row.default) if row.default is not None else row.absent
        parts = [row.text, row.more, f"Default: {default}." if default else ""]
        text = f"{name}: {' '.join(filter(None, parts))}"
        lines += textwrap.wrap(text, 92, initial_indent=" " * 8, subsequent_indent=" " * 12)
    options.__doc__ = "\n".join([*lines, "    "])


for _kind in (ChatEngineOptions, EngineOptions):
    _document(_kind)

OPTIONS = rows_of(EngineOptions)
"""The row of each option of `Engine`."""

TYPES = get_type_hints(EngineOptions)
"""The type of each option's value."""


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of every option; those that are not given have their default.

    Raises:
        InvalidRequest: A name is unknown.
    """
    refuse_unknown("engine option", given, OPTIONS)
    return {name: row.default for name, row in OPTIONS.items()} | dict(given)


def integer_option(name: str, value: Any) -> int:
    """Returns the checked value of an option that is an integer.

    Raises:
        InvalidRequest: It is out of the row's range.
    """
    row = OPTIONS[name]
    assert row.low is not None
    assert row.high is not None
    return integer(name, value, row.low, row.high)


def core_options(
    given: Mapping[str, Any], gpus: Sequence[_C.GpuOptions] = ()
) -> tuple[_C.EngineOptions, CacheSize]:
    """Returns the core's options of steps and memory, with the defaults of the device.

    Args:
        given: Options of `Engine`; None is the default. Others than those of steps and memory are
            ignored.
        gpus: The GPU of each rank; none for the CPU.

    Raises:
        InvalidRequest: One is out of range.
    """
    options, absent = _C.EngineOptions(), defaults(gpus)
    options.prefill_chunk, options.step_ms = absent.prefill_chunk, absent.step_ms
    options.warm_up = absent.warm_up
    for name in ("max_batch_size", "max_context_tokens", "cache_pages", "prefill_chunk"):
        if given.get(name) is not None:
            setattr(options, name, integer_option(name, given[name]))
    for name, expected in (
        ("step_ms", "a number of milliseconds above 0"),
        ("warm_up", "True, False or None"),
    ):
        if given.get(name) is not None:
            set_option(options, name, given[name], expected)
    set_option(options, "prefix_reuse", given.get("prefix_reuse", True), "True or False")
    if not 0 < options.step_ms < math.inf:
        raise wrong("step_ms", given["step_ms"], "a number of milliseconds above 0")
    return options, CacheSize(given.get("cache_memory"), absent)


def thread_count(threads: int | None) -> int:
    """Returns the number of threads that compute.

    Raises:
        InvalidRequest: It is out of range.
    """
    return physical_cores() if threads is None else integer_option("threads", threads)
