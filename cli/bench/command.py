"""`lmchat bench`: figures beside what this machine can do at best."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import typer

from lmchat.bundled import find_model
from turbomind.device import device_name
from turbomind.errors import InvalidRequest
from turbomind.machine import physical_cores

from ..options import Device, Json, Model, chosen_gpu, described, with_engine_options

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Source: TypeAlias = "str | os.PathLike[str]"
Report: TypeAlias = dict[str, Any]
Told: TypeAlias = tuple[Report, Callable[[Report], None]]
"""A report, and what shows it on a terminal."""

Config = Annotated[str | None, typer.Option(help="A config.json alone; needs --load-format dummy.")]

Folder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Where the pages go, in files that are removed again. [default: temporary files]",
    ),
]


def measuring(command: Callable[..., Told]) -> Callable[..., None]:
    """Gives a command MODEL or --config, --json, and the engine's options. It receives what to load
    as `source` and the options as `engine`; what it returns is told."""

    @functools.wraps(command)
    def wrapper(model: str | None, config: str | None, as_json: bool, **arguments: Any) -> None:
        source = _source(model, config, arguments["engine"])
        _tell(*command(source=source, **arguments), as_json)

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


def _tell(report: Report, show: Callable[[Report], None], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)


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
    """


@app.command(short_help="The ceilings of this machine.")
def ceilings(
    device: Device = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of the CPU. [default: the physical cores]")
    ] = None,
    isa: Annotated[
        str | None, typer.Option(help="Instruction set of the CPU. [default: the best]")
    ] = None,
    buffer: Annotated[int, typer.Option(min=1, help="MiB to stream through.")] = 1024,
    as_json: Json = False,
) -> None:
    """Measure the read bandwidth and the multiply rate that every other figure is divided by.

    On a GPU the rate is that of a large bfloat16 product.

    \b
    Examples:
      lmchat bench ceilings
      lmchat bench ceilings --device cpu --threads 1 --isa avx2 --json
    """
    from . import engine_bench

    given = {"device": device, "isa": isa}
    gpu = chosen_gpu({name: value for name, value in given.items() if value is not None})
    if gpu is not None and (threads is not None or isa is not None):
        raise InvalidRequest(
            f"--threads and --isa are of the CPU, device is '{device_name(gpu)}': add --device cpu"
        )
    found = engine_bench.ceilings(gpu, isa, threads, buffer << 20)
    _tell(dataclasses.asdict(found), lambda _: engine_bench.show_ceilings(found), as_json)


@app.command(short_help="Prefill and decode, beside the ceilings.")
@measuring
def engine(
    batch: Annotated[str, typer.Option(help="Batch sizes to decode with.")] = "1,8,16",
    context: Annotated[str, typer.Option(help="Tokens before the decoded ones.")] = "512",
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,2048",
    steps: Annotated[int, typer.Option(min=4, help="Decode steps of a round.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 5,
    products: Annotated[
        bool, typer.Option("--products", help="Also time the bare matrix products, on the CPU.")
    ] = False,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Told:
    """Measure prefill and decode, each with its fraction of a ceiling, and where the time goes.

    Prefill is divided by the multiply rate, decode by the read bandwidth: "of read" counts the
    weights and KV that each step must read, "weights" the weights alone. The hash is of the logits
    of fixed tokens: it changes when the arithmetic does. All of it is on --device, the ceilings
    too; a GPU's multiply rate is that of a large product.

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
    gpu = chosen_gpu(engine)
    if products and gpu is not None:
        raise InvalidRequest(f"--products: timed on the CPU alone, device is '{device_name(gpu)}'")
    info = described(source, engine)
    engine.pop("device", None)  # chosen
    plan.check(info.description.max_context)  # before anything takes its time
    return engine_bench.run(info, plan, engine, gpu), engine_bench.show


@app.command(short_help="Time to the first token, turn by turn and after a restart.")
@measuring
def turns(
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each turn adds.")] = 64,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each reply.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 3,
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of the past that is brought back from host memory, from disk and after a "
            "restart; 0: none of this. [default: the conversation's at its last turn]",
        ),
    ] = None,
    resumes: Annotated[
        int,
        typer.Option(min=0, help="More turns, behind shorter pasts, to try the predictions on."),
    ] = 0,
    folder: Folder = None,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Told:
    """Measure the time to the first token by turn: with the past kept, and computed again.

    Each turn of a conversation is timed on the session, whose keys and values stay, and right
    after it as a prompt of which nothing is there. "attention" is the profiler's time in the first,
    the one part that must grow with the past; "python" is templating and tokenising. A folder with
    a tokenizer is driven as a session, in words; a model without one in token ids.

    Then one turn behind --context tokens, by where its past is: on the device, in host memory, on
    disk with its files in the page cache and dropped from it, on disk after a restart (of the
    engine, and in a process of its own), nowhere. "bound" is KV bytes / 80 % of the disk's
    bandwidth (reads of 1 MiB of dropped files in the same folder, in the same round) + the time
    with the past kept. Ratios are of times of the same round.

    A round computes --context tokens twice and opens four engines: 8192 tokens of a 0.5B model on
    two cores take half a minute, and 100 resumes two minutes more.

    \b
    Examples:
      lmchat bench turns ./Qwen2.5-0.5B-Instruct
      lmchat bench turns ./Qwen2.5-0.5B-Instruct --turns 40 --new-tokens 32 --json
      lmchat bench turns --config config.json --load-format dummy --turns 2 --context 8192
    """
    from . import turns_bench

    plan = turns_bench.Plan(turns, new_tokens, reply_tokens, repeat, context, resumes, folder)
    return turns_bench.run(source, plan, engine), turns_bench.show


@app.command(short_help="More sessions than memory.")
@measuring
def pressure(
    seconds: Annotated[
        float, typer.Option(min=1, help="What a mode may take, loading the model aside.")
    ] = 180.0,
    oversubscribe: Annotated[
        float, typer.Option(min=1, help="Sessions' KV over the device's, at the start.")
    ] = 4.0,
    sessions: Annotated[
        int | None,
        typer.Option(min=2, help="Sessions. [default: what 30 % of --seconds fill, at most 64]"),
    ] = None,
    modes: Annotated[str, typer.Option(help="What is compared.")] = "tiers,none,lru",
    tiers: Annotated[
        str, typer.Option(help="Below the device: disk, host, or host,disk.")
    ] = "disk",
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Lengths and arrivals: CSV of TIMESTAMP,ContextTokens,GeneratedTokens, may be "
            ".xz, .gz or .bz2. [default: log-normal lengths, random arrivals]",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Turns per second. [default: --load of the tiered mode's]"),
    ] = None,
    load: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=1,
            help="Share of the turns per second that the tiered mode took in its warm-up.",
        ),
    ] = 0.6,
    history: Annotated[
        int, typer.Option(min=16, help="Longest past that a session begins with.")
    ] = 4096,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and tokens.")] = 0,
    plot: Annotated[
        str | None, typer.Option(metavar="PNG", help="Draw the times; needs matplotlib.")
    ] = None,
    folder: Folder = None,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Told:
    """Measure the time to the first token with more sessions than the device has memory for.

    Sessions begin with pasts of the lengths in the trace. Then turns arrive, open loop, with the
    trace's gaps, scaled to --rate; each is the next one of a session drawn at random. Its new
    message is of log-normal length (median 32 tokens: traces do not tell), its reply as in the
    trace, cut at --reply-tokens. The sessions, arrivals and tokens are the same in all modes:

    \b
    tiers  pages that leave the device are below it, and come back from there
    none   sessions stay open as with tiers, what left the device is computed again
    lru    plain LRU, as an automatic prefix cache: no session holds pages between
           turns, all pages are worth the same, the least recently used leaves
           first; what left is computed again

    The time to the first token counts from a turn's arrival. A turn that has none when a mode's
    time is up counts with what it had waited. Of --seconds, up to 30 % fill the sessions, 50 % have
    arrivals. The size of the device's cache follows from --oversubscribe; longer pasts than it
    can hold are cut.

    \b
    Examples:
      lmchat bench pressure ./Qwen2.5-0.5B-Instruct --trace conv.csv.xz --plot ttft.png
      lmchat bench pressure --config config.json --load-format dummy --seconds 60 --json
    """
    from . import memory_pressure_bench, memory_pressure_view

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
        raise InvalidRequest("--cache-memory: it follows from --oversubscribe here, leave it out")
    if plot is not None:
        memory_pressure_view.check_plot(plot)
    report = memory_pressure_bench.run(source, plan, engine)
    if plot is not None:
        memory_pressure_view.plot(report, plot)
    return report, memory_pressure_view.show


@app.command(short_help="Fork, undo and edit of a long session.")
@measuring
def verbs(
    context: Annotated[int, typer.Option(min=64, help="Tokens of the session.")] = 8192,
    samples: Annotated[int, typer.Option(min=2, help="Of each verb; medians are shown.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the turns that are chosen.")] = 0,
    folder: Folder = None,
    *,
    source: Source,
    engine: dict[str, Any],
) -> Told:
    """Measure fork, undo and edit at random turns of a long session, before a token is computed.

    The session is on disk. Each time is put beside that of an fsync in the same folder, measured in
    the same run. Questions have all lengths, so turns begin anywhere in a page. "in the engine": a
    fork that is cut at any token and continued, and the pages that were copied for it. A
    config.json alone speaks with the tokenizer of the model that ships.

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
    """What to load: MODEL or --config, exactly one of them."""
    if (model is None) == (config is None):
        raise InvalidRequest("expected either MODEL or --config")
    if config is None:
        return find_model(model)
    if engine.get("load_format") != "dummy":
        raise InvalidRequest(
            "--config: a config.json alone has no weights, add --load-format dummy"
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
