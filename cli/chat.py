"""`lmchat chat`: opens the engine and a session, and leaves the rest to those who show it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lmchat.errors import InvalidRequest

from . import oneshot
from .errors import INTERRUPTED, note
from .options import Json, with_engine_options

if TYPE_CHECKING:
    import lmchat

T = TypeVar("T")


@with_engine_options
def command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model folder or a hub name.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Answer this, and what is piped in, and leave."),
    ] = None,
    as_json: Json = False,
    session: Annotated[
        str | None, typer.Option(help="Name of the session. [default: a new one]")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show replies as they are, without Markdown.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest reply. [default: to the end of the context]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: greedy. [default: the model's]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="[default: the model's]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0: all. [default: the model's]")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="[default: a new one each reply]")] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Chat with a model, or ask it one thing.

    In a terminal it is a chat: /help there lists the commands. With -p, or when something is piped
    in, it answers once: the answer goes to stdout, everything else to stderr. Ctrl-C stops a reply
    and keeps it, Ctrl-D leaves. A model without a chat template continues the text that is typed.

    \b
    Examples:
      lmchat chat ./Qwen2.5-0.5B-Instruct
      lmchat chat ./model --system "Answer in one sentence." --temperature 0.7 --seed 1
      lmchat chat ./model -p "Plan a day in Kyoto." --max-new-tokens 200
      git diff | lmchat chat ./model -p "Describe this change." --json
    """
    if model is None:
        raise InvalidRequest("MODEL is missing, expected a model folder or a hub name")
    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    question = oneshot.question(prompt)
    if question is None and as_json:
        raise InvalidRequest("--json needs a question: -p TEXT, or piped in")
    if question is None:
        raise typer.Exit(_chat(model, engine, session, system, settings, plain))
    with _open(model, engine) as opened:
        talk = opened.session(session, system=system)
        raise typer.Exit(oneshot.run(opened, talk, question, as_json=as_json, settings=settings))


def _chat(
    model: str,
    options: dict[str, Any],
    session: str | None,
    system: str | None,
    settings: dict[str, Any],
    plain: bool,
) -> int:
    """The chat in a terminal. Ctrl-C while the model loads leaves at once."""
    name = Path(model).resolve().name if Path(model).exists() else model
    show = _show if sys.stderr.isatty() else _show_nothing
    try:
        show(f"loading {name} ...")
        opened = _in_background(lambda: _open(model, options), _load_interface)
    except KeyboardInterrupt:
        # A thread is deep in reading weights; the process ends without waiting for it.
        show("")
        note("interrupted")
        os._exit(INTERRUPTED)
    finally:
        show("")
    from .repl import Repl

    with opened:
        talk = opened.session(session, system=system, settings=settings)
        return Repl(opened, talk, name=name, plain=plain).run()


def _show(text: str) -> None:
    """In the place of the current line."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show_nothing(_text: str) -> None:
    """Nobody looks."""


def _open(model: str, options: dict[str, Any]) -> lmchat.ChatEngine:
    import lmchat

    return lmchat.ChatEngine(model, **options)


def _load_interface() -> None:
    """Imports what the chat needs, while the model loads."""
    from . import repl

    del repl


def _in_background(work: Callable[[], T], meanwhile: Callable[[], None]) -> T:
    """The result of `work`, done on a thread of its own so that Ctrl-C raises at once."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="lmchat-load", daemon=True)
    thread.start()
    meanwhile()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
