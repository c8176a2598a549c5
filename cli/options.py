"""Engine options of the command line, shared by all commands that open an engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer

from turbomind.engine.tiers import parse_quota

Result = TypeVar("Result")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Model folder, GGUF file or hub name; memo: the small model that ships with lmchat.",
    ),
]


def _remember(context: typer.Context, value: bool) -> bool:
    context.ensure_object(dict)["json"] = value
    return value


Json = Annotated[bool, typer.Option("--json", callback=_remember, help="Print one JSON object.")]
"""The option is also stored in the typer context, so that errors can be printed as JSON."""

Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="auto, cpu, cuda, cuda:N, or the GPU of each rank: cuda:0,1. auto: "
        "$TURBOMIND_DEVICE, else GPUs that work, else the CPU. "
        "[default: auto]",
    ),
]

Quantize = Annotated[
    str | None,
    typer.Option(
        help="Quantize the weights while loading, on the CPU: int8, int4, or none. [default: none]"
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        help="With --quantize, the head's format: int8, int4 or keep. [default: int8] Of a "
        "quantized checkpoint with a 16-bit head: int8."
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Of --quantize int4, inputs per scale: 32, 64 or 128. [default: 128]"),
]

Tp = Annotated[
    int | None,
    typer.Option(
        help="Tensor parallelism: ranks that the model is cut over, each on a GPU or with a part "
        "of the CPU's threads. [default: "
        "$TURBOMIND_TP, else the number of GPUs of --device, else 1]"
    ),
]


def _checked_quota(value: str | None) -> str | None:
    if value is not None:
        parse_quota("--disk-quota", value)
    return value


DiskQuota = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=_checked_quota,
        help="Most KV on disk: a size such as 20GiB, none, or auto: a tenth of what is free or KV "
        "already, at least 1GiB, and 5GiB or 5% of the disk stay free. [default: auto]",
    ),
]

ENGINE_OPTIONS: dict[str, Any] = {
    "device": Device,
    "tp": Tp,
    "deterministic": Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--fast",
            help="On a GPU: bit-identical replies, whatever else is in the batch. [default: "
            "$TURBOMIND_DETERMINISTIC, else fast]",
        ),
    ],
    "dtype": Annotated[
        str | None,
        typer.Option(
            help="Data type of the weights: auto, bfloat16, float16 or float32. [default: auto]"
        ),
    ],
    "quantize": Quantize,
    "head": Head,
    "group_size": GroupSize,
    "kv_dtype": Annotated[
        str | None,
        typer.Option(
            help="Data type of the KV cache: auto, bfloat16, float16 or float32. [default: auto]"
        ),
    ],
    "threads": Annotated[
        int | None, typer.Option(help="CPU threads. [default: the physical cores]")
    ],
    "isa": Annotated[
        str | None,
        typer.Option(
            help="CPU instruction set. [default: $TURBOMIND_ISA, else the best supported one]"
        ),
    ],
    "cache_memory": Annotated[
        str | None,
        typer.Option(
            help="Memory of the KV cache: a size such as 4GiB or a share of free memory such "
            "as 80%. "
            "[default: 2GiB, at most 80% of what is free; on a GPU 90%]"
        ),
    ],
    "max_context_tokens": Annotated[
        int | None, typer.Option(help="Longest sequence, in tokens. [default: the model's]")
    ],
    "prefill_chunk": Annotated[
        int | None,
        typer.Option(help="Prompt tokens per step, at most. [default: 512; on a GPU 2048]"),
    ],
    "step_ms": Annotated[
        float | None,
        typer.Option(
            help="Target step time in ms while other sequences decode. [default: 100; on a GPU 25]"
        ),
    ],
    "load_format": Annotated[
        str | None, typer.Option(help="auto, or dummy for random weights. [default: auto]")
    ],
    "rope_length": Annotated[
        int | None, typer.Option(help="Sequence length assumed by dynamic and longrope scaling.")
    ],
}
"""Name of the option in `turbomind.Engine` -> annotation. None means the engine's default."""


LOADING = ("device", "tp", "dtype", "quantize", "head", "group_size", "threads", "isa")
"""Those of the options that loading depends on."""


def with_engine_options(
    command: Callable[..., Result], names: Collection[str] = ENGINE_OPTIONS
) -> Callable[..., Result]:
    """Adds options of the names to a command, which gets those that are given as `engine`."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> Result:
        given = {name: arguments.pop(name) for name in names}
        return command(**arguments, engine={k: v for k, v in given.items() if v is not None})

    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ENGINE_OPTIONS[name]
        )
        for name in names
    ]
    parameters = [p for p in own if p.name != "engine"] + added
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper
