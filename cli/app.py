"""The commands of `lmchat`."""

from __future__ import annotations

from typing import Annotated

import typer

import lmchat

from . import info, web
from .bench import command as bench
from .chat import command as chat
from .command_group import RootGroup
from .deploy import command as deploy
from .errors import ONE_QUESTION
from .serve import command as serve
from .sessions import command as sessions

app = typer.Typer(
    name="lmchat",
    cls=RootGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # the help text is the same on every terminal
)
app.command("chat", epilog=ONE_QUESTION)(chat.command)
app.command("serve", short_help="Serve a model over HTTP.")(serve.command)
app.command("web", short_help="Serve a chat page, and the API of serve.")(web.command)
app.command("info", short_help="Show this machine and the memory a model needs.")(info.command)
app.add_typer(deploy.app, name="deploy")
app.add_typer(sessions.app, name="sessions")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmchat {lmchat.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Chat with large language models on this machine.

    \b
    Examples:
      lmchat chat
      lmchat chat ./Qwen2.5-0.5B-Instruct
      lmchat chat ./Qwen2.5-0.5B-Instruct -p "What is a page table?"
      lmchat serve ./Qwen2.5-0.5B-Instruct
      lmchat web ./Qwen2.5-0.5B-Instruct
      lmchat deploy ./Qwen2.5-0.5B-Instruct --replicas 2
      lmchat info ./Qwen2.5-0.5B-Instruct
      lmchat sessions list
      lmchat bench engine ./Qwen2.5-0.5B-Instruct
    """
