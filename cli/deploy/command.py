"""`lmchat deploy`: starts a deployment, shows its status, ends it."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from lmchat.errors import InvalidRequest

from ..options import Json
from ..output import drop_unread_output, say
from ..serve.command import Serving, checked
from ..serve.options import example
from ..web import check_page, usage

if TYPE_CHECKING:
    from lmchat.deploy.placement import Place

_COLUMNS = ("replica", "pid", "state", "device", "restarts", "running")
_ALONE = ("uds", "api_key")
"""Options of `serve` that a deployment does not have: replicas listen on Unix sockets of their own,
and the keys in a command line are seen in the list of processes."""


class Printed(str, enum.Enum):
    """What is printed instead of a start."""

    HAPROXY = "haproxy"
    SYSTEMD = "systemd"


class _StartByDefault(typer.core.TyperGroup):
    """A group in which `deploy MODEL` is `deploy start MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_StartByDefault, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _root() -> None:
    """Serve a model by several processes at one address, with one set of sessions.

    lmchat deploy MODEL is lmchat deploy start MODEL. A folder that is named like a command is
    written ./status.

    \b
    Examples:
      lmchat deploy Qwen/Qwen2.5-0.5B-Instruct --replicas 2
      lmchat deploy status
      lmchat deploy restart
      lmchat deploy stop
    """


def _with_serve_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `lmchat serve`; those that are given arrive as `options`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    served = inspect.signature(checked).parameters.values()
    model, *others = [one for one in served if one.name not in _ALONE]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (model, *own, *others)]

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        command(**arguments)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


@app.command("start")
@_with_serve_options
def start(
    context: typer.Context,
    replicas: Annotated[
        int,
        typer.Option(
            metavar="R", help="Processes that serve the model, each on cores or GPUs of its own."
        ),
    ],
    web: Annotated[
        bool, typer.Option("--web", help="Also serve the chat page of lmchat web.")
    ] = False,
    start_seconds: Annotated[
        float,
        typer.Option(help="Time in which a replica has to be ready, or it is started again."),
    ] = 3600.0,
    print_: Annotated[
        Printed | None,
        typer.Option(
            "--print",
            help="Print HAProxy's configuration, or a script that writes units of systemd, and "
            "start nothing.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Start replicas of lmchat serve behind HAProxy, and serve until a signal.

    Replicas share the data directory: each session stays with one replica and moves to another
    without loss when that one ends. A replica that ends is started again. Options are those of
    lmchat serve and hold for each replica; the memory of all replicas together is checked.

    It needs HAProxy 2.6 or newer: the system's, or pip install 'lmchat[deploy]'.

    \b
    Examples:
      lmchat deploy memo --replicas 2
      lmchat deploy ./model --replicas 4 --host 0.0.0.0 --api-keys keys.txt
      lmchat deploy ./model --replicas 2 --web
      lmchat deploy ./model --replicas 2 --print systemd > units.sh
    """
    from lmchat.deploy.placement import places

    serving = checked(**options, uds=None, api_key=None)
    if web:
        check_page(serving.host, serving.config.keys)
    if not start_seconds > 0:
        raise InvalidRequest(f"--start-seconds is {start_seconds}, expected more than 0")
    found = places(replicas, serving.model, serving.options)
    program = [sys.executable, "-m", "lmchat.cli"]
    arguments = [*program, "web" if web else "serve", *_given(context)]
    if print_ is None:
        _run(serving, found, arguments, web, start_seconds)
    else:
        from lmchat.deploy.printed import printed

        address, config = (serving.host, serving.port), serving.config
        page = _page_paths(web)
        text = printed(print_.value, found, arguments, *address, config, page, start_seconds)
        typer.echo(text)


def _page_paths(web: bool) -> str:
    """Returns the pattern of the page's paths, "" for replicas without the page."""
    from lmchat.webui.paths import APP, FILES

    return f"{APP}|{FILES}" if web else ""


def _given(context: typer.Context) -> list[str]:
    """Returns the options of `serve` that the command line has."""
    words, passed = [], inspect.signature(checked).parameters.keys() - {"host", "port"}
    for option in context.command.params:
        value, name = context.params.get(option.name), option.name
        source = context.get_parameter_source(name)
        if name not in passed or not source or source.name != "COMMANDLINE":
            continue
        if option.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"{option.opts[0]}={one}" for one in values]
    return words


def _run(
    serving: Serving, found: list[Place], arguments: list[str], web: bool, start_seconds: float
) -> None:
    """Serves until a signal."""
    import asyncio
    import contextlib
    import os
    from pathlib import PurePath

    from lmchat.bundled import name_of
    from lmchat.deploy.launcher import Common, Launcher, Replica
    from lmchat.deploy.proxy import program
    from lmchat.deploy.registry import claimed
    from lmchat.server.http.sockets import tcp_sockets, url_of
    from lmchat.server.logs import written

    drop_unread_output()
    haproxy, config = program(), serving.config
    with written(serving.log_level), claimed() as claim, contextlib.ExitStack() as stack:
        bound = [stack.enter_context(one) for one in tcp_sockets(serving.host, serving.port)]
        name = config.model_name or PurePath(name_of(serving.model)).name
        url = url_of(bound[0])
        about = {"pid": os.getpid(), "url": url, "model": name}
        common = Common(claim.folder, arguments, start_seconds)

        def opened() -> None:
            first = (usage if web else example)(
                url + config.root_path, None, name, bool(config.keys)
            )
            say(f"lmchat serves {name} at {url}{config.root_path}\n{first}")

        replicas = [Replica(number, common, place) for number, place in enumerate(found, start=1)]
        launcher = Launcher(claim, haproxy, bound, replicas, common, config, _page_paths(web))
        asyncio.run(launcher.run(about, opened))


@app.command("status")
def status(
    as_json: Json = False,
    targets: Annotated[
        bool, typer.Option("--targets", help="Print a file for Prometheus' file_sd_configs.")
    ] = False,
) -> None:
    """Show the replicas of the data directory's deployment.

    \b
    Examples:
      lmchat deploy status
      lmchat deploy status --json
      lmchat deploy status --targets > /etc/prometheus/lmchat.json
    """
    from lmchat.deploy.registry import status as ask

    found = ask()
    if as_json or targets:
        typer.echo(json.dumps(_targets(found) if targets else found, indent=2))
        return
    from ..terminal.tables import ReportPrinter, figures

    table = figures(f"{found['model']} at {found['url']}, process {found['pid']}", *_COLUMNS)
    for replica in found["replicas"]:
        table.add_row(*("-" if replica[name] is None else str(replica[name]) for name in _COLUMNS))
    ReportPrinter().print(table)


def _targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns where Prometheus reads the metrics of each replica, and those of HAProxy."""
    paths = {
        str(one["replica"]): f"/replicas/{one['replica']}/metrics" for one in found["replicas"]
    }
    address = found["url"].partition("://")[2]
    return [
        {"targets": [address], "labels": {"replica": name, "__metrics_path__": path}}
        for name, path in (*paths.items(), ("proxy", "/proxy/metrics"))
    ]


@app.command("restart")
def restart(
    replica: Annotated[
        int | None, typer.Argument(metavar="N", help="Only replica N.", show_default=False)
    ] = None,
) -> None:
    """Restart the replicas of the data directory's deployment, one after the other.

    A replica gets no new requests, its streams get --drain-seconds, what still runs is stored, and
    the new process is ready before the next replica's turn comes. It runs the lmchat that is
    installed now, with the options of the deployment.

    \b
    Examples:
      lmchat deploy restart
      lmchat deploy restart 2
    """
    from lmchat.deploy.registry import restart as ask

    for step in ask(replica):
        say(step)


@app.command("stop")
def stop(
    now: Annotated[bool, typer.Option("--now", help="Do not wait for running replies.")] = False,
) -> None:
    """End the data directory's deployment, and wait until it has ended.

    Running replies get --drain-seconds to finish. With --now they are cut; no token that a client
    has seen is lost.

    \b
    Examples:
      lmchat deploy stop
      lmchat deploy stop --now
    """
    from lmchat.deploy.registry import stop as ask

    for step in ask(now):
        say(step)
