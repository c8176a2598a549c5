"""The engine's options as command-line options, shared by every command that opens an engine."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from turbomind import _C
from turbomind.device import gpu_options
from turbomind.loading.loader import ModelInfo, describe

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model folder or a hub name; memo: the small model that ships with lmchat.",
    ),
]


def _remember(context: typer.Context, value: bool) -> bool:
    context.ensure_object(dict)["json"] = value
    return value


Json = Annotated[
    bool, typer.Option("--json", callback=_remember, help="Print one JSON object instead.")
]
"""Noted in the context's object too, so that an error can be an object as well."""

Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:1, ... [default: auto: $TURBOMIND_DEVICE, or else a GPU that "
        "works]",
    ),
]

ENGINE_OPTIONS: dict[str, Any] = {
    "device": Device,
    "deterministic": Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--fast",
            help="On a GPU: replies that do not depend, in the last bits, on what else it computes."
            " [default: $TURBOMIND_DETERMINISTIC, or else fast]",
        ),
    ],
    "dtype": Annotated[
        str | None,
        typer.Option(help="Weights: auto, bfloat16, float16 or float32. [default: auto]"),
    ],
    "kv_dtype": Annotated[
        str | None, typer.Option(help="KV cache: auto, bfloat16 or float32. [default: auto]")
    ],
    "threads": Annotated[
        int | None, typer.Option(help="Threads of the engine. [default: the physical cores]")
    ],
    "isa": Annotated[
        str | None,
        typer.Option(help="Instruction set. [default: $TURBOMIND_ISA or the best one here]"),
    ],
    "cache_memory": Annotated[
        str | None,
        typer.Option(
            help="Memory for the KV cache, such as 4GiB, or a share of what is free, such as 80%. "
            "[default: 2GiB; on a GPU 90%]"
        ),
    ],
    "max_context_tokens": Annotated[
        int | None, typer.Option(help="Longest sequence. [default: the model's]")
    ],
    "prefill_chunk": Annotated[
        int | None,
        typer.Option(help="Most prompt tokens in one step. [default: 512; on a GPU 2048]"),
    ],
    "step_ms": Annotated[
        float | None,
        typer.Option(help="Target time of a step while others decode. [default: 100; on a GPU 25]"),
    ],
    "load_format": Annotated[
        str | None, typer.Option(help="auto, or dummy: random weights. [default: auto]")
    ],
    "rope_length": Annotated[
        int | None, typer.Option(help="Length that dynamic rope scaling is fixed at.")
    ],
}
"""Option name as `turbomind.Engine` spells it -> annotation. None means the engine's default."""


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options above; it receives those that were given as the dict `engine`."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in ENGINE_OPTIONS}
        command(**arguments, engine={k: v for k, v in given.items() if v is not None})

    own = inspect.signature(command, eval_str=True).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ENGINE_OPTIONS.items()
    ]
    parameters = [p for p in own if p.name != "engine"] + added
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def described(
    model: str | os.PathLike[str], engine: Mapping[str, Any], weights: bool = True
) -> ModelInfo:
    """The model as an engine with these options has it, on its device."""
    given = _given(engine, "dtype", "kv_dtype", "rope_length")
    return describe(model, **given, weights=weights, gpu=chosen_gpu(engine) is not None)


def chosen_gpu(engine: Mapping[str, Any]) -> _C.GpuOptions | None:
    """The GPU that an engine with these options computes on; None: the CPU."""
    return gpu_options(**_given(engine, "device", "deterministic", "isa", "dtype", "kv_dtype"))


def _given(engine: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: engine[name] for name in names if name in engine}
