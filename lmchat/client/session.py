"""`RemoteSession`: a session behind a server, with the names of `Session`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import httpx
from typing_extensions import Unpack, override

from lmchat.archive.archive import replacing
from lmchat.client.generation import LINGER, RemoteGeneration
from lmchat.client.http import ANSWER_SECONDS, Connection
from lmchat.client.record import DETAILS, RemoteRecord
from lmchat.client.values import branch_of, reply_of, turn_of
from lmchat.errors import Error, NotFound, Unreachable
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.generation.settings import GenerationSettings, as_json
from lmchat.interface.session import Branch
from lmchat.store.records import Exported
from lmchat.store.turns import Turn
from turbomind import Residence
from turbomind.params import wrong


class Opener(Protocol):
    """The engine of remote sessions."""

    def opened(self, data: Mapping[str, Any]) -> RemoteSession:
        """Returns the session that the server has sent."""

    def closed(self, session: RemoteSession) -> None:
        """Records that a session has closed."""


class RemoteSession(RemoteRecord):
    """A `SessionApi` behind a server, made by `RemoteEngine.session()`.

    Its properties are those that the
    last request of this client left or found; `refresh()` reads what others have changed. Closing
    it leaves the session on the server open.
    """

    def __init__(
        self, connection: Connection, owner: str, data: Mapping[str, Any], opener: Opener
    ) -> None:
        super().__init__(connection, owner, data)
        self._opener = opener
        self._generation: RemoteGeneration | None = None

    # --- generating ------------------------------------------------------------------------------

    @override
    def start_send(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
        overflow: str | None = None,
        keep_question: bool = True,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        body = {
            "text": text,
            "template_variables": template_variables,
            "after": after,
            "before": [dict(one) for one in before],
            "system": system,
            "overflow": overflow,
            "keep_question": keep_question,
            "metadata": metadata,
        }
        return self._start("turns", settings, body)

    @override
    def start_continue(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        return self._start("continue", settings, {"metadata": metadata})

    @override
    def start_retry(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        return self._start("retry", settings, {"metadata": metadata})

    @override
    def start_edit(
        self,
        turn: int,
        text: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        return self._start("edit", settings, {"turn": turn, "text": text, "metadata": metadata})

    def _start(
        self, verb: str, settings: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> RemoteGeneration:
        self._check_open()
        body = {
            "settings": plain(settings),
            "stream": True,
            "token_ids": True,
            "linger": LINGER,
            **(more or {}),
        }
        answer = self._connection.open("POST", f"{self._path}/{verb}", body)
        generation = self._attached(answer)
        self._reading.begins(lambda _: generation.cancel())
        self._generation = generation
        return generation

    def _attached(self, answer: httpx.Response) -> RemoteGeneration:
        return RemoteGeneration(self._connection, answer, self._path, self._ended)

    def _ended(self, turn_id: int | None) -> Turn | None:
        """Reads the session after a reply, and returns the reply's turn."""
        with contextlib.suppress(NotFound, Unreachable):  # deleted meanwhile; the reply is known
            self._reload()
        return next((turn for turn in self._turns[::-1] if turn.id == turn_id), None)

    @property
    @override
    def running(self) -> RemoteGeneration | None:
        found = self._generation
        return None if found is None or found.done else found

    @property
    @override
    def ending(self) -> RemoteGeneration | None:
        found = self.running
        return found if found is not None and found.cancelled else None

    @override
    def stop(self, turn: int | None = None) -> Reply | None:
        self._check_open()
        running = self.running
        if running is not None:
            if turn not in (None, running.turn_id):
                return None
            running.cancel()
            running.wait()
            return running.log.reply
        found = self._call("stop", {} if turn is None else {"turn": turn})
        if not found["stopped"]:
            return None
        return reply_of(found["reply"], self._ended(found["reply"]["turn"]))

    @override
    def follow(self, turn: int | None = None) -> Follower:
        self._check_open()
        running = self.running
        if running is not None and turn in (None, running.turn_id):
            return running.follow()
        query = {"token_ids": "true"} | ({} if turn is None else {"turn": str(turn)})
        answer = self._connection.open("GET", f"{self._path}/events", query=query)
        found = self._attached(answer)
        return Follower(found.log, found.detach)

    # --- moving in the conversation --------------------------------------------------------------

    @override
    def undo(self) -> str:
        text = self._call("undo")["text"]
        self._reload()
        return str(text)

    @override
    def branches(self, turn: int) -> list[Branch]:
        self._check_open()
        query = {**DETAILS, "turn": str(turn)}
        found = self._connection.call("GET", f"{self._path}/branches", query=query)
        return [branch_of(one) for one in found["data"]]

    @override
    def switch(self, turn: int, index: int) -> None:
        self._call("switch", {"turn": turn, "index": index})
        self._reload()

    @override
    def fork(
        self,
        name: str | None = None,
        at: int | None = None,
        *,
        after: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> RemoteSession:
        body = {"name": name, "at": at, "after": after, "tags": _tags(tags)}
        return self._opener.opened(self._call("fork", body, query=DETAILS))

    @override
    def append(self, messages: Sequence[Mapping[str, Any]], *, system: str | None = None) -> None:
        self._call("append", {"messages": [dict(one) for one in messages], "system": system})
        self.refresh()

    @override
    def edit_reply(self, turn: int, text: str) -> None:
        self._call("edit_reply", {"turn": turn, "text": text})
        self._reload()

    @override
    def conversation(self, reply: int) -> tuple[Turn, ...]:
        self._check_open()
        query = {**DETAILS, "reply": str(reply)}
        found = self._connection.call("GET", f"{self._path}/conversation", query=query)
        return tuple(turn_of(one) for one in found["data"])

    @property
    @override
    def replies(self) -> tuple[Turn, ...]:
        self._check_open()
        found = self._connection.call("GET", f"{self._path}/replies", query=DETAILS)
        return tuple(turn_of(one) for one in found["data"])

    @override
    def annotate(self, turn: int, metadata: Mapping[str, Any]) -> None:
        self._call("annotate", {"turn": turn, "metadata": dict(metadata)})
        self.refresh()

    @override
    def count_tokens(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
    ) -> int:
        body = {
            "text": text,
            "template_variables": template_variables,
            "after": after,
            "before": [dict(one) for one in before],
            "system": system,
        }
        return int(self._call("count_tokens", body)["count"])

    # --- settings and life -----------------------------------------------------------------------

    @override
    def _update(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            if value is None:  # which a server reads as a property that is not given
                raise wrong(name, None, "a value")
        self._patch(**{name: _SENT.get(name, _same)(value) for name, value in changes.items()})

    @override
    def rename(self, name: str) -> None:
        self._patch(name=name)

    @override
    def warm(self) -> None:
        self._call("warm")

    @property
    @override
    def residence(self) -> Residence:
        found = self._forecast(32)["residence"]
        return Residence(found["device"], found["host"], found["disk"])

    @override
    def predicted_ttft(self, new_tokens: int = 32) -> float:
        return float(self._forecast(new_tokens)["predicted_ttft"])

    def _forecast(self, new_tokens: int) -> dict[str, Any]:
        self._check_open()
        query = {"residence": "true", "new_tokens": str(new_tokens)}
        if self._turns:
            query["known"] = str(self._turns[-1].id)  # without the turns
        return self._connection.call("GET", self._path, query=query)

    @override
    def export(
        self,
        path: str | os.PathLike[str],
        pages: bool = False,
        *,
        force: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> Exported:
        self._check_open()
        file = Path(path)
        if file.exists() and not force:
            raise wrong("path", str(file), "a new name, or force to replace what exists")
        query = {"pages": "true"} if pages else {}
        answer = self._connection.open(
            "GET", f"{self._path}/export", query=query, silence=ANSWER_SECONDS
        )

        def write(opened: IO[bytes]) -> int:
            try:
                return sum(opened.write(piece) for piece in answer.iter_bytes(1 << 20))
            except httpx.HTTPError as error:
                raise self._connection.lost(error) from error

        with contextlib.closing(answer):
            size = replacing(file, force, write)
        head = answer.headers
        for notice in json.loads(head["x-lmchat-left-out"]):
            if notify is not None:
                notify(notice)
        return Exported(str(file), int(head["x-lmchat-turns"]), int(head["x-lmchat-pages"]), size)

    @override
    def close(self) -> None:
        """Stops the generation of this client. The session stays on the server. Idempotent."""
        running = self.running
        if running is not None:
            running.cancel()
            running.wait()
        self._is_closed = True
        self._opener.closed(self)

    @override
    def delete(self) -> None:
        self._connection.call("DELETE", self._path)
        with contextlib.suppress(Error):
            self.close()

    def __repr__(self) -> str:
        return f"<RemoteSession {self.name!r} at {self._connection.url}: {self.length} tokens>"


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as JSON values: sequences as lists."""
    found = as_json(settings)
    for name, value in found.items():
        if isinstance(value, tuple | frozenset | range):
            found[name] = [list(one) if isinstance(one, tuple) else one for one in value]
        elif not isinstance(value, str | int | float | list | dict | bool | None):
            try:
                found[name] = dict(value) if isinstance(value, Mapping) else list(value)
            except TypeError:
                raise wrong(name, value, "a JSON value") from None
    return found


def _tags(tags: Any) -> Any:
    return tags if tags is None or isinstance(tags, str) else list(tags)


def _same(value: Any) -> Any:
    return value


_SENT: dict[str, Callable[[Any], Any]] = {
    "tags": _tags,
    "metadata": dict,
    "settings": plain,
}
"""Property -> what makes JSON of its value, where that may be another type."""
