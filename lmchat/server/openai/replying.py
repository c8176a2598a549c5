"""From running generations to a response: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lmchat.aio_stream import AsyncReplyStream
from lmchat.errors import InvalidRequest
from lmchat.generation.parts import Delta, Part, Progress
from lmchat.generation.reply import Reply
from lmchat.server.errors import error_object, status_of
from lmchat.server.event_stream import Disconnected, EventStream, answered, event
from lmchat.server.openai.chunks import DONE, Chunks
from lmchat.server.openai.results import all_choices, raise_failed
from lmchat.server.openai.sampling import in_fields

Result = TypeVar("Result")

SILENT_START = 1.0
"""Longest time in seconds for which a stream waits for its first part before it answers 200. An
error within it is answered with its own status."""

CLIENT_CLOSED = 499
"""Status of a response that no client reads."""


class Parts:
    """The parts of one generation or several, in the order in which they come.

    Args:
        streams: one stream for each prompt.
        choices: number of choices of each.
    """

    def __init__(self, streams: Sequence[AsyncReplyStream], choices: int = 1) -> None:
        self._streams = list(streams)
        self._choices = choices
        self._events = streams[0].events() if len(streams) == 1 else self._merged()
        self._ahead: asyncio.Future[Part | None] | None = None
        self._pumps: Sequence[asyncio.Future[None]] = ()

    async def started(self, seconds: float = SILENT_START) -> None:
        """Waits for the first part, at most for some time.

        Raises:
            Error: the generation failed before it.
        """
        self._ahead = asyncio.ensure_future(self._next())
        await asyncio.wait({self._ahead}, timeout=seconds)
        if self._ahead.done():
            self._ahead.result()

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Part:
        ahead, self._ahead = self._ahead, None
        part = await (ahead if ahead is not None else self._next())
        if part is None:
            raise StopAsyncIteration
        return part

    async def _next(self) -> Part | None:
        return await anext(self._events, None)

    async def _merged(self) -> AsyncIterator[Part]:
        """Yields the parts of all streams, with the indices of their choices among all. Progress is
        that of all prompts together."""
        queue: asyncio.Queue[tuple[int, Part | None]] = asyncio.Queue()
        pumps = [asyncio.ensure_future(_pump(i, one, queue)) for i, one in enumerate(self._streams)]
        self._pumps = pumps
        progress: dict[int, Progress] = {}
        running = len(pumps)
        while running:
            at, part = await queue.get()
            if part is None:
                running -= 1
                await pumps[at]  # raises its error
            elif isinstance(part, Progress):
                progress[at] = part
                yield _sum(list(progress.values()))
            else:
                yield _moved(part, at * self._choices)

    def replies(self) -> list[Reply]:
        """Returns the replies, one for each prompt, after the last part."""
        found = [stream.reply for stream in self._streams]
        return [reply for reply in found if reply is not None]

    async def aclose(self) -> None:
        """Stops all generations and waits for their ends. Idempotent."""
        waiting = [task for task in (self._ahead, *self._pumps) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(one.aclose() for one in self._streams), return_exceptions=True)


async def _pump(
    at: int, stream: AsyncReplyStream, queue: asyncio.Queue[tuple[int, Part | None]]
) -> None:
    try:
        async for part in stream.events():
            queue.put_nowait((at, part))
    finally:
        queue.put_nowait((at, None))


def _moved(delta: Delta, by: int) -> Delta:
    return Delta(
        delta.kind, delta.text, delta.token_ids, delta.logprobs, delta.choice + by, delta.seconds
    )


def _sum(found: Sequence[Progress]) -> Progress:
    return Progress(
        sum(one.done for one in found),
        sum(one.total for one in found),
        sum(one.cached for one in found),
    )


async def until_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | Response:
    """Awaits `work`, and cancels it when the client disconnects; then returns a response that no
    client reads.

    Raises:
        HttpError: the engine has refused the request, in the words of its fields.
        Error: the work failed otherwise.
    """
    try:
        return await answered(request, work)
    except Disconnected:
        return Response(status_code=CLIENT_CLOSED)
    except InvalidRequest as error:
        raise in_fields(error) from error


async def whole(streams: Sequence[AsyncReplyStream]) -> list[Reply]:
    """Waits for the replies, one for each prompt. All generations stop when one fails or the wait
    is cancelled.

    Raises:
        Error: a generation failed.
    """
    waits = [asyncio.ensure_future(stream.result()) for stream in streams]
    try:
        replies = list(await asyncio.gather(*waits))
    except BaseException:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        raise
    raise_failed(replies)
    return replies


async def streamed(
    request: Request,
    streams: Sequence[AsyncReplyStream],
    chunks: Chunks,
    *,
    choices: int = 1,
    progress: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns the events of some generations as a response.

    Args:
        request: the request. Its disconnect stops the generations.
        streams: one stream for each prompt.
        chunks: makes the events.
        choices: number of choices of each prompt.
        progress: whether the progress of the prompt is reported.
        headers: further headers.

    Raises:
        Error: a generation failed before its first part, and soon.
    """
    begun = time.perf_counter()
    parts = Parts(streams, choices)
    try:
        gone = await until_gone(request, parts.started())
    except BaseException:
        await parts.aclose()
        raise
    if gone is not None:
        await parts.aclose()
        return gone
    indices = range(choices * len(streams))
    return EventStream.of(request, _events(parts, chunks, indices, begun, progress), headers)


async def _events(
    parts: Parts, chunks: Chunks, indices: range, begun: float, progress: bool
) -> AsyncIterator[bytes]:
    try:
        first = b"".join([chunks.begin(index) for index in indices])
        if first:
            yield first
        async for part in parts:
            if isinstance(part, Delta):
                data = chunks.delta(part.choice, part)
                if data:
                    yield data
            elif progress:
                yield chunks.progress(part, time.perf_counter() - begun)
        replies = parts.replies()
        raise_failed(replies)
        ends = all_choices(replies)
        for index, reply in enumerate(ends):
            yield chunks.finish(index, reply, replies, index == len(ends) - 1)
        yield chunks.end(replies)
    except Exception as error:
        yield failure(error)
    finally:
        await parts.aclose()


def failure(error: Exception) -> bytes:
    """Returns the events of an error after a stream has begun."""
    if status_of(error) == 500:
        logging.getLogger(__name__).error("a stream failed", exc_info=error)
    return event(json.dumps(error_object(error))) + DONE
