"""`lmchat chat`: opens the engine and a session, then runs the chat or answers one question."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lmchat.bundled import FOLDER, NAME, find_model
from lmchat.errors import InvalidRequest, ModelError, NotFound
from lmchat.generation.settings import SETTINGS, validate
from lmchat.sessions.model_identity import loading_again

from ..errors import INTERRUPTED, note
from ..options import DiskQuota, Json, Model, with_engine_options
from ..terminal.escapes import dim, loading
from ..terminal.texts import clean
from . import one_answer
from .patience import STOP_SECONDS, Patience
from .remote import Server, choose_remote
from .session_choice import (
    Choice,
    check_imported,
    check_rules,
    check_system,
    choose,
    command_line,
    drop_if_empty,
    loading_note,
    store_hints,
)
from .setting_values import parse_pairs, thinking_variables

if TYPE_CHECKING:
    import lmchat

T = TypeVar("T")
ABOUT_MEMO = f"{NAME}, a tiny model, answers. A real one: lmchat chat Qwen/Qwen2.5-0.5B-Instruct"
"""Fits one line of a terminal with 80 columns."""
OVERFLOW = "drop"  # rule of new sessions for a full context


@with_engine_options
def command(
    model: Model = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Chat with the sessions of lmchat serve at this address, http://HOST:PORT or "
            "unix:/PATH.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="API key of that server. [default: $LMCHAT_API_KEY]"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Answer this text and piped input once, then exit."),
    ] = None,
    as_json: Json = False,
    session: Annotated[
        str | None,
        typer.Option(help="Continue the session of this name, or create it. [default: a new one]"),
    ] = None,
    latest: Annotated[
        bool,
        typer.Option("--continue", "-c", help="Continue the most recently used session."),
    ] = False,
    private: Annotated[
        bool,
        typer.Option("--no-store", "--private", help="Store nothing on disk."),
    ] = False,
    disk_quota: DiskQuota = None,
    overflow: Annotated[
        str | None,
        typer.Option(
            help="When the context is full: drop the oldest turns, or refuse. "
            "[default: drop; an existing session has its own]"
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show replies as plain text, without Markdown.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Longest reply, in tokens. [default: to the end of the context]"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0: greedy. [default: the model's]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling. [default: the model's]")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many of the likeliest tokens; 0: all. [default: the model's]"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling. [default: a new one each reply]")
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help=f"Set any setting; repeatable. NAME is one of {', '.join(SETTINGS)}.",
        ),
    ] = None,
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="Reason before answering. [default: the model's]"),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(
            help="append: earlier turns stay as they were; template: they are rendered again by "
            "the template. [default: see lmchat info]"
        ),
    ] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Chat with a model, or ask it one question.

    Without MODEL, an existing session uses its last model and a new one uses memo, a small model
    that ships with lmchat and needs no network. In a terminal this opens a chat; /help there lists
    its commands. Ctrl-C stops a reply, which stays in the session; Ctrl-D leaves.

    With -p or piped input, the command answers once: the answer goes to stdout, everything else to
    stderr. Settings such as --temperature then apply to this answer only, and so does --think when
    the session exists; in a chat they become the session's. A model without a chat template
    continues the given text. The answer is stored only with --session or --continue.

    Chats are stored: --session and --continue resume one, also after a crash, and only KV cache
    that is not on disk is computed again. lmchat sessions lists them; --no-store stores nothing.

    With --url the model and the sessions are those of a server, and this process loads none. If the
    connection breaks, a reply goes on where it was.

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
      lmchat chat --url http://127.0.0.1:23333 --continue
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
    if disk_quota is not None:
        if private:
            raise InvalidRequest("--disk-quota is given with --no-store, expected one of them")
        engine["disk_quota"] = disk_quota
    server = Server.of(url, api_key, model=model, private=private, engine=engine)
    if server is None:
        chosen = choose(model, session, latest, private)
        again = loading_again(chosen.loading, engine)
        engine, as_before = {**again, **engine}, loading_note(again)
        chosen = replace(chosen, note="; ".join(filter(None, (chosen.note, as_before))))
        is_memo = Path(find_model(chosen.model)) == FOLDER
    question = one_answer.question(prompt)
    if question is None and as_json:
        raise InvalidRequest("--json needs a question: -p TEXT, or piped in")
    if question is None and not (sys.stdout.isatty() or sys.stderr.isatty()):
        raise InvalidRequest(
            "neither stdout nor stderr is a terminal, expected one to chat in, or -p TEXT"
        )
    is_stored = not private and (question is None or latest or session is not None)
    if not is_stored:
        one_answer.check_unstored(disk_quota, *((history, overflow) if server else ()))
    remote = None
    if server is not None:
        remote, is_memo = server.connect(), False
        chosen = choose_remote(remote, session, latest)
    if question is not None:
        check_rules(chosen, history, overflow)
    check_system(chosen, system)
    check_imported(chosen, _confirm if question is None else None)
    about = ABOUT_MEMO if is_memo else None
    asked: dict[str, Any] = {"system": system}
    if question is None:  # otherwise they apply to one answer only
        asked["settings"] = settings
    if question is None or not chosen.found:
        asked |= {"history": history, "overflow": overflow or (None if chosen.found else OVERFLOW)}
    answer_alone = question is not None and chosen.found
    own_think = None if answer_alone else think
    patience = Patience(None if server is None else STOP_SECONDS)
    start = _Start(
        chosen.model, engine, chosen, not is_stored, asked, own_think, server, remote, patience
    )
    if question is None:
        raise typer.Exit(_chat(start, about, plain))
    with start.opened(start.engine()) as opened:
        if about is not None and sys.stderr.isatty():
            print(dim(about), file=sys.stderr, flush=True)
        if chosen.note:
            note(chosen.note)
        alone = remote is not None and not is_stored
        found = one_answer.Unstored(opened, system) if alone else start.session(opened)
        its_own = (answer_alone or alone) and think is not None
        own = thinking_variables(opened, bool(think)) if its_own else None
        try:
            raise typer.Exit(
                one_answer.run(
                    opened,
                    found,
                    question,
                    settings=settings,
                    variables=own,
                    as_json=as_json,
                    stored=is_stored,
                    patience=start.patience,
                )
            )
        finally:
            if chosen.name is None and not isinstance(found, one_answer.Unstored):
                start.patience.leave(lambda: drop_if_empty(found))


@dataclass(frozen=True)
class _Start:
    """How to open the engine and the session.

    Attributes:
        model: The model, as `find_model` takes it.
        options: Options of the engine.
        chosen: The session to open.
        private: Store nothing on disk.
        asked: Options of the session.
        think: Reasoning of the session; None leaves it unchanged.
        server: The server of the engine; None: the engine is opened here.
        remote: The engine of that server.
        patience: How long that server is waited for.
    """

    model: str | None
    options: dict[str, Any]
    chosen: Choice
    private: bool
    asked: dict[str, Any]
    think: bool | None
    server: Server | None = None
    remote: lmchat.EngineApi | None = None
    patience: Patience = field(default_factory=Patience)

    @property
    def name(self) -> str:
        """Name of the model, as shown to the user."""
        if self.remote is not None:
            return self.remote.model
        model = find_model(self.model)
        return Path(model).resolve().name if Path(model).exists() else os.fspath(model)

    def engine(self) -> lmchat.EngineApi:
        """Opens the engine. Errors of `ChatEngine` also name an alternative."""
        if self.remote is not None:
            return self.remote
        import lmchat

        store = "memory" if self.private else "disk"
        try:
            with store_hints():
                return lmchat.ChatEngine(self.model, store=store, **self.options)
        except (NotFound, ModelError) as error:
            if not self.chosen.remembered:
                raise
            name = self.chosen.name or ""
            raise type(error)(
                f"{error} (the last model of session {name}; "
                f"{command_line('MODEL', name)} uses another one)"
            ) from error

    @contextlib.contextmanager
    def opened(self, engine: lmchat.EngineApi) -> Iterator[lmchat.EngineApi]:
        """A context that closes the engine at its end. A server is not waited for without limit."""
        try:
            yield engine
        finally:
            self.patience.leave(engine.close)

    def session(self, opened: lmchat.EngineApi) -> lmchat.SessionApi:
        """Opens the session. Errors of `ChatEngine.session()` also name an alternative."""
        variables = None if self.think is None else thinking_variables(opened, self.think)
        with store_hints() if self.remote is None else contextlib.nullcontext():
            return opened.session(self.chosen.name, template_variables=variables, **self.asked)


def _settings(given: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the options and --set, and validates them before a model is loaded."""
    found = {name: value for name, value in given.items() if value is not None}
    for name in found.keys() & more.keys():
        raise InvalidRequest(f"--{name.replace('_', '-')} and --set {name} are given, expected one")
    return validate({**found, **more})


def _confirm(question: str) -> bool:
    return typer.confirm(clean(question), err=True)


def _chat(start: _Start, about: str | None, plain: bool) -> int:
    """Runs the chat in a terminal and returns the exit code. Ctrl-C while loading exits at once."""
    name = start.name
    try:
        with loading(name):
            opened = _in_background(start.engine, _load_interface)
    except KeyboardInterrupt:
        # The loading thread cannot be interrupted; exit without waiting for it.
        note("interrupted")
        os._exit(INTERRUPTED)
    from .repl import Repl

    with start.opened(opened):
        session = start.session(opened)
        repl = Repl(
            opened,
            session,
            name=name,
            about=about,
            plain=plain,
            private=start.private,
            server=start.server,
            patience=start.patience,
        )
        return repl.run(start.chosen)


def _load_interface() -> None:
    """Imports the modules of the chat while the model loads."""
    from . import repl

    del repl


def _in_background(work: Callable[[], T], meanwhile: Callable[[], None]) -> T:
    """Returns the result of `work`, which runs on another thread so that Ctrl-C raises at once."""
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
