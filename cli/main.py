"""The commands, and what every command does with an error."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import lmchat
from turbomind.errors import Error

from . import bench, chat, info

app = typer.Typer(
    name="lmchat",
    help="Chat with large language models on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the same help text on every terminal
)
app.command("chat")(chat.command)
app.command("info")(info.command)
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
    pass


def main() -> None:
    """Runs the command line; an error of ours is one line on stderr and exit code 2."""
    try:
        app()
    except Error as error:
        print(f"lmchat: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output is gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
