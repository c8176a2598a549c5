"""From running generations to a response: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lmchat.aio.threads import shared
from lmchat.errors import Error
from lmchat.generation.parts import Delta, Part, Progress
from lmchat.generation.reply import Reply
from lmchat.server.dialects.results import all_choices, metrics, raise_failed, usage
from lmchat.server.errors import error_object, log_failure, named, status_of
from lmchat.server.http.body import fields_of
from lmchat.server.http.event_stream import EventStream, answered, event
from lmchat.server.openai.chunks import DONE, Chunks, compact
from lmchat.server.openai.envelope import Envelope

Result = TypeVar("Result")

Fields: TypeAlias = dict[str, Any | Callable[[], str]]
"""Fields of an object. A function returns the JSON of its field."""

SILENT_START = 1.0
"""Longest time in seconds for which a stream waits for its first part before it answers 200. An
error within it is answered with its own status."""


class Stream(Protocol):
    """The parts of one generation, as `AsyncReplyStream` has them."""

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""

    async def take(self) -> list[Part]:
        """Waits for parts and returns all that there are; none at the end."""

    async def aclose(self) -> None:
        """Ends the reading, and a generation that is of no session."""


class Parts:
    """The parts of one generation or several, in the order in which they come.

    Args:
        streams: one stream for each prompt.
        choices: number of choices of each prompt.
    """

    def __init__(self, streams: Sequence[Stream], choices: int = 1) -> None:
        self._streams = list(streams)
        self._choices = choices
        self._ahead: asyncio.Future[list[Part]] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, list[Part]]] = asyncio.Queue()
        self._progress: dict[int, Progress] = {}

    async def started(self, seconds: float = SILENT_START) -> None:
        """Waits for the first parts, at most for some time.

        Raises:
            Error: a generation failed before them.
        """
        self._ahead = asyncio.ensure_future(self._take())
        await asyncio.wait({self._ahead}, timeout=seconds)
        if self._ahead.done():
            self._ahead.result()

    @property
    def is_ready(self) -> bool:
        """Whether `take()` has parts to return, or the end, without waiting."""
        return self._ahead is not None and self._ahead.done()

    async def take(self) -> list[Part]:
        """Waits for parts and returns all that there are. Returns an empty list at the end.

        Raises:
            Error: a generation failed before its first token.
        """
        ahead, self._ahead = self._ahead, None
        return await (ahead if ahead is not None else self._take())

    async def _take(self) -> list[Part]:
        if len(self._streams) == 1:
            return await self._streams[0].take()
        if not self._pumps:
            self._pumps = [
                asyncio.ensure_future(self._pump(i, one)) for i, one in enumerate(self._streams)
            ]
        while not all(pump.done() for pump in self._pumps) or not self._queue.empty():
            at, parts = await self._queue.get()
            if parts:
                return [self._of_all(at, part) for part in parts]
            await self._pumps[at]  # raises its error
        return []

    async def _pump(self, at: int, stream: Stream) -> None:
        try:
            while parts := await stream.take():
                self._queue.put_nowait((at, parts))
        finally:
            self._queue.put_nowait((at, []))

    def _of_all(self, at: int, part: Part) -> Part:
        """Returns a part of one prompt as a part of all: with the index of its choice among all
        choices, and the progress of all prompts together."""
        if isinstance(part, Delta):
            index = part.choice + at * self._choices
            return Delta(part.kind, part.text, part.token_ids, part.logprobs, index, part.seconds)
        self._progress[at] = part
        found = self._progress.values()
        return Progress(
            sum(one.done for one in found),
            sum(one.total for one in found),
            sum(one.cached for one in found),
        )

    def replies(self) -> list[Reply]:
        """Returns the replies, one for each prompt, after the last part.

        Raises:
            Error: one ended with an error.
        """
        found = [stream.reply for stream in self._streams]
        replies = [reply for reply in found if reply is not None]
        raise_failed(replies)
        return replies

    async def aclose(self) -> None:
        """Stops all generations and waits for their ends. Idempotent."""
        waiting = [task for task in (self._ahead, *self._pumps) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(one.aclose() for one in self._streams), return_exceptions=True)


async def whole(request: Request, parts: Parts) -> list[Reply]:
    """Waits for the replies, one for each prompt. All generations stop when one fails or the client
    disconnects.

    Raises:
        Disconnected: the client has closed the connection.
        Error: the engine has refused the request, or a generation
            failed.
    """

    async def replies() -> list[Reply]:
        while await parts.take():
            pass
        return parts.replies()

    try:
        return await answered(request, replies())
    finally:
        await parts.aclose()


async def answer(
    envelope: Envelope,
    choices: Sequence[Fields],
    replies: Sequence[Reply],
    headers: Mapping[str, str] | None = None,
    *,
    in_thread: bool = False,
) -> Response:
    """Returns the whole answer as a response.

    Args:
        envelope: the fields of the answer.
        choices: the fields of each choice. A function is called for the JSON of its field.
        replies: the replies, one for each prompt.
        headers: further headers.
        in_thread: whether to encode it in another thread, as log-probabilities take long.
    """

    def encoded() -> bytes:
        fields: Fields = {
            **envelope.fields,
            "choices": lambda: f"[{','.join(_object(choice) for choice in choices)}]",
            "usage": usage(replies),
            "metrics": metrics(replies),
        }
        return _object(fields).encode()

    content = await shared.run(encoded) if in_thread else encoded()
    return Response(content, media_type="application/json", headers=headers)


def _object(fields: Fields) -> str:
    """Returns the JSON of an object. It is made in parts, so that no other thread waits long."""
    found = (
        f"{compact(name)}:{value() if callable(value) else compact(value)}"
        for name, value in fields.items()
    )
    return "{" + ",".join(found) + "}"


async def streamed(
    request: Request,
    parts: Parts,
    chunks: Chunks,
    *,
    choices: int = 1,
    progress: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns the events of some generations as a response.

    Args:
        request: the request. Its disconnect stops the generations.
        parts: the parts of the generations.
        chunks: makes the events.
        choices: number of all choices.
        progress: whether the progress of the prompt is reported.
        headers: further headers.

    Raises:
        Disconnected: the client has closed the connection.
        Error: the engine has refused the request, or a generation
            failed before its first part, and soon.
    """
    begun = time.perf_counter()
    try:
        await answered(request, parts.started())
    except BaseException:
        await parts.aclose()
        raise
    events = _events(parts, chunks, range(choices), begun, progress, fields_of(request))
    return EventStream.of(request, events, headers)


async def _events(
    parts: Parts,
    chunks: Chunks,
    indices: range,
    begun: float,
    progress: bool,
    fields: Mapping[str, str],
) -> AsyncIterator[bytes]:
    try:
        before = b"".join([chunks.begin(index) for index in indices])
        if before and not parts.is_ready:
            yield before
            before = b""
        while found := await parts.take():
            data = [
                chunks.delta(part.choice, part)
                if isinstance(part, Delta)
                else chunks.progress(part, time.perf_counter() - begun)
                for part in found
                if progress or isinstance(part, Delta)
            ]
            if before or any(data):
                yield before + b"".join(data)
                before = b""
        replies = parts.replies()
        ends = all_choices(replies)
        last = len(ends) - 1
        ending = [chunks.finish(i, one, replies, i == last) for i, one in enumerate(ends)]
        yield b"".join([before, *ending, chunks.end(replies)])
    except Error as error:
        yield failure(named(error, fields))
    except Exception as error:
        yield failure(error)
    finally:
        await parts.aclose()


def failure(error: Exception) -> bytes:
    """Returns the events of an error after a stream has begun."""
    if status_of(error) == 500:
        log_failure("a stream failed", error)
    return event(json.dumps(error_object(error))) + DONE
