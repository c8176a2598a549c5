"""`lmchat bench`: measurements beside the ceilings of this machine."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import typer

import turbomind
from lmchat.bundled import find_model
from turbomind.config.device import device_name, gpu_options
from turbomind.errors import InvalidRequest
from turbomind.machine import physical_cores

from ..command_group import CommandGroup
from ..options import (
    LOADING,
    Device,
    Json,
    Model,
    with_engine_options,
)
from .serving.command import serve

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

Source: TypeAlias = "str | os.PathLike[str]"
Report: TypeAlias = dict[str, Any]
Result: TypeAlias = tuple[Report, Callable[[Report], None]]
"""A JSON-able report, and the function that prints it as text."""

Config = Annotated[
    str | None, typer.Option(help="A config.json instead of a model; needs --load-format dummy.")
]

Folder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder for temporary KV page files. [default: the system's temporary folder]",
    ),
]


def measuring(command: Callable[..., Result]) -> Callable[..., None]:
    """Adds MODEL, --config, --json and the engine options to a command, and prints its result.

    The command receives the model or the config.json as `source` and the options as `engine`.
    """

    @functools.wraps(command)
    def wrapper(model: str | None, config: str | None, as_json: bool, **arguments: Any) -> None:
        source = _source(model, config, arguments["engine"])
        _print(*command(source=source, **arguments), as_json)

    def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)

    own = inspect.signature(command, eval_str=True).parameters
    parameters = [
        parameter("model", Model, None),
        parameter("config", Config, None),
        *(p.replace(kind=p.KEYWORD_ONLY) for name, p in own.items() if name != "source"),
        parameter("as_json", Json, False),
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_engine_options(wrapper)


def _print(report: Report, show: Callable[[Report], None], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)


app.command("serve", short_help="Measure an HTTP server under load.")(serve)


@app.callback()
def _root() -> None:
    """Measure the machine's ceilings, and the engine against them.

    \b
    Examples:
      lmchat bench ceilings
      lmchat bench engine ./Qwen2.5-0.5B-Instruct
      lmchat bench turns ./Qwen2.5-0.5B-Instruct --json
      lmchat bench verbs memo --context 1500
      lmchat bench pressure --config config.json --load-format dummy --plot ttft.png
      lmchat bench serve http://127.0.0.1:23333 --rates 0.5,1,2
    """


@app.command(short_help="Measure the ceilings of this machine.")
def ceilings(
    device: Device = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: the physical cores]")
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="CPU instruction set. [default: the best supported one]")
    ] = None,
    buffer: Annotated[int, typer.Option(min=1, help="Size of the streamed buffer, in MiB.")] = 1024,
    as_json: Json = False,
) -> None:
    """Measure the read bandwidth and the multiply rate, the ceilings of all other benchmarks.

    On a GPU the multiply rate is that of a large bfloat16 matrix product.

    \b
    Examples:
      lmchat bench ceilings
      lmchat bench ceilings --device cpu --threads 1 --isa avx2 --json
    """
    from . import engine_bench

    given = {"device": device, "isa": isa}
    gpus = gpu_options(**{name: value for name, value in given.items() if value is not None})
    if gpus and (threads is not None or isa is not None):
        raise InvalidRequest(
            f"--threads and --isa are CPU options, device is '{device_name(gpus)}': "
            "add --device cpu"
        )
    found = engine_bench.ceilings(gpus, isa, threads, buffer << 20)
    _print(dataclasses.asdict(found), lambda _: engine_bench.show_ceilings(found), as_json)


@app.command(short_help="Measure prefill and decode against the ceilings.")
@measuring
def engine(
    batch: Annotated[str, typer.Option(help="Batch sizes to decode with.")] = "1,8,16",
    context: Annotated[str, typer.Option(help="Context lengths, in tokens.")] = "512",
    prefill: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "512,2048",
    steps: Annotated[int, typer.Option(min=4, help="Decode steps per round.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    products: Annotated[
        bool, typer.Option("--products", help="Also time the matrix products alone (CPU only).")
    ] = False,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Result:
    """Measure prefill and decode as fractions of the ceilings, and the time of each op.

    Prefill is compared with the multiply rate, decode with the read bandwidth: "of read" counts the
    weights and the KV that each step must read, "weights" only the weights. The logits hash of
    fixed tokens changes when the arithmetic changes. The ceilings are measured on the same device;
    a GPU's multiply rate is that of a large matrix product.

    \b
    Examples:
      lmchat bench engine ./Qwen2.5-0.5B-Instruct
      lmchat bench engine --config config.json --load-format dummy --batch 1,16 --json
    """
    from . import engine_bench

    plan = engine_bench.Plan(
        batches=_numbers("batch", batch),
        contexts=_numbers("context", context),
        prefills=_numbers("prefill", prefill),
        steps=steps,
        repeat=repeat,
        products=products,
    )
    engine.setdefault("threads", physical_cores())
    engine.setdefault("max_batch_size", max([*plan.batches, 1]))
    made = turbomind.plan(source, **engine)
    if products and made.gpus:
        raise InvalidRequest(f"--products are measured on the CPU only, device is '{made.device}'")
    engine.pop("device", None)  # chosen
    plan.check(made.model.description.max_context)  # before the slow part
    return engine_bench.run(made.model, plan, engine, made.gpus), engine_bench.show


def _loading(command: Callable[..., None]) -> Callable[..., None]:
    return with_engine_options(command, LOADING)


@app.command(short_help="Measure how fast weights are loaded, and in how much memory.")
@_loading
def load(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or GGUF file.")],
    repeat: Annotated[
        int, typer.Option(min=1, help="Rounds; of times the median is reported.")
    ] = 3,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure how fast weights are read and packed, and the most memory that takes.

    The files are read once before, so that they are in the page cache as far as they fit. The speed
    is that of the files' bytes: by the clock, and by the processor time of all threads, which is
    the speed of one core. The peak is anonymous memory above that of the process before.

    \b
    Examples:
      lmchat bench load ./Qwen3-8B-Q4_K_M.gguf
      lmchat bench load ./Qwen3-8B-AWQ --threads 1 --json
    """
    from . import load_bench

    report = load_bench.run(model, engine, repeat)
    _print(report, load_bench.show, as_json)


@app.command(short_help="Measure the TTFT turn by turn and after a restart.")
@measuring
def turns(
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each question.")] = 64,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each reply.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 3,
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of the context that is restored from host memory, from disk and after a "
            "restart; 0: skip this part. [default: the context of the last turn]",
        ),
    ] = None,
    resumes: Annotated[
        int,
        typer.Option(min=0, help="Turns after shorter contexts, to check the TTFT predictions."),
    ] = 0,
    folder: Folder = None,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Result:
    """Measure the time to first token (TTFT) of each turn, with cached and with recomputed context.

    Each turn of a conversation is timed on a session whose KV cache stays on the device, and then
    as a prompt without any cached prefix. "attention" is the time of attention in the former, the
    only part that must grow with the context; "python" is templating and tokenization. A model
    with a tokenizer is measured as a session with text, a model without one with token ids.

    Then one turn after --context tokens is measured for each place of their KV cache: device, host
    memory, disk (with files in and out of the operating system's page cache), disk after a restart
    (in the same process and in a new one), nowhere. "bound" is KV bytes / 80 % of the disk
    bandwidth, measured in the same round with 1 MiB reads in the same folder, plus the TTFT with
    the KV cache on the device. Ratios compare times of the same round.

    A round computes --context tokens twice and opens four engines: 8192 tokens of a 0.5B model on
    two cores take half a minute, and 100 resumes two more minutes.

    \b
    Examples:
      lmchat bench turns ./Qwen2.5-0.5B-Instruct
      lmchat bench turns ./Qwen2.5-0.5B-Instruct --turns 40 --new-tokens 32 --json
      lmchat bench turns --config config.json --load-format dummy --turns 2 --context 8192
    """
    from . import turns_bench

    plan = turns_bench.Plan(turns, new_tokens, reply_tokens, repeat, context, resumes, folder)
    return turns_bench.run(source, plan, engine), turns_bench.show


@app.command(short_help="Measure more sessions than fit in memory.")
@measuring
def pressure(
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of a mode, without loading the model.")
    ] = 180.0,
    oversubscribe: Annotated[
        float,
        typer.Option(min=1, help="KV of all sessions / KV capacity of the device, at the start."),
    ] = 4.0,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of sessions. [default: as many as 30 % of --seconds prefill, at most 64]",
        ),
    ] = None,
    modes: Annotated[str, typer.Option(help="Modes to compare.")] = "tiers,none,lru",
    tiers: Annotated[str, typer.Option(help="Lower tiers: disk, host, or host,disk.")] = "disk",
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Trace of lengths and arrivals: CSV of "
            "TIMESTAMP,ContextTokens,GeneratedTokens, plain or "
            ".xz, .gz, .bz2. [default: log-normal lengths, random arrivals]",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Turns per second. [default: --load times the warm-up rate]"),
    ] = None,
    load: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=1,
            help="Arrival rate as a fraction of the tiered mode's rate in the warm-up.",
        ),
    ] = 0.6,
    history: Annotated[
        int, typer.Option(min=16, help="Longest initial context of a session, in tokens.")
    ] = 4096,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Longest reply, in tokens.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, arrivals and tokens.")] = 0,
    plot: Annotated[
        str | None, typer.Option(metavar="PNG", help="Write a plot of the times; needs matplotlib.")
    ] = None,
    folder: Folder = None,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Result:
    """Measure the TTFT with more sessions than fit in the memory of the device.

    Sessions start with contexts of the lengths in the trace. Then turns arrive in an open loop, at
    the intervals of the trace scaled to --rate; each belongs to a session chosen at random. The
    length of its message is log-normal (median 32 tokens: traces lack it), its reply is that of
    the trace, cut at --reply-tokens. Sessions, arrivals and tokens are the same in all modes:

    \b
    tiers  pages evicted from the device are loaded from lower tiers
    none   as tiers, but evicted pages are computed again
    lru    an automatic prefix cache: no session holds pages between turns, all pages
           have the same retention priority, the least recently used one is evicted
           first, and evicted pages are computed again

    The TTFT counts from the arrival of a turn. A turn without a token at the end of a mode counts
    with its waiting time. Of --seconds, up to 30 % prefill the sessions and 50 % have arrivals. The
    size of the KV cache follows from --oversubscribe; longer contexts than it can hold are cut.

    \b
    Examples:
      lmchat bench pressure ./Qwen2.5-0.5B-Instruct --trace conv.csv.xz --plot ttft.png
      lmchat bench pressure --config config.json --load-format dummy --seconds 60 --json
    """
    from . import memory_pressure_bench, memory_pressure_view, plots

    plan = memory_pressure_bench.Plan(
        modes=_names(modes),
        tiers=_names(tiers),
        oversubscribe=oversubscribe,
        seconds=seconds,
        sessions=sessions,
        rate=rate,
        load=load,
        history=history,
        reply=reply_tokens,
        trace=trace,
        seed=seed,
        folder=folder,
    )
    if "cache_memory" in engine:
        raise InvalidRequest(
            "--cache-memory is given, but it follows from --oversubscribe: leave it out"
        )
    if plot is not None:
        plots.check_plot(plot)
    report = memory_pressure_bench.run(source, plan, engine)
    if plot is not None:
        memory_pressure_view.plot(report, plot)
    return report, memory_pressure_view.show


@app.command(short_help="Measure fork, undo and edit of a long session.")
@measuring
def verbs(
    context: Annotated[int, typer.Option(min=64, help="Tokens of the session.")] = 8192,
    samples: Annotated[
        int, typer.Option(min=2, help="Samples per operation; the median is reported.")
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the chosen turns.")] = 0,
    folder: Folder = None,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Result:
    """Measure fork, undo and edit at random turns of a long session, until prefill starts.

    The session is on disk. Each time is compared with that of an fsync in the same folder and run.
    Questions have random lengths, so that turns start anywhere in a KV page. "in the engine" is a
    fork truncated at any token and continued, with the pages copied for it. A config.json uses the
    tokenizer of the model that ships with lmchat.

    8192 tokens of a 0.5B model on two cores take a minute.

    \b
    Examples:
      lmchat bench verbs ./Qwen2.5-0.5B-Instruct
      lmchat bench verbs --config config.json --load-format dummy --samples 50 --json
    """
    from . import verbs_bench

    plan = verbs_bench.Plan(context, samples, seed, folder)
    return verbs_bench.run(source, plan, engine), verbs_bench.show


def _source(model: str | None, config: str | None, engine: dict[str, Any]) -> Source:
    """Returns the model or the config.json to load; exactly one of them is given."""
    if (model is None) == (config is None):
        raise InvalidRequest("expected either MODEL or --config")
    if config is None:
        return find_model(model)
    if engine.get("load_format") != "dummy":
        raise InvalidRequest(
            "--config names a config.json without weights: add --load-format dummy"
        )
    return config


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if not all(number > 0 for number in numbers):
        raise InvalidRequest(f"--{name} is {text!r}, expected positive numbers with commas between")
    return numbers


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
