"""One reply that a server generates. A thread reads its events; any number of readers follow it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from lmchat.client.http import Connection, error_of, hang_up
from lmchat.client.values import delta_of, reply_of
from lmchat.errors import Error, InternalError, NotFound, Unreachable
from lmchat.generation.parts import Delta, PartsLog, Progress
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.store.turns import Turn
from turbomind.config.limits import start_thread

LINGER = 30.0
"""Seconds in which a client can attach again after its connection broke. Then the server stops the
reply, so that a client that was killed leaves none running."""

CANCELLED_LINGER = 2.0
"""The same for a reply that was asked to stop: nobody waits for what it still brings."""

_PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)  # seconds before attempts to attach again; the last one repeats


class RemoteGeneration:
    """A reply that a server generates, as `lmchat.generation.Generation` is a local one.

    Args:
        connection: the server.
        answer: the open stream of events.
        path: path of its session; None: it has none, and cannot be attached to again.
        commit: returns the stored turn of this id, after the session was read again.
    """

    def __init__(
        self,
        connection: Connection,
        answer: httpx.Response,
        path: str | None = None,
        commit: Callable[[int | None], Turn | None] = lambda _: None,
    ) -> None:
        self.log = PartsLog()
        """The parts of the reply, and its end."""
        self._connection, self._answer, self._path = connection, answer, path
        self._commit = commit
        self._number: str | None = None  # of a generation without a session
        self._before: list[Delta] = []  # what a continued reply had, until all of it has come
        self._last: str | None = None  # id of the last event
        self._begun = threading.Event()
        self._cancelled = False
        self._detached = False
        reading = threading.Thread(target=self._run, name="lmchat-remote", daemon=True)
        try:
            start_thread(reading, "a reply")
        except InternalError:
            answer.close()
            raise

    # --- the thread that reads -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            reply = self._read()
        except Error as error:
            self._end(None, error)
        except Exception as error:  # such as an event of a form that is not known
            self._end(None, InternalError(f"the server sent an unknown event: {error}"))
        else:
            self._end(reply, None)

    def _end(self, reply: Reply | None, error: Error | None) -> None:
        self._answer.close()
        self.log.end(reply, error)
        self._begun.set()

    def _read(self) -> Reply:
        while True:
            try:
                for name, data in self._events():
                    if self._before and name != "start" and not data.get("before"):
                        self.log.before, self._before = tuple(self._before), []
                    if name == "done":
                        return reply_of(data, self._commit(data.get("turn")))
                    self._take(name, data)
                lost: Unreachable = self._connection.lost(
                    EOFError("the stream of a reply was cut off")
                )
            except (httpx.HTTPError, httpx.StreamError, OSError) as error:
                lost = self._connection.lost(error)
            self._attach_again(lost)

    def _events(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields the name and data of each event. Records its id once it was taken."""
        name, number = "", None
        for line in self._answer.iter_lines():
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "id":
                number = value
            elif field == "data" and name:
                yield name, json.loads(value)
                self._last, number = number or self._last, None

    def _take(self, name: str, data: Mapping[str, Any]) -> None:
        if name == "start":
            self.log.turn_id, self._number = data["turn"], data.get("generation")
            self._begun.set()
        elif name == "progress":
            self.log.append([Progress(data["done"], data["total"], data["cached"])])
        elif name == "delta" and data.get("before"):
            self._before.append(delta_of(data, 0.0))
        elif name == "delta":
            self.log.append([delta_of(data, time.perf_counter())])
        elif name == "error":
            error = data["error"]
            code, kind = error.get("code"), error.get("type")
            raise error_of(error["message"], code, kind, error.get("param"))

    def _attach_again(self, lost: Unreachable) -> None:
        """Opens the stream of events again, after the last one.

        Raises:
            Unreachable: it is `lost`, because the server does not answer or has lost the reply.
        """
        if self._path is None or self.turn_id is None or self._detached:
            raise lost
        self._answer.close()
        begin, attempt = time.monotonic(), 0
        headers = {} if self._last is None else {"Last-Event-ID": self._last}
        query = {"turn": str(self.turn_id), "token_ids": "true"}
        while time.monotonic() < begin + (CANCELLED_LINGER if self._cancelled else LINGER):
            time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1
            with contextlib.suppress(Unreachable):
                try:
                    self._answer = self._connection.open(
                        "GET", f"{self._path}/events", query=query, headers=headers
                    )
                except NotFound:
                    raise lost from None
                return
        raise lost

    # --- calls of any thread ---------------------------------------------------------------------

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that the reply becomes; None without a session, and before the start."""
        return self.log.turn_id

    @property
    def done(self) -> bool:
        """Whether the reply has ended."""
        return self.log.done

    @property
    def cancelled(self) -> bool:
        """Whether a caller has asked it to stop."""
        return self._cancelled

    def cancel(self) -> None:
        """Requests that it stops. Never waits. Any thread or finalizer may call it, repeatedly."""
        if self._cancelled or self.log.done:
            return
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # at the interpreter's end: the server stops it
            threading.Thread(target=self._stop, name="lmchat-stop", daemon=True).start()

    def _stop(self) -> None:
        self._begun.wait()
        if self.log.done:
            return
        try:
            if self._path is not None:
                self._connection.call("POST", f"{self._path}/stop", {"turn": self.turn_id})
            else:
                self._connection.call("POST", "/v1/engine/stop", {"generation": self._number})
        except Error:  # it has ended, or the server does not answer, which the reader finds out
            pass

    def wait(self) -> None:
        """Waits for the end."""
        self.log.wait()

    def result(self) -> Reply:
        """Waits for the end and returns the reply.

        Raises:
            Error: it failed before its first token.
            Unreachable: the connection was lost for good.
        """
        self.wait()
        return self.log.result()

    def follow(self) -> Follower:
        """Returns a reader of the reply, which has all of it so far."""
        return Follower(self.log)

    def detach(self) -> None:
        """Ends the reading and leaves the reply alone. Never waits."""
        self._detached = True
        if not self.log.done:
            hang_up(self._answer)
