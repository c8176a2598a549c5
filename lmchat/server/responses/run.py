"""A response while it is generated: its object, and its events for any number of readers."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from lmchat.aio.stream import AsyncFollower
from lmchat.aio.threads import shared
from lmchat.errors import Error
from lmchat.generation.parts import Delta
from lmchat.generation.reply import Reply
from lmchat.server.dialects.results import TokenNames
from lmchat.server.errors import log_failure
from lmchat.server.http.event_stream import event
from lmchat.server.responses import items
from lmchat.server.responses.objects import failure, response_object, status_of
from lmchat.server.responses.spliced import ENTRIES, encoded
from lmchat.server.retries.entry import Answer
from lmchat.text.tokenizer import Tokenizer
from turbomind import TokenLogprobs

KEPT_SECONDS = 300.0
"""Time after its end in which a background response's events can be read again."""

KEPT_BYTES = 64 << 20
"""Largest size of all events of one owner's ended responses."""

_AT_ONCE = 64  # events that a late reader gets in one piece


class EventLog:
    """Encoded events in order. Their sequence number is their place, from 0."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.size = 0
        """Size of all events, in bytes."""
        self.is_ended = False
        self._changed = asyncio.Event()

    def add(self, kind: str, entries: Sequence[str] = (), **fields: Any) -> None:
        """Adds an event. `entries` is the JSON of the log-probabilities that it contains."""
        fields = {"type": kind, "sequence_number": len(self.events), **fields}
        self.events.append(event(encoded(fields, entries), kind))
        self.size += len(self.events[-1])
        self._wake()

    def end(self) -> None:
        """Ends the log."""
        self.is_ended = True
        self._wake()

    async def read(self, first: int = 0) -> AsyncIterator[bytes]:
        """Yields the events from number `first` on, some in one piece, until the log has ended."""
        at = first
        while True:
            changed = self._changed
            if found := self.events[at : at + _AT_ONCE]:
                yield b"".join(found)
                at += len(found)
                if at < len(self.events):
                    await asyncio.sleep(0)  # a long log does not occupy the loop
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
        drop_empty: called on another thread after the end of a reply that has no turn, if any.
        whole: returns the reply of the response, from the finished one.
    """

    def __init__(
        self,
        generation: Answer,
        response_id: str,
        item_id: Callable[[str], str],
        *,
        owner: str,
        model: str,
        record: dict[str, Any],
        conversation: str | None,
        tokenizer: Tokenizer | None,
        with_events: bool,
        drop_empty: Callable[[], None] | None = None,
        whole: Callable[[Reply], Reply] = lambda reply: reply,
    ) -> None:
        self.generation = generation
        self.id = response_id
        self.owner = owner
        self.record = record
        self._item_id = item_id
        self._model = model
        self._conversation = conversation
        self._names = None if tokenizer is None else TokenNames(tokenizer)
        self.log = EventLog() if with_events else None
        self._object = self._response("in_progress")
        self._open: _OpenItem | None = None
        self._output: list[dict[str, Any]] = []
        self._entries: list[str] = []  # JSON of the log-probabilities of the text's tokens so far
        self._in_events = 0  # of these, those that are in an event
        self._drop_empty = drop_empty
        self._whole = whole
        self._failed: Error | None = None  # before its first token
        self._task = asyncio.ensure_future(self._produce())

    @property
    def is_stored(self) -> bool:
        """Whether the response has ended and is in the store."""
        return self._task.done() and self._has_turn

    @property
    def _has_turn(self) -> bool:
        reply = self.generation.reply
        return reply is not None and reply.turn is not None

    @property
    def size(self) -> int:
        """Size of its events, in bytes."""
        return self.log.size if self.log is not None else 0

    def when_ended(self, call: Callable[[Run], None]) -> None:
        """Calls `call` on the loop after the end."""
        self._task.add_done_callback(lambda _: call(self))

    @property
    def response(self) -> str:
        """JSON of the response as it is now."""
        return encoded(self._object, self._entries)

    async def wait(self) -> str:
        """Waits for the end and returns the JSON of the response."""
        await asyncio.shield(self._task)
        return self.response

    async def result(self) -> str:
        """Waits for the end and returns the JSON of the response.

        Raises:
            Error: the generation failed before its first token.
        """
        await self.wait()
        if self._failed is not None:
            raise self._failed
        return self.response

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
                if self.log is not None or self._names is not None:
                    async for part in follower.events():
                        if isinstance(part, Delta):
                            self._take(part)
                reply = await follower.result()
            self._end(self._whole(reply))
        except Exception as error:
            if not isinstance(error, Error):
                self.generation.cancel()
                log_failure("a response failed", error)
            elif self.generation.reply is None:
                self._failed = error
            self._finish("failed", error=failure(error))
        finally:
            if self._drop_empty is not None and not self._has_turn:
                await shared.run(self._drop_empty)
            if self.log is not None:
                self.log.end()

    def _take(self, delta: Delta) -> None:
        """Takes a part of the reply. Tokens whose text is held back go with the next text."""
        if delta.kind == "text":
            self._entries += self._logprobs(delta.token_ids, delta.logprobs)
        if not delta.text:
            return
        if self._open is None or self._open.kind != delta.kind:
            self._close_item("completed")
            self._open = _OpenItem(delta.kind, len(self._output))
            self._begin_item(self._open)
        self._open.text.append(delta.text)
        self._delta(self._open, delta)

    def _end(self, reply: Reply) -> None:
        status = status_of(reply.finish_reason)
        whole = "completed" if status == "completed" else "incomplete"
        self._close_item(whole)
        output: list[dict[str, Any]] = []
        if reply.reasoning:
            output.append(items.reasoning_item(self._item_id("rs"), reply.reasoning, whole))
        if reply.text or status == "completed":
            item_id = self._item_id("msg")
            output.append(items.message_item(item_id, reply.text, whole, ENTRIES))
        if len(output) > len(self._output):
            self._whole_item(output[-1])
        error = failure(reply.error) if status == "failed" else None
        self._finish(status, output=output, usage=reply.usage, error=error)

    def _whole_item(self, item: dict[str, Any]) -> None:
        """Adds the events of a message without text."""
        index = len(self._output)
        self._event("response.output_item.added", output_index=index, item=item)
        self._event("response.output_item.done", output_index=index, item=item)

    def _finish(self, status: str, **fields: Any) -> None:
        self._object = self._response(status, **fields)
        # A cancelled response has no event of its own; "incomplete" is what its stream ends with.
        kind = {"completed": "completed", "failed": "failed"}.get(status, "incomplete")
        self._event(f"response.{kind}", self._entries, response=self._object)

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
        found, self._in_events = self._entries[self._in_events :], len(self._entries)
        self._event(
            "response.output_text.delta",
            found,
            **self._place(item),
            delta=delta.text,
            logprobs=ENTRIES,
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

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[str]:
        found = self._names.chat(token_ids, logprobs) if self._names and logprobs else []
        return [json.dumps(one) for one in found]

    def _event(self, kind: str, entries: Sequence[str] = (), **fields: Any) -> None:
        if self.log is not None:
            self.log.add(kind, entries, **fields)


class _OpenItem:
    """An item of the output that grows: its kind, its place, and its text so far."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.text: list[str] = []


class Runs:
    """The responses that are generated now, and background ones that ended a short time ago."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._ended: OrderedDict[str, Run] = OrderedDict()  # the last one last

    def add(self, run: Run) -> None:
        """Adds a response. One that is not in the background leaves when it ends."""
        self._runs[run.id] = run
        run.when_ended(self._has_ended)

    def find(self, response_id: str, owner: str) -> Run | None:
        """Returns the owner's response of this id, or None."""
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    def remove(self, response_id: str) -> None:
        """Forgets a response."""
        self._runs.pop(response_id, None)
        self._ended.pop(response_id, None)

    def _has_ended(self, run: Run) -> None:
        if run.record.get("background") and run.id in self._runs:
            self._ended[run.id] = run
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self.remove, run.id)
        else:
            self.remove(run.id)
        ended = [one for one in self._ended.values() if one.owner == run.owner]
        size = sum(one.size for one in ended)
        for oldest in ended:
            if size <= KEPT_BYTES:
                return
            size -= oldest.size
            self.remove(oldest.id)
