"""`lmchat chat`: opens the engine and a session, and leaves the rest to those who show it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lmchat.bundled import FOLDER, NAME, find_model
from lmchat.errors import InvalidRequest, ModelError, NotFound
from lmchat.generation.settings import SETTINGS, validate

from ..errors import INTERRUPTED, note
from ..options import Json, Model, with_engine_options
from . import one_answer
from .session_choice import (
    Choice,
    check_imported,
    check_rules,
    check_system,
    choose,
    command_line,
    drop_if_empty,
    saying_how,
)
from .setting_values import parse_pairs, thinking_variables

if TYPE_CHECKING:
    import lmchat

T = TypeVar("T")
ABOUT_MEMO = f"{NAME}, a tiny model, answers. A real one: lmchat chat Qwen/Qwen2.5-0.5B-Instruct"
"""One line of a terminal with 80 columns."""
OVERFLOW = "drop"  # what a session that begins here does when its context is full


@with_engine_options
def command(
    model: Model = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Answer this, and what is piped in, and leave."),
    ] = None,
    as_json: Json = False,
    session: Annotated[
        str | None,
        typer.Option(help="Go on with the session of this name, or begin it. [default: a new one]"),
    ] = None,
    latest: Annotated[
        bool,
        typer.Option("--continue", "-c", help="Go on with the session that was used last."),
    ] = False,
    private: Annotated[
        bool,
        typer.Option("--no-store", "--private", help="Keep nothing: the chat ends with itself."),
    ] = False,
    overflow: Annotated[
        str | None,
        typer.Option(
            help="When the context is full: drop the oldest turns, or refuse. "
            "[default: drop; of a session that exists: its own]"
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show replies as they are, without Markdown.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest reply. [default: to the end of the context]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy. [default: the model's]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: the model's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="0: all. [default: the model's]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: a new one each reply]")] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help=f"Any setting; repeatable. NAME is one of {', '.join(SETTINGS)}.",
        ),
    ] = None,
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="Reasoning before answers. [default: the model's]"),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            help="keep: earlier turns stay as they were; template: they follow the template. "
            "[default: see lmchat info]"
        ),
    ] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Chat with a model, or ask it one thing.

    Without MODEL it is the model that the session was last with; of a new session memo, a small
    model that ships with lmchat and needs no network. In a terminal it is a chat: /help there lists
    the commands. With -p, or when something is piped in, it answers once: the answer goes to
    stdout, everything else to stderr, and settings such as --temperature hold for this answer
    alone, as does --think where the session exists; in a chat they are the session's. Ctrl-C stops
    a reply and keeps it, Ctrl-D leaves. A model without a chat template continues the text that is
    typed.

    Sessions are kept: --session and --continue go on with one, after a crash too, and compute again
    only what is not on the disk. lmchat sessions lists them; --no-store keeps nothing.

    \b
    Examples:
      lmchat chat
      lmchat chat Qwen/Qwen2.5-0.5B-Instruct
      lmchat chat ./Qwen2.5-0.5B-Instruct
      lmchat chat --continue
      lmchat chat --session trip -p "And on Sunday?"
      lmchat chat ./model --system "Answer in one sentence." --temperature 0.7 --seed 1
      lmchat chat ./model --no-think --set repetition_penalty=1.1 --set 'stop_strings=["END"]'
      lmchat chat ./model -p "Plan a day in Kyoto." --max-new-tokens 200
      git diff | lmchat chat ./model -p "Describe this change." --json
    """
    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    settings = _settings(given, parse_pairs(more or ()))
    if overflow not in (None, "refuse", "drop"):
        raise InvalidRequest(f"--overflow is {overflow!r}, expected refuse or drop")
    chosen = choose(model, session, latest, private)
    source = find_model(chosen.model)
    question = one_answer.question(prompt)
    if question is None and as_json:
        raise InvalidRequest("--json needs a question: -p TEXT, or piped in")
    if question is None and not (sys.stdout.isatty() or sys.stderr.isatty()):
        raise InvalidRequest(
            "neither stdout nor stderr is a terminal, expected one to chat in, or -p TEXT"
        )
    if question is not None:
        check_rules(chosen, history, overflow)
    check_system(chosen, system)
    check_imported(chosen, _confirm if question is None else None)
    about = ABOUT_MEMO if Path(source) == FOLDER else None
    asked: dict[str, Any] = {"system": system}
    if question is None:  # else they are the one answer's
        asked["settings"] = settings
    if question is None or not chosen.found:
        asked |= {"history": history, "overflow": overflow or (None if chosen.found else OVERFLOW)}
    answer_alone = question is not None and chosen.found
    start = _Start(chosen.model, engine, chosen, private, asked, None if answer_alone else think)
    if question is None:
        raise typer.Exit(_chat(start, about, plain))
    with start.engine() as opened:
        if about is not None and sys.stderr.isatty():
            print(f"{one_answer.DIM}{about}{one_answer.PLAIN}", file=sys.stderr, flush=True)
        if chosen.note:
            note(chosen.note)
        found = start.session(opened)
        own = thinking_variables(opened, think) if answer_alone and think is not None else None
        try:
            raise typer.Exit(
                one_answer.run(
                    opened, found, question, settings=settings, variables=own, as_json=as_json
                )
            )
        finally:
            if chosen.name is None:
                drop_if_empty(found)


@dataclass(frozen=True)
class _Start:
    """What a chat begins with. `model` is as `find_model` takes it, `asked` are the session's
    options; `think` is None where it was not given, or is the one answer's."""

    model: str | None
    options: dict[str, Any]
    chosen: Choice
    private: bool
    asked: dict[str, Any]
    think: bool | None

    def engine(self) -> lmchat.ChatEngine:
        """The engine. Raises as `ChatEngine`, and says what else could be done."""
        import lmchat

        store = "memory" if self.private else "disk"
        try:
            with saying_how():
                return lmchat.ChatEngine(self.model, store=store, **self.options)
        except (NotFound, ModelError) as error:
            if not self.chosen.remembered:
                raise
            name = self.chosen.name or ""
            raise type(error)(
                f"{error} (session {name} was last with it; "
                f"{command_line('MODEL', name)} goes on with another one)"
            ) from error

    def session(self, opened: lmchat.ChatEngine) -> lmchat.Session:
        """The session. Raises as `ChatEngine.session()`, and says what else could be done."""
        variables = None if self.think is None else thinking_variables(opened, self.think)
        with saying_how():
            return opened.session(self.chosen.name, template_variables=variables, **self.asked)


def _settings(given: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options and those of --set, looked at before a model is loaded."""
    found = {name: value for name, value in given.items() if value is not None}
    for name in found.keys() & more.keys():
        raise InvalidRequest(f"--{name.replace('_', '-')} and --set {name} are given, expected one")
    return validate({**found, **more})


def _confirm(question: str) -> bool:
    return typer.confirm(question, err=True)


def _chat(start: _Start, about: str | None, plain: bool) -> int:
    """The chat in a terminal. Ctrl-C while the model loads leaves at once."""
    model = find_model(start.model)
    name = Path(model).resolve().name if Path(model).exists() else os.fspath(model)
    show = _show if sys.stderr.isatty() else _show_nothing
    try:
        show(f"loading {name} ...")
        opened = _in_background(start.engine, _load_interface)
    except KeyboardInterrupt:
        # A thread is deep in reading weights; the process ends without waiting for it.
        show("")
        note("interrupted")
        os._exit(INTERRUPTED)
    finally:
        show("")
    from .repl import Repl

    with opened:
        session = start.session(opened)
        repl = Repl(opened, session, name=name, about=about, plain=plain, private=start.private)
        return repl.run(start.chosen)


def _show(text: str) -> None:
    """In the place of the current line."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show_nothing(_text: str) -> None:
    """Nobody looks."""


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
