"""The command `lmchat bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lmchat.errors import InvalidRequest

from ...errors import INTERRUPTED, note
from ...options import Json
from .plan import Plan, api_key, parse_rates


def serve(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", help="The server, such as http://127.0.0.1:23333, with or without /v1."
        ),
    ] = None,
    rates: Annotated[
        str, typer.Option(help="Turns per second to measure, with commas between.")
    ] = "1",
    duration: Annotated[
        float, typer.Option(min=1, help="Seconds that are measured at each rate.")
    ] = 60.0,
    warmup: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of load before these. [default: 10; for conversations the time of "
            "one more, with 0.05 s per token of a reply]",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="End a rate early after this many measured turns. [default: never]"
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 1,
    think: Annotated[
        float,
        typer.Option(min=0, help="Mean seconds from a reply to the next turn; exponential."),
    ] = 10.0,
    sessions: Annotated[
        bool,
        typer.Option(
            "--sessions",
            help="Send only the new message, and select the server's session with the header "
            "x-session-id. [default: each turn sends its history]",
        ),
    ] = False,
    arrivals: Annotated[
        str, typer.Option(help="poisson, or trace: the intervals of --trace, scaled to the rate.")
    ] = "poisson",
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Lengths of prompts and replies: CSV of TIMESTAMP,ContextTokens,GeneratedTokens, "
            "plain or .xz, .gz, .bz2.",
        ),
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Lengths of messages: JSON lines with texts in "turns", as MT-bench has.',
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="tokenizer.json that counts the tokens of --questions. [default: the server]",
        ),
    ] = None,
    message_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of each message. [default: log-normal with median 32, at most 256]",
        ),
    ] = None,
    reply_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each reply. [default: the trace's, else 128]"),
    ] = None,
    longest_message: Annotated[
        int | None, typer.Option(min=1, help="Cut longer messages. [default: no limit]")
    ] = None,
    longest_reply: Annotated[
        int | None, typer.Option(min=1, help="Cut longer replies. [default: no limit]")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="The route: chat or completions.")] = "chat",
    model: Annotated[
        str | None, typer.Option(help="The model. [default: the first that the server lists]")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=-1, help="Sampling temperature; -1: the server's default.")
    ] = 0.0,
    key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="API key. [default: $LMCHAT_API_KEY, else $OPENAI_API_KEY]",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a turn has failed.")
    ] = 120.0,
    ttft_limit: Annotated[
        float, typer.Option(min=0, help="Highest TTFT of the goodput, in seconds.")
    ] = 1.0,
    tpot_limit: Annotated[
        float, typer.Option(min=0, help="Highest TPOT of the goodput, in seconds.")
    ] = 0.15,
    null_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds of the measurement of the client alone; 0: none."),
    ] = 5.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of arrivals, lengths and think times.")
    ] = 0,
    text_seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the texts. [default: random, so that the server has none of them cached]",
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the object of --json to a file."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="PNG", help="Plot TTFT, TPOT and goodput; needs matplotlib."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this server in the picture. [default: its URL]")
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Also plot a report of --save or --json; repeatable. Without URL: only these.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure an OpenAI-compatible HTTP server under an open-loop load, at each of several rates.

    Conversations arrive at random (a Poisson process) or as in a trace, whether or not earlier ones
    are answered, at --rates / --turns per second. Each further turn follows the reply before it
    after a think time. A turn that is refused (429) or fails is not repeated; its conversation goes
    on. Messages are random words, as many as have the wanted number of tokens by the server's
    /tokenize, else by its usage. Replies have a fixed length where the server takes ignore_eos.

    The table has time to first token (TTFT), time per output token after it (TPOT), inter-token
    latency (ITL) and total time; throughput; turns that finished, were refused and failed; and the
    goodput: the output tokens per second of the turns that kept both limits. The capacity is the
    highest rate at which 97 % of the turns finish. Times count from when a turn was due.

    The client's own share is measured: how late its event loop woke during the run ("lag"), and
    what it adds to latencies under the same streams from a server that computes nothing.

    \b
    Examples:
      lmchat bench serve http://127.0.0.1:23333 --rates 0.5,1,2 --plot serving.png
      lmchat bench serve http://127.0.0.1:23333 --turns 6 --sessions --save ours.json
      lmchat bench serve http://127.0.0.1:8000/v1 --trace conv.csv.xz --arrivals trace
      lmchat bench serve --compare ours=ours.json --compare theirs=theirs.json --plot both.png
    """
    from .. import plots
    from . import serve_bench, serve_plot, serve_view

    if plot is not None:
        plots.check_plot(plot)
    elif compare or name is not None:
        raise InvalidRequest("--compare and --name are of the picture: expected --plot with them")
    reports = serve_plot.read_reports(compare or [])
    if url is None:
        if plot is None or not reports or save is not None:
            raise InvalidRequest("URL is missing, expected one, or only --plot with --compare")
        serve_plot.plot(reports, plot)
        return
    if save is not None and not Path(save).absolute().parent.is_dir():
        raise InvalidRequest(f"--save is {save!r}, expected it in a folder that exists")
    plan = Plan(
        url=url,
        rates=parse_rates(rates),
        duration=duration,
        warmup=warmup,
        requests=requests,
        turns=turns,
        think=think,
        sessions=sessions,
        arrivals=arrivals,
        trace=trace,
        questions=questions,
        tokenizer=tokenizer,
        message_tokens=message_tokens,
        reply_tokens=reply_tokens,
        longest_message=longest_message,
        longest_reply=longest_reply,
        endpoint=endpoint,
        model=model,
        temperature=None if temperature == -1 else temperature,
        timeout=timeout,
        ttft_limit=ttft_limit,
        tpot_limit=tpot_limit,
        null_seconds=null_seconds,
        seed=seed,
        text_seed=text_seed,
    )
    report = serve_bench.run(plan, api_key(key), note)
    if save is not None:
        Path(save).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        serve_plot.plot({**reports, name or url: report}, plot)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        serve_view.show(report)
    if report["interrupted"]:
        raise typer.Exit(INTERRUPTED)
