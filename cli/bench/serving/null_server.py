"""Measures the client itself: the same load on a server in this process that computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from dataclasses import dataclass
from typing import Any

from .endpoint import Endpoint
from .figures import spread
from .load import Load, Window
from .schedule import Conversation, PlannedTurn
from .turn import Outcome

DELAY = 0.02  # seconds from a request to its first event
REPLY_SECONDS, MOST_EVENTS = 1.0, 200  # of a reply, at most
SHORTEST_GAP = 1e-4  # seconds; events of one write have none
SETTLE_SECONDS = 0.5  # in which all streams have started


@dataclass(frozen=True)
class NullLoad:
    """Streams at once, and seconds between two events of a stream."""

    streams: int
    gap: float

    @property
    def events(self) -> int:
        """Events of a reply."""
        return min(max(2, math.ceil(REPLY_SECONDS / self.gap)), MOST_EVENTS)


class NullServer:
    """Answers each completion with events at given times: the first after DELAY, then every gap.

    Args:
        load: The number of events of a reply, and their distance.
    """

    def __init__(self, load: NullLoad) -> None:
        self._load = load
        delta = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
        event = {
            "id": "chatcmpl-00000000000000000000000000000000",
            "object": "chat.completion.chunk",
            "created": 1700000000,
            "model": "null",
            "choices": [delta],
        }
        usage = {"prompt_tokens": 1, "completion_tokens": load.events, "total_tokens": 1}
        self._event = _chunk(event)
        self._last = _chunk({**event, "choices": [], "usage": usage}) + _chunk(None) + b"0\r\n\r\n"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listens on a free port of the loopback interface; returns the URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A cancelled task ends as usual: asyncio reports one that does not.
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                at = asyncio.get_running_loop().time() + DELAY
                _, found, rest = head.partition(b"content-length:")
                if found:
                    await reader.readexactly(int(rest.partition(b"\r\n")[0]))
                await self._reply(writer, at)
        writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, first: float) -> None:
        loop = asyncio.get_running_loop()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for index in range(self._load.events):
            left = first + index * self._load.gap - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            writer.write(self._event)
        writer.write(self._last)
        await writer.drain()

    async def close(self) -> None:
        """Stops listening and closes the connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()


def _chunk(event: object) -> bytes:
    """Returns an event, None for the last one, as a chunk of the body."""
    data = b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def client_overhead(
    load: NullLoad, seconds: float, message: str, stop: asyncio.Event
) -> dict[str, Any] | None:
    """Returns what the client adds to latencies under a load, or None where `stop` cut it.

    The null server runs on the same event loop, so its own work is included: the figures are
    upper bounds.

    Args:
        load: The streams to keep busy.
        seconds: Length of the measurement.
        message: The message of each request.
        stop: Ends the measurement.
    """
    server = NullServer(load)
    endpoint = Endpoint(await server.start(), model="null")
    reply = DELAY + (load.events - 1) * load.gap
    turns = math.ceil((seconds + SETTLE_SECONDS) / reply) + 1
    turn = PlannedTurn(message, 1, load.events, 0.0)
    starts = [index * SETTLE_SECONDS / load.streams for index in range(load.streams)]
    conversations = [Conversation(at, (turn,) * turns) for at in starts]
    # With a session only the new message is sent, as in the first turn of each conversation.
    run = Load(endpoint.send, conversations, Window(SETTLE_SECONDS, seconds), session="null")
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        observed = await run.run(stop)
    finally:
        await endpoint.http.close()
        await server.close()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    ended = [each for each in observed.turns if each.outcome is Outcome.FINISHED]
    events = sum(len(each.times) for each in ended)
    if not events:
        return None
    lag = spread(observed.lags)
    return {
        "streams": load.streams,
        "gap": load.gap,
        "events_per_second": events / wall,
        "ttft": spread(each.ttft - DELAY for each in ended if each.ttft is not None),
        "itl": spread(gap - load.gap for each in ended for gap in each.gaps()),
        "cpu_per_event": cpu / events,
        "lag": None if lag is None else {**lag, "max": max(observed.lags)},
    }
