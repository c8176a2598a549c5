"""`lmchat chat` where nobody types: one question in, one answer out."""

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
from typing import TYPE_CHECKING, Any

from lmchat.errors import ContextFull, InvalidRequest

from ..errors import (
    CLOSED_PIPE,
    FAILED,
    INTERRUPTED,
    drop_output,
    error_object,
    note,
    replace_undecodable,
)
from ..terminal.texts import clean
from .reply_status import usage_line

if TYPE_CHECKING:
    import lmchat
    from lmchat.generation.generation import Delta, Progress, Reply

DIM, PLAIN, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
RETRY = 0.01  # seconds between two tries to stop what has not begun


def question(given: str | None) -> str | None:
    """What to answer: the text of `-p`, a blank line, and what is piped in, as far as there is.

    None when there is neither, because stdin is a terminal. Raises InvalidRequest when all of it is
    blank.
    """
    replace_undecodable()
    piped = "" if sys.stdin is None else None
    if piped is None and not sys.stdin.isatty():
        piped = sys.stdin.read().rstrip("\n")
    if given is None and piped is None:
        return None
    parts = [part for part in (given, piped) if part is not None and part.strip()]
    if not parts:
        where = "stdin is empty" if given is None else f"-p is {given!r}"
        raise InvalidRequest(f"{where}, expected a question")
    return "\n\n".join(parts)


def run(
    engine: lmchat.ChatEngine,
    session: lmchat.Session,
    prompt: str,
    *,
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    as_json: bool,
) -> int:
    """Answers `prompt` on stdout and returns the exit code. `settings`, and the `variables` of the
    template, are this answer's alone.

    The text streams, or (`as_json`) comes as one object at the end. Everything else goes to stderr.
    Ctrl-C ends the answer and keeps what came. Errors before the first token raise.
    """
    screen = _Screen(as_json)
    try:
        with _stopping_on_interrupt(session.stop):
            with session.stream(prompt, template_variables=variables, **(settings or {})) as stream:
                for part in stream.events():
                    screen.show(part)
                reply = stream.result()
            screen.end(reply, json_object(engine, session, reply))
    except BrokenPipeError:
        drop_output()
        return CLOSED_PIPE
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
        print(f"{DIM}{line}{PLAIN}", file=sys.stderr)
    return {"error": FAILED, "cancelled": INTERRUPTED}.get(reply.finish_reason, 0)


def json_object(engine: lmchat.ChatEngine, session: lmchat.Session, reply: Reply) -> dict[str, Any]:
    """All there is to say about a reply; the names are those of the Python API."""
    found: dict[str, Any] = {
        "model": engine.model,
        "session": session.name,
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
    """Puts the parts of an answer where they belong.

    On a terminal stderr shows how far a long prompt is, and the reasoning, dim.
    """

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._terminal = sys.stderr.isatty()
        self._shows_progress = False
        self._reasoned = False
        self._in_line = False  # the text on stdout lacks the newline at its end

    def show(self, part: Delta | Progress) -> None:
        """Writes one part; raises BrokenPipeError when stdout is closed."""
        from lmchat.generation.generation import Progress

        if isinstance(part, Progress):
            if self._terminal and part.done < part.total:
                self._shows_progress = True
                status = f"reading {part.done:,} of {part.total:,} tokens"
                print(f"{CLEAR_LINE}{DIM}{status}{PLAIN}", end="", file=sys.stderr, flush=True)
            return
        self.clear()
        if part.kind == "reasoning":
            if self._terminal:
                self._reasoned = True
                print(f"{DIM}{clean(part.text)}{PLAIN}", end="", file=sys.stderr, flush=True)
        elif not self._json:
            self._end_reasoning()
            text = clean(part.text) if sys.stdout.isatty() else part.text
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_line = not text.endswith("\n") if text else self._in_line

    def end(self, reply: Reply, found: dict[str, Any]) -> None:
        """Ends the last line, an empty one too, or prints the object."""
        self._in_line = not self._json and not reply.text.endswith("\n")
        self.close()
        if self._json:
            print(json.dumps(found), flush=True)

    def close(self) -> None:
        """Ends what stands in the middle of a line: what is said next begins one of its own."""
        self.clear()
        self._end_reasoning()
        if self._in_line:
            self._in_line = False
            print(flush=True)

    def clear(self) -> None:
        """Takes the line away that says how far the prompt is."""
        if self._shows_progress:
            self._shows_progress = False
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def _end_reasoning(self) -> None:
        if self._reasoned:
            self._reasoned = False
            print("\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stopping_on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, again until it returns something; the next one raises.

    `stop` runs on a thread of its own: the main thread, where signal handlers run, may at that
    moment hold the lock that it needs.
    """
    pressed: queue.SimpleQueue[bool] = queue.SimpleQueue()  # put() may interrupt itself
    over = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def watch() -> None:
        if pressed.get():
            while stop() is None and not over.wait(RETRY):
                pass

    def handler(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.put(True)

    watcher = threading.Thread(target=watch, name="lmchat-interrupt", daemon=True)
    watcher.start()
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        pressed.put(False)
        watcher.join()
