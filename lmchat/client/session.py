"""`RemoteSession`: a session behind a server, with the names of `Session`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NoReturn, Protocol, overload

import httpx
from typing_extensions import Unpack

from lmchat.archive.archive import replacing
from lmchat.client.generation import LINGER, RemoteGeneration
from lmchat.client.http import ANSWER_SECONDS, Connection
from lmchat.client.record import DETAILS, RemoteRecord
from lmchat.client.values import branch_of, reply_of, turn_of
from lmchat.errors import Error, NotFound, Unreachable
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower, ReplyStream
from lmchat.generation.settings import GenerationSettings, as_json
from lmchat.sessions.branches import Branch
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
    """A session behind a server, made by `RemoteEngine.session()`.

    It has the names of `Session`; what these say holds here too. Its properties are those that the
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

    @overload
    def send(
        self,
        text: str,
        *,
        stream: Literal[False] = False,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply: ...
    @overload
    def send(
        self,
        text: str,
        *,
        stream: Literal[True],
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> ReplyStream: ...
    @overload
    def send(
        self,
        text: str,
        *,
        stream: bool,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply | ReplyStream: ...
    def send(
        self,
        text: str,
        *,
        stream: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply | ReplyStream:
        """Generates a reply to `text`, see `Session.send()`.

        Raises:
            Unreachable: the server does not answer.
            Error: as `Session.send()`.
        """
        generation = self.start_send(text, template_variables=template_variables, **settings)
        return _answer(generation, stream)

    def stream(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> ReplyStream:
        """Generates a reply to `text` and returns its stream. If the connection breaks, the stream
        attaches again and goes on where it was."""
        return ReplyStream(self.start_send(text, template_variables=template_variables, **settings))

    @overload
    def continue_(
        self, *, stream: Literal[False] = False, **settings: Unpack[GenerationSettings]
    ) -> Reply: ...
    @overload
    def continue_(
        self, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> ReplyStream: ...
    @overload
    def continue_(
        self, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream: ...
    def continue_(
        self, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream:
        """Extends the last reply in place, with its settings and seed."""
        return _answer(self.start_continue(**settings), stream)

    @overload
    def retry(
        self, *, stream: Literal[False] = False, **settings: Unpack[GenerationSettings]
    ) -> Reply: ...
    @overload
    def retry(
        self, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> ReplyStream: ...
    @overload
    def retry(
        self, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream: ...
    def retry(
        self, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream:
        """Generates another reply to the last user turn, as a new branch."""
        return _answer(self.start_retry(**settings), stream)

    @overload
    def edit(
        self,
        turn: int,
        text: str,
        *,
        stream: Literal[False] = False,
        **settings: Unpack[GenerationSettings],
    ) -> Reply: ...
    @overload
    def edit(
        self, turn: int, text: str, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> ReplyStream: ...
    @overload
    def edit(
        self, turn: int, text: str, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream: ...
    def edit(
        self, turn: int, text: str, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | ReplyStream:
        """Generates a reply to `text` in place of user turn `turn` (from 0), as a new branch."""
        return _answer(self.start_edit(turn, text, **settings), stream)

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
        """Starts `send()` and returns its generation without waiting for it."""
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

    def start_continue(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        """Starts `continue_()` and returns its generation without waiting for it."""
        return self._start("continue", settings, {"metadata": metadata})

    def start_retry(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        """Starts `retry()` and returns its generation without waiting for it."""
        return self._start("retry", settings, {"metadata": metadata})

    def start_edit(
        self,
        turn: int,
        text: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> RemoteGeneration:
        """Starts `edit()` and returns its generation without waiting for it."""
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
        generation = self._generation = self._attached(answer)
        return generation

    def _attached(self, answer: httpx.Response) -> RemoteGeneration:
        return RemoteGeneration(self._connection, answer, self._path, self._ended)

    def _ended(self, turn_id: int | None) -> Turn | None:
        """Reads the session after a reply, and returns the reply's turn."""
        with contextlib.suppress(NotFound, Unreachable):  # deleted meanwhile; the reply is known
            self._reload()
        return next((turn for turn in self._turns[::-1] if turn.id == turn_id), None)

    @property
    def running(self) -> RemoteGeneration | None:
        """Current generation of this client, or None."""
        found = self._generation
        return None if found is None or found.done else found

    @property
    def ending(self) -> RemoteGeneration | None:
        """Generation of this client that was asked to stop and has not ended yet, or None."""
        found = self.running
        return found if found is not None and found.cancelled else None

    def stop(self, turn: int | None = None) -> Reply | None:
        """Stops the current generation, of any client, and waits until its turn is committed.

        Args:
            turn: stops only the reply that becomes this turn. None: any.

        Returns:
            The reply; None if nothing was being generated.
        """
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

    def follow(self, turn: int | None = None) -> Follower:
        """Returns a reader of the reply that is being generated, by any client, which has all of it
        so far. With nothing running it has the last reply, complete.

        Args:
            turn: only the reply that becomes, or is, this turn, of any branch. None: any.

        Raises:
            NotFound: there is no such reply.
        """
        self._check_open()
        running = self.running
        if running is not None and turn in (None, running.turn_id):
            return running.follow()
        query = {"token_ids": "true"} | ({} if turn is None else {"turn": str(turn)})
        answer = self._connection.open("GET", f"{self._path}/events", query=query)
        found = self._attached(answer)
        return Follower(found.log, found.detach)

    # --- moving in the conversation --------------------------------------------------------------

    def undo(self) -> str:
        """Removes the last user turn and its reply from the conversation and returns its text."""
        text = self._call("undo")["text"]
        self._reload()
        return str(text)

    def branches(self, turn: int) -> list[Branch]:
        """Returns the branches at user turn `turn` (from 0), oldest first."""
        self._check_open()
        query = {**DETAILS, "turn": str(turn)}
        found = self._connection.call("GET", f"{self._path}/branches", query=query)
        return [branch_of(one) for one in found["data"]]

    def switch(self, turn: int, index: int) -> None:
        """Switches to the newest conversation of branch `index` of `branches(turn)`."""
        self._call("switch", {"turn": turn, "index": index})
        self._reload()

    def fork(
        self,
        name: str | None = None,
        at: int | None = None,
        *,
        after: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> RemoteSession:
        """Creates a session with the first `at` user turns and their replies (None: all), or with
        the conversation that ends with the reply of id `after`."""
        chosen = tags if tags is None or isinstance(tags, str) else list(tags)
        body = {"name": name, "at": at, "after": after, "tags": chosen}
        return self._opener.opened(self._call("fork", body, query=DETAILS))

    def append(self, messages: Sequence[Mapping[str, Any]], *, system: str | None = None) -> None:
        """Appends messages to the conversation and generates nothing."""
        self._call("append", {"messages": [dict(one) for one in messages], "system": system})
        self.refresh()

    def edit_reply(self, turn: int, text: str) -> None:
        """Gives user turn number `turn` another reply, as a new branch. Generates nothing."""
        self._call("edit_reply", {"turn": turn, "text": text})
        self._reload()

    def conversation(self, reply: int) -> tuple[Turn, ...]:
        """Returns the turns up to the reply of this id, of any branch."""
        self._check_open()
        query = {**DETAILS, "reply": str(reply)}
        found = self._connection.call("GET", f"{self._path}/conversation", query=query)
        return tuple(turn_of(one) for one in found["data"])

    @property
    def replies(self) -> tuple[Turn, ...]:
        """Replies of all branches, the oldest first. Asks the server."""
        self._check_open()
        found = self._connection.call("GET", f"{self._path}/replies", query=DETAILS)
        return tuple(turn_of(one) for one in found["data"])

    def annotate(self, turn: int, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata of the turn of this id."""
        self._call("annotate", {"turn": turn, "metadata": dict(metadata)})
        self.refresh()

    def count_tokens(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
    ) -> int:
        """Returns the length of the prompt that `start_send()` would make of the same arguments, in
        tokens."""
        body = {
            "text": text,
            "template_variables": template_variables,
            "after": after,
            "before": [dict(one) for one in before],
            "system": system,
        }
        return int(self._call("count_tokens", body)["count"])

    # --- settings and life -----------------------------------------------------------------------

    def set_system(self, text: str | None) -> None:
        """Changes the system prompt; None removes it."""
        self._patch(system=text or "")

    def set(self, /, **settings: Unpack[GenerationSettings]) -> None:
        """Changes the session's generation settings; None restores the model's."""
        self._patch(settings=plain(settings))

    def set_variables(self, /, **variables: Any) -> None:
        """Changes template variables; None removes one."""
        self._patch(template_variables=variables)

    def set_history(self, history: str) -> None:
        """Changes the rule for earlier turns, "append" or "template", from the next turn on."""
        self._patch(history=history)

    def update(
        self,
        *,
        title: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        history: str | None = None,
        overflow: str | None = None,
    ) -> None:
        """Changes what is given in one transaction, or nothing."""
        given: dict[str, Any] = {
            "title": title,
            "tags": tags if tags is None or isinstance(tags, str) else list(tags),
            "metadata": None if metadata is None else dict(metadata),
            "settings": None if settings is None else plain(settings),
            "template_variables": template_variables,
            "history": history,
            "overflow": overflow,
        }
        self._patch(**{name: value for name, value in given.items() if value is not None})

    def set_title(self, title: str) -> None:
        """Sets the title; an empty text restores the start of the first user message."""
        self._patch(title=title)

    def set_tags(self, tags: Iterable[str]) -> None:
        """Replaces the tags."""
        self._patch(tags=tags if isinstance(tags, str) else list(tags))

    def set_metadata(self, metadata: Mapping[str, str]) -> None:
        """Replaces the metadata."""
        self._patch(metadata=dict(metadata))

    def set_overflow(self, overflow: str) -> None:
        """Sets what happens if a turn does not fit the context: "refuse" or "drop"."""
        self._patch(overflow=overflow)

    def rename(self, name: str) -> None:
        """Changes the name."""
        self._patch(name=name)

    def pin(self, pinned: bool = True) -> None:
        """Sets whether its pages stay in memory longer than those of other idle sessions."""
        self._patch(pinned=bool(pinned))

    def warm(self) -> None:
        """Starts to load the session's KV into the engine's memory before its next turn."""
        self._call("warm")

    @property
    def residence(self) -> Residence:
        """Tokens of the transcript that have KV in each of the engine's tiers."""
        found = self._forecast(32)["residence"]
        return Residence(found["device"], found["host"], found["disk"])

    def predicted_ttft(self, new_tokens: int = 32) -> float:
        """Returns an estimate of the time to first token of a message of `new_tokens` tokens, in
        seconds. Returns 0.0 before any measurement."""
        return float(self._forecast(new_tokens)["predicted_ttft"])

    def _forecast(self, new_tokens: int) -> dict[str, Any]:
        self._check_open()
        query = {"residence": "true", "new_tokens": str(new_tokens)}
        if self._turns:
            query["known"] = str(self._turns[-1].id)  # without the turns
        return self._connection.call("GET", self._path, query=query)

    def export(
        self,
        path: str | os.PathLike[str],
        pages: bool = False,
        *,
        force: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> Exported:
        """Writes the session to a file on this machine that `import_()` reads, here and there.

        Raises:
            InvalidRequest: the file exists and `force` is False.
        """
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

    def close(self) -> None:
        """Stops the generation of this client. The session stays on the server. Idempotent."""
        running = self.running
        if running is not None:
            running.cancel()
            running.wait()
        self._is_closed = True
        self._opener.closed(self)

    def delete(self) -> None:
        """Closes and deletes the session.

        Raises:
            NotFound: it was deleted before.
        """
        self._connection.call("DELETE", self._path)
        with contextlib.suppress(Error):
            self.close()

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteSession {self.name!r} at {self._connection.url}: {self.length} tokens>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RemoteSession cannot be copied or pickled: use fork()")


def _answer(generation: RemoteGeneration, stream: bool) -> Reply | ReplyStream:
    replies = ReplyStream(generation)
    return replies if stream else replies.result()


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
