"""`lmchat chat` in scripts: one question in, one answer out."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from lmchat.errors import ContextFull, Error, InvalidRequest

from ..errors import (
    CLOSED_PIPE,
    FAILED,
    INTERRUPTED,
    drop_output,
    error_object,
    note,
    replace_undecodable,
)
from ..terminal.escapes import CLEAR_LINE, dim, takes_escapes
from ..terminal.texts import clean
from .patience import Patience
from .reply_status import usage_line
from .text_input import read_stdin

if TYPE_CHECKING:
    import lmchat
    from lmchat.generation.generation import Delta, Progress, Reply, ReplyStream

RETRY = 0.01  # seconds between attempts to stop a reply that has not started yet


def question(given: str | None) -> str | None:
    """Returns the question: the text of `-p`, a blank line, and piped input, where given.

    Args:
        given: The text of `-p`; None without it.

    Returns:
        The question; None if there is neither text and stdin is a terminal.

    Raises:
        InvalidRequest: The question is blank, or what is piped is too long or not text.
    """
    replace_undecodable()
    piped = "" if sys.stdin is None else None
    if piped is None and not sys.stdin.isatty():
        piped = read_stdin(given is not None)
    if given is None and piped is None:
        return None
    parts = [part for part in (given, piped) if part is not None and part.strip()]
    if not parts:
        where = "stdin is empty" if given is None else f"-p is {given!r}"
        raise InvalidRequest(f"{where}, expected a question")
    return "\n\n".join(parts)


def check_unstored(
    disk_quota: str | None, history: str | None = None, overflow: str | None = None
) -> None:
    """Refuses options that only a stored session has.

    Args:
        disk_quota: --disk-quota.
        history: --history, of a session of a server.
        overflow: --overflow, of a session of a server.
    """
    given = {"disk-quota": disk_quota, "history": history, "overflow": overflow}
    for name, value in given.items():
        if value:
            raise InvalidRequest(
                f"--{name} is given, but this answer is not stored, expected --session NAME or "
                "--continue too"
            )


class Unstored:
    """A question to a server's engine, without a session there.

    It has those names of a session that `run` uses.

    Args:
        engine: The engine.
        system: The system prompt; None: none.
    """

    name = ""

    def __init__(self, engine: lmchat.EngineApi, system: str | None) -> None:
        self._engine = engine
        self._before = [] if system is None else [{"role": "system", "content": system}]
        self._stream: ReplyStream | None = None

    @property
    def length(self) -> int:
        """Length of the question and its answer, in tokens."""
        reply = self._stream.reply if self._stream else None
        return reply.usage.prompt_tokens + reply.usage.completion_tokens if reply else 0

    def stream(
        self, text: str, *, template_variables: Mapping[str, Any] | None, **settings: Any
    ) -> ReplyStream:
        """Asks the question and returns the stream of its answer."""
        self._stream = self._engine.stream_chat(
            [*self._before, {"role": "user", "content": text}],
            template_variables=template_variables,
            **settings,
        )
        return self._stream

    def stop(self) -> Reply | None:
        """Stops the answer and returns it; None before it has begun."""
        return self._stream.stop() if self._stream else None


def run(
    engine: lmchat.EngineApi,
    session: lmchat.SessionApi | Unstored,
    prompt: str,
    *,
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    as_json: bool,
    stored: bool = True,
    patience: Patience | None = None,
) -> int:
    """Answers one question on stdout. Everything else goes to stderr.

    Ctrl-C stops the answer, which stays in a stored session. Errors before the first token raise.

    Args:
        engine: The engine of the session.
        session: The session that gets the question.
        prompt: The question.
        settings: Generation settings of this answer only.
        variables: Template variables of this answer only.
        as_json: Print one JSON object at the end instead of streaming the text.
        stored: The session is stored, so that its name means something after the end.
        patience: How long the server of the engine is waited for; None: it is of this process.

    Returns:
        The exit code.
    """
    screen, patience = _Screen(as_json), patience or Patience()
    try:
        with _stopping_on_interrupt(session.stop, patience):
            stream = session.stream(prompt, template_variables=variables, **(settings or {}))
            try:
                for part in stream.events():
                    screen.show(part)
                reply = stream.result()
            finally:
                patience.leave(stream.close)
            screen.end(reply, json_object(engine, session.name if stored else None, reply))
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE
    except KeyboardInterrupt:
        if not patience.is_over:
            raise
        screen.close()
        note("no answer from the server to Ctrl-C; the reply may still go on there")
        return INTERRUPTED
    except ContextFull as error:
        raise ContextFull(f"{error}; shorten the question or lower --max-new-tokens") from error
    finally:
        screen.close()
    for notice in reply.notices:
        note(notice)
    if reply.error is not None:
        note(reply.error)
    elif reply.finish_reason == "length" and session.length >= engine.max_context:
        note(
            f"the context of {engine.max_context} tokens is full; a shorter question leaves the "
            "answer more room"
        )
    if sys.stderr.isatty():
        line = usage_line(reply, session.length, engine.max_context)
        print(dim(line), file=sys.stderr)
    return {"error": FAILED, "cancelled": INTERRUPTED}.get(reply.finish_reason, 0)


def json_object(engine: lmchat.EngineApi, session: str | None, reply: Reply) -> dict[str, Any]:
    """Returns a reply as `--json` prints it; the names are those of the Python API.

    Args:
        engine: The engine.
        session: Name of the session; None: the reply is not stored.
        reply: The reply.
    """
    found: dict[str, Any] = {
        "model": engine.model,
        "session": session,
        "text": reply.text,
        "reasoning": reply.reasoning,
        "token_ids": reply.token_ids,
        "finish_reason": reply.finish_reason,
        "usage": asdict(reply.usage),
        "timings": asdict(reply.timings),
    }
    if reply.logprobs:
        found["logprobs"] = [asdict(entry) for entry in reply.logprobs]
    if reply.error is not None:
        found["error"] = error_object(reply.error)
    return found


class _Screen:
    """Writes the answer to stdout, and to stderr the progress and the reasoning.

    Reasoning is shown only if stderr is a terminal, progress only if that takes escape sequences.
    """

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._terminal = sys.stderr.isatty()
        self._passing = takes_escapes(sys.stderr)  # it can show a line and remove it
        self._shows_progress = False
        self._reasoned = False
        self._in_line = False  # the text on stdout does not end with a newline

    def show(self, part: Delta | Progress) -> None:
        """Writes one event. Raises BrokenPipeError if stdout is closed."""
        from lmchat.generation.generation import Progress

        if isinstance(part, Progress):
            if self._passing and part.done < part.total:
                self._shows_progress = True
                status = f"reading {part.done:,} of {part.total:,} tokens"
                print(f"{CLEAR_LINE}{dim(status)}", end="", file=sys.stderr, flush=True)
            return
        if not part.text:
            return
        self.clear()
        if part.kind == "reasoning":
            if self._terminal:
                self._reasoned = True
                print(dim(clean(part.text)), end="", file=sys.stderr, flush=True)
        elif not self._json:
            self._end_reasoning()
            text = clean(part.text) if sys.stdout.isatty() else part.text
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_line = not text.endswith("\n") if text else self._in_line

    def end(self, reply: Reply, found: dict[str, Any]) -> None:
        """Ends the last line of the text, or prints the JSON object."""
        self._in_line = not self._json and not reply.text.endswith("\n")
        self.close()
        if self._json:
            print(json.dumps(found), flush=True)

    def close(self) -> None:
        """Ends an unfinished line, so that the next message starts a new one."""
        self.clear()
        self._end_reasoning()
        if self._in_line:
            self._in_line = False
            print(flush=True)

    def clear(self) -> None:
        """Removes the line with the progress of the prefill."""
        if self._shows_progress:
            self._shows_progress = False
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def _end_reasoning(self) -> None:
        if self._reasoned:
            self._reasoned = False
            print("\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stopping_on_interrupt(stop: Callable[[], object], patience: Patience) -> Iterator[None]:
    """Calls `stop` on the first Ctrl-C, until it returns a value; the second Ctrl-C raises, and so
    does the end of the patience after the first one.

    `stop` runs on another thread: the main thread, which runs signal handlers, may hold a lock
    that `stop` needs.
    """
    pressed: queue.SimpleQueue[bool] = queue.SimpleQueue()  # put() is reentrant
    over = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def watch() -> None:
        with contextlib.suppress(Error):  # the reply itself reports a server that is gone
            if pressed.get():
                while stop() is None and not over.wait(RETRY):
                    pass

    def handler(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.put(True)
        start_alarm()

    watcher = threading.Thread(target=watch, name="lmchat-interrupt", daemon=True)
    watcher.start()
    try:
        with _alarm(patience) as start_alarm:
            signal.signal(signal.SIGINT, handler)
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        pressed.put(False)
        watcher.join(patience.left)


@contextlib.contextmanager
def _alarm(patience: Patience) -> Iterator[Callable[[], object]]:
    """Yields a function that starts the time after which the server is given up: the main thread
    raises KeyboardInterrupt, wherever it waits. With an engine of this process it does nothing."""
    seconds = patience.stop
    if seconds is None:
        yield lambda: None
        return

    def give_up(_signal: int, _frame: FrameType | None) -> NoReturn:
        patience.give_up()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
