"""A response while it is generated: its object, and its events for any number of readers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from lmchat.aio_stream import AsyncFollower
from lmchat.errors import Error
from lmchat.generation.generation import Generation
from lmchat.generation.parts import Delta
from lmchat.generation.reply import Reply
from lmchat.server.event_stream import event
from lmchat.server.responses import items
from lmchat.server.responses.objects import failure, response_object, status_of
from lmchat.text.tokenizer import Tokenizer

KEPT_SECONDS = 300.0
"""Time after its end in which a response's events can be read again."""


class EventLog:
    """Encoded events in order. Their sequence number is their place, from 0."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.is_ended = False
        self._changed = asyncio.Event()

    def add(self, kind: str, **fields: Any) -> None:
        """Adds an event."""
        number = len(self.events)
        self.events.append(
            event(json.dumps({"type": kind, "sequence_number": number, **fields}), kind)
        )
        self._wake()

    def end(self) -> None:
        """Ends the log."""
        self.is_ended = True
        self._wake()

    async def read(self, first: int = 0) -> AsyncIterator[bytes]:
        """Yields the events from number `first` on, until the log has ended."""
        at = first
        while True:
            changed = self._changed
            if at < len(self.events):
                yield self.events[at]
                at += 1
            elif self.is_ended:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Run:
    """One response that is generated now, or was a short time ago.

    Args:
        generation: the generation.
        response_id: id of the response.
        item_id: returns the id of an item of a kind, "msg" or "rs".
        owner: the owner.
        model: name of the served model.
        record: what the response repeats of its request.
        conversation: id of the response's conversation, if any.
        tokenizer: spells tokens for log-probabilities; None: there are none.
        with_events: whether events are made.
    """

    def __init__(
        self,
        generation: Generation,
        response_id: str,
        item_id: Callable[[str], str],
        *,
        owner: str,
        model: str,
        record: dict[str, Any],
        conversation: str | None,
        tokenizer: Tokenizer | None,
        with_events: bool,
    ) -> None:
        self.generation = generation
        self.id = response_id
        self.owner = owner
        self.record = record
        self.ended_at: float | None = None
        """Time of the end on the clock of `time.monotonic`; None before it."""
        self._item_id = item_id
        self._model = model
        self._conversation = conversation
        self._tokenizer = tokenizer
        self.log = EventLog() if with_events else None
        self._object = self._response("in_progress")
        self._open: _OpenItem | None = None
        self._output: list[dict[str, Any]] = []
        self._task = asyncio.ensure_future(self._produce())

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._object

    async def wait(self) -> dict[str, Any]:
        """Waits for the end and returns the response.

        Raises:
            Error: the generation failed before its first token.
        """
        await asyncio.shield(self._task)
        if self.generation.reply is None:
            self.generation.result()
        return self._object

    def cancel(self) -> None:
        """Stops the generation. What was produced is kept."""
        self.generation.cancel()

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return response_object(
            self.id, self._model, self.record, status=status,
            conversation=self._conversation, **fields,
        )  # fmt: skip

    async def _produce(self) -> None:
        """Turns the parts of the reply into events until it ends."""
        self._event("response.created", response=self._object)
        self._event("response.in_progress", response=self._object)
        try:
            async with AsyncFollower(self.generation.follow()) as follower:
                if self.log is not None:
                    async for part in follower.events():
                        if isinstance(part, Delta):
                            self._take(part)
                reply = await follower.result()
        except Error as error:
            self._finish("failed", error=failure(error))
        else:
            self._end(reply)
        finally:
            self.ended_at = time.monotonic()
            if self.log is not None:
                self.log.end()

    def _take(self, delta: Delta) -> None:
        if self._open is None or self._open.kind != delta.kind:
            if not delta.text:
                return
            self._close_item("completed")
            self._open = _OpenItem(delta.kind, len(self._output))
            self._begin_item(self._open)
        self._open.text.append(delta.text)
        if delta.text:
            self._delta(self._open, delta)

    def _end(self, reply: Reply) -> None:
        status = status_of(reply.finish_reason)
        whole = "completed" if status == "completed" else "incomplete"
        self._close_item(whole)
        output: list[dict[str, Any]] = []
        if reply.reasoning:
            output.append(items.reasoning_item(self._item_id("rs"), reply.reasoning, whole))
        if reply.text or not reply.reasoning:
            logprobs = self._logprobs(reply.token_ids, reply.logprobs)
            output.append(items.message_item(self._item_id("msg"), reply.text, whole, logprobs))
        error = failure(reply.error) if status == "failed" else None
        self._finish(status, output=output, usage=reply.usage, error=error)

    def _finish(self, status: str, **fields: Any) -> None:
        self._object = self._response(status, **fields)
        # A cancelled response has no event of its own; "incomplete" is what its stream ends with.
        kind = {"completed": "completed", "failed": "failed"}.get(status, "incomplete")
        self._event(f"response.{kind}", response=self._object)

    # --- events of items -------------------------------------------------------------------------

    def _begin_item(self, item: _OpenItem) -> None:
        self._event(
            "response.output_item.added", output_index=item.index, item=self._item(item, None)
        )
        self._event("response.content_part.added", **self._place(item), part=self._part(item, ""))

    def _delta(self, item: _OpenItem, delta: Delta) -> None:
        if item.kind == "reasoning":
            self._event("response.reasoning_text.delta", **self._place(item), delta=delta.text)
            return
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        self._event(
            "response.output_text.delta", **self._place(item), delta=delta.text, logprobs=logprobs
        )

    def _close_item(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.text)
        more: dict[str, Any] = {} if item.kind == "reasoning" else {"logprobs": []}
        name = "reasoning_text" if item.kind == "reasoning" else "output_text"
        self._event(f"response.{name}.done", **self._place(item), text=text, **more)
        self._event("response.content_part.done", **self._place(item), part=self._part(item, text))
        whole = self._item(item, text, status)
        self._event("response.output_item.done", output_index=item.index, item=whole)
        self._output.append(whole)

    def _place(self, item: _OpenItem) -> dict[str, Any]:
        kind = "rs" if item.kind == "reasoning" else "msg"
        return {
            "item_id": self._item_id(kind), "output_index": item.index, "content_index": 0
        }  # fmt: skip

    def _item(
        self, item: _OpenItem, text: str | None, status: str = "in_progress"
    ) -> dict[str, Any]:
        if item.kind == "reasoning":
            return items.reasoning_item(self._item_id("rs"), text, status)
        return items.message_item(self._item_id("msg"), text, status)

    def _part(self, item: _OpenItem, text: str) -> dict[str, Any]:
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return items.text_part(text)

    def _logprobs(self, token_ids: Any, logprobs: Any) -> list[dict[str, Any]]:
        if self._tokenizer is None or not logprobs:
            return []
        return [
            {
                **self._token(token, one.logprob),
                "top_logprobs": [self._token(other, value) for other, value in one.top],
            }
            for token, one in zip(token_ids, logprobs, strict=False)
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._tokenizer is not None
        raw = self._tokenizer.bytes_of(token)
        text = self._tokenizer.raw([token]) if raw is None else raw.decode("utf-8", "replace")
        spelled = text.encode() if raw is None else raw
        return {"token": text, "bytes": list(spelled), "logprob": logprob}

    def _event(self, kind: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.add(kind, **fields)


class _OpenItem:
    """An item of the output that grows: its kind, its place, and its text so far."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.text: list[str] = []


class Runs:
    """The responses that are generated now, and those that ended a short time ago."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    def add(self, run: Run) -> None:
        """Adds a response, and drops those that ended some time ago."""
        now = time.monotonic()
        for one in list(self._runs.values()):
            if one.ended_at is not None and now - one.ended_at > KEPT_SECONDS:
                del self._runs[one.id]
        self._runs[run.id] = run

    def find(self, response_id: str, owner: str) -> Run | None:
        """Returns the owner's response of this id, or None."""
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    def remove(self, response_id: str) -> None:
        """Forgets a response."""
        self._runs.pop(response_id, None)
