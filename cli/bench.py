"""`lmchat bench`: figures beside what this machine can do at best."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Annotated, Any

import typer

from lmchat.bundled import find_model
from turbomind import _C
from turbomind.errors import InvalidRequest
from turbomind.loader import describe
from turbomind.machine import physical_cores

from .options import Json, Model, with_engine_options

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Config = Annotated[str | None, typer.Option(help="A config.json alone; needs --load-format dummy.")]


@app.callback()
def _root() -> None:
    """Measure the machine's ceilings, and the engine against them.

    \b
    Examples:
      lmchat bench ceilings
      lmchat bench engine ./Qwen2.5-0.5B-Instruct
      lmchat bench turns ./Qwen2.5-0.5B-Instruct --json
    """


@app.command(short_help="The ceilings of this machine.")
def ceilings(
    threads: Annotated[
        int | None, typer.Option(min=1, help="[default: the physical cores]")
    ] = None,
    isa: Annotated[str, typer.Option(help="Instruction set.")] = "auto",
    buffer: Annotated[int, typer.Option(min=1, help="MiB to stream through.")] = 1024,
    as_json: Json = False,
) -> None:
    """Measure the read bandwidth and the multiply rate that every other figure is divided by.

    \b
    Examples:
      lmchat bench ceilings
      lmchat bench ceilings --threads 1 --isa avx2 --json
    """
    from . import engine_bench, measure

    found = measure.measure_ceilings(_C.resolve_isa(isa), threads or physical_cores(), buffer << 20)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        engine_bench.show_ceilings(found)


@app.command(short_help="Prefill and decode, beside the ceilings.")
@with_engine_options
def engine(
    model: Model = None,
    config: Config = None,
    batch: Annotated[str, typer.Option(help="Batch sizes to decode with.")] = "1,8,16",
    context: Annotated[str, typer.Option(help="Tokens before the decoded ones.")] = "512",
    prefill: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,2048",
    steps: Annotated[int, typer.Option(min=4, help="Decode steps of a round.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 5,
    products: Annotated[
        bool, typer.Option("--products", help="Also time the bare matrix products.")
    ] = False,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure prefill and decode, each with its fraction of a ceiling, and where the time goes.

    Prefill is divided by the multiply rate, decode by the read bandwidth: "of read" counts the
    weights and KV that each step must read, "weights" the weights alone. The hash is of the logits
    of fixed tokens: it changes when the arithmetic does.

    \b
    Examples:
      lmchat bench engine ./Qwen2.5-0.5B-Instruct
      lmchat bench engine --config config.json --load-format dummy --batch 1,16 --json
    """
    from . import engine_bench

    source = _source(model, config, engine)
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
    info = describe(
        source,
        **{k: v for k, v in engine.items() if k in ("dtype", "kv_dtype", "rope_length")},
    )
    plan.check(info.description.max_context)  # before anything takes its time
    report = engine_bench.run(info, plan, engine)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        engine_bench.show(report)


@app.command(short_help="Time to the first token, turn by turn.")
@with_engine_options
def turns(
    model: Model = None,
    config: Config = None,
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each turn adds.")] = 64,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each reply.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 3,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure the time to the first token by turn: with the past kept, and computed again.

    Each turn of a conversation is timed on the session, whose keys and values stay, and right
    after it as a prompt of which nothing is there. "attention" is the profiler's time in the first,
    the one part that must grow with the past; "python" is templating and tokenising. A folder with
    a tokenizer is driven as a session, in words; a model without one in token ids.

    \b
    Examples:
      lmchat bench turns ./Qwen2.5-0.5B-Instruct
      lmchat bench turns ./Qwen2.5-0.5B-Instruct --turns 40 --new-tokens 32 --json
      lmchat bench turns --config config.json --load-format dummy --repeat 1
    """
    from . import turns_bench

    plan = turns_bench.Plan(turns, new_tokens, reply_tokens, repeat)
    report = turns_bench.run(_source(model, config, engine), plan, engine)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        turns_bench.show(report)


def _source(
    model: str | None, config: str | None, engine: dict[str, Any]
) -> str | os.PathLike[str]:
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
