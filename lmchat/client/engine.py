"""`RemoteEngine`: the engine behind a server, with the names of `ChatEngine`."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from typing_extensions import Unpack, override

from lmchat.client.generation import RemoteGeneration
from lmchat.client.http import Connection
from lmchat.client.record import DETAILS
from lmchat.client.session import RemoteSession, plain
from lmchat.client.values import info_of, known, settings_of, stats_of, template_of
from lmchat.errors import EngineClosed, InvalidRequest, NotFound
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.state import State
from lmchat.generation.ticket import QueueStats
from lmchat.interface.engine import EngineApi, SessionInfo
from lmchat.store.protocol import check_name
from lmchat.text.template_class import TemplateInfo
from turbomind import Residence, Stats
from turbomind.params import sequence_of_ids, wrong
from turbomind.shown import shown

_PAGE = 100  # sessions of one request
_PIECE = 1 << 20  # bytes of an archive that are sent at once


def connect(url: str, api_key: str | None = None) -> RemoteEngine:
    """Connects to `lmchat serve` and returns its engine, with the names of `ChatEngine`.

    Args:
        url: http://HOST:PORT, https://HOST, or unix:/PATH of the server's socket.
        api_key: the key. It names the owner of all sessions. None: the server needs none.

    Raises:
        InvalidRequest: the URL is malformed, or the server refuses the key.
        Unreachable: the server does not answer.
    """
    return RemoteEngine(url, api_key)


UNKNOWN = "unknown"
"""Of a fact that an older server does not tell."""


@dataclass(frozen=True)
class RemoteInfo:
    """Properties of the model that a server tells.

    Attributes:
        kv_bytes_per_token: bytes of the KV of one token over all layers, without padding.
        vocab_size: number of tokens that the model knows.
        weights_text: formats of the matrices, such as "int8 and bfloat16".
        kv_dtype: format of the KV cache.
    """

    kv_bytes_per_token: int
    vocab_size: int
    weights_text: str = UNKNOWN
    kv_dtype: str = UNKNOWN


class RemoteTokenizer:
    """The tokenizer of a server's model.

    Args:
        connection: the server.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, in which spellings of special tokens are these."""
        found = self._connection.call("POST", "/v1/engine/tokens", {"prompt": text})
        return list(found["token_ids"])

    def raw(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` with the special tokens spelled out."""
        return str(self._texts(ids)["text"])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the text of each of `ids` inside a text, special tokens spelled out."""
        return list(self._texts(ids)["pieces"])

    def _texts(self, ids: Iterable[int]) -> dict[str, Any]:
        return self._connection.call("POST", "/v1/engine/texts", {"token_ids": list(ids)})


class RemoteEngine(EngineApi):
    """An `EngineApi` behind a server, made by `connect()`.

    `close()` stops the generations of this client and leaves the server alone. The server refuses
    `profile()`, `observe()`, `check_capacity()`, `forecasts()` and `start_score()`, and has no
    `core`.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__()
        self._connection = Connection(url, api_key)
        try:
            self._facts = self._connection.call("GET", "/v1/engine")
        except NotFound as error:
            self._connection.close()
            raise wrong("url", url, "that of an lmchat server") from error
        except BaseException:
            self._connection.close()
            raise
        self._lock = threading.Lock()
        self._sessions: weakref.WeakValueDictionary[str, RemoteSession] = (
            weakref.WeakValueDictionary()
        )
        self._running: weakref.WeakSet[RemoteGeneration] = weakref.WeakSet()
        self._is_closed = False
        self._tokenizer = RemoteTokenizer(self._connection)

    # --- sessions --------------------------------------------------------------------------------

    @override
    def session(
        self,
        name: str | None = None,
        *,
        system: str | None = None,
        owner: str | None = None,
        history: str | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        overflow: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> RemoteSession:
        self._check_owner(owner)
        body = {
            "name": name,
            "open": name is not None,
            "system": system,
            "history": history,
            "settings": None if settings is None else plain(settings),
            "template_variables": template_variables,
            "overflow": overflow,
            "tags": tags if tags is None or isinstance(tags, str) else list(tags),
            "metadata": metadata,
        }
        return self.opened(self._connection.call("POST", "/v1/sessions", body, DETAILS))

    @override
    def session_by_name(self, name: str, *, owner: str | None = None) -> RemoteSession:
        self._check_owner(owner)
        check_name(name)
        found = self._connection.call("GET", "/v1/sessions", query={"name": name})["data"]
        if not found:
            raise NotFound(f"no session {shown(name)}")
        return self.session_by_id(found[0]["id"])

    @override
    def session_by_id(self, session_id: str, *, owner: str | None = None) -> RemoteSession:
        self._check_owner(owner)
        path = f"/v1/sessions/{quote(str(session_id), safe='')}"
        return self.opened(self._connection.call("GET", path, query=DETAILS))

    def opened(self, data: Mapping[str, Any]) -> RemoteSession:
        """Returns the session that the server has sent: one object per session."""
        with self._lock:
            found = self._sessions.get(data["id"])
            if found is None:
                found = RemoteSession(self._connection, self.owner, data, self)
                self._sessions[found.id] = found
                return found
        found.take(data)
        return found

    def closed(self, session: RemoteSession) -> None:
        """Records that a session has closed."""
        with self._lock:
            self._sessions.pop(session.id, None)

    @override
    def sessions(
        self,
        owner: str | None = None,
        *,
        search: str | None = None,
        tag: str | None = None,
        hidden: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[SessionInfo]:
        self._check_owner(owner)
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise wrong("limit", limit, "an integer of 0 or more, or None")
        query = {"search": search, "tag": tag, "after": after}
        given = {name: value for name, value in query.items() if value is not None}
        if hidden:
            given["hidden"] = "true"
        found: list[SessionInfo] = []
        for page in self._pages(given, limit):
            found += [info_of(one, self.owner) for one in page]
        return found

    def _pages(self, query: dict[str, str], limit: int | None) -> Iterator[list[dict[str, Any]]]:
        left = limit
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = self._connection.call("GET", "/v1/sessions", query={**query, "limit": str(size)})
            yield page["data"]
            if not page["has_more"]:
                return
            query = {**query, "after": page["last_id"]}
            left = None if left is None else left - len(page["data"])

    @override
    def count_sessions(self, owner: str | None = None) -> int:
        return len(self.sessions(owner, hidden=True))

    @override
    def residences(self, sessions: Iterable[RemoteSession]) -> list[Residence]:
        return [session.residence for session in sessions]

    @override
    def predicted_ttfts(
        self, sessions: Iterable[RemoteSession], new_tokens: int = 32
    ) -> list[float]:
        return [session.predicted_ttft(new_tokens) for session in sessions]

    @override
    def delete(self, name: str, owner: str | None = None) -> None:
        self.session_by_name(name, owner=owner).delete()

    @override
    def import_(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        owner: str | None = None,
        pages: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> RemoteSession:
        self._check_owner(owner)
        query = {**DETAILS, "pages": "true" if pages else "false"}
        if name is not None:
            query["name"] = name
        try:
            with Path(path).open("rb") as file:
                answer = self._connection.request(
                    "POST",
                    "/v1/sessions/import",
                    query=query,
                    headers={"Content-Type": "application/zip"},
                    content=iter(lambda: file.read(_PIECE), b""),
                )
        except OSError as error:
            raise wrong("path", str(path), f"a file that can be read: {error.strerror}") from error
        found = json.loads(answer.content)
        for notice in found["left_out"]:
            if notify is not None:
                notify(notice)
        return self.opened(found)

    # --- without a session -----------------------------------------------------------------------

    @override
    def start_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> RemoteGeneration:
        body = {
            "messages": [dict(one) for one in messages],
            "template_variables": template_variables,
            "continue_final_message": continue_final_message,
        }
        return self._start(owner, body, settings)

    @override
    def start_generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> RemoteGeneration:
        return self._start(owner, {"prompt": _prompt(prompt)}, settings)

    def _start(
        self, owner: str | None, body: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> RemoteGeneration:
        self._check_owner(owner)
        sent = {**body, "settings": plain(settings), "stream": True, "token_ids": True}
        answer = self._connection.open("POST", "/v1/engine/generate", sent)
        found = RemoteGeneration(self._connection, answer)
        self._reading.begins(lambda _: found.cancel())
        self._running.add(found)
        return found

    @override
    def score(self, prompt: str | Iterable[int], *, owner: str | None = None) -> list[float]:
        self._check_owner(owner)
        found = self._connection.call("POST", "/v1/engine/score", {"prompt": _prompt(prompt)})
        return list(found["logprobs"])

    @override
    def chat_token_ids(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        self._check_owner(owner)
        body = {
            "messages": [dict(one) for one in messages],
            "template_variables": template_variables,
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
        }
        return list(self._connection.call("POST", "/v1/engine/tokens", body)["token_ids"])

    # --- properties ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._connection.url

    @property
    def owner(self) -> str:
        """The owner that the API key names."""
        return str(self._facts["owner"])

    @property
    @override
    def tokenizer(self) -> RemoteTokenizer:
        return self._tokenizer

    @property
    @override
    def model(self) -> str:
        return str(self._facts["model"])

    @property
    @override
    def device(self) -> str:
        """Device of the server that computes, such as "cpu" or "cuda:0"."""
        return str(self._facts.get("device", UNKNOWN))

    @property
    @override
    def threads(self) -> int | None:
        return self._facts.get("threads")

    @property
    @override
    def max_context(self) -> int:
        return int(self._facts["max_context"])

    @property
    @override
    def info(self) -> RemoteInfo:
        return known(RemoteInfo, self._facts)

    @property
    @override
    def template_info(self) -> TemplateInfo:
        return template_of(self._facts["template"])

    @property
    @override
    def model_settings(self) -> dict[str, Any]:
        return settings_of(self._facts["model_settings"])

    @property
    @override
    def waiting(self) -> int:
        """Number of requests of all clients that wait for a slot of the batch."""
        return self.queue_stats().waiting

    @override
    def stats(self) -> Stats:
        """Returns the engine's counters, of all clients."""
        return stats_of(self._stats()["engine"])

    @override
    def queue_stats(self) -> QueueStats:
        """Returns the counters of the queue before the engine, of all clients."""
        return known(QueueStats, self._stats()["queue"])

    @override
    def session_states(self) -> dict[State, int]:
        """Returns the number of open sessions in each state, of all clients."""
        return {State(name): count for name, count in self._stats()["sessions"].items()}

    def _stats(self) -> dict[str, Any]:
        return self._connection.call("GET", "/v1/engine/stats")

    def profile(self, on: bool = True) -> NoReturn:
        """Raises InvalidRequest."""
        raise _refused("profile()")

    def observe(self, observer: object) -> NoReturn:
        """Raises InvalidRequest."""
        raise _refused("observe()")

    def check_capacity(self, owner: str | None = None, *, live: bool = False) -> NoReturn:
        """Raises InvalidRequest."""
        raise _refused("check_capacity()")

    def forecasts(self, sessions: Iterable[RemoteSession], new_tokens: int = 32) -> NoReturn:
        """Raises InvalidRequest."""
        raise _refused("forecasts()")

    def start_score(self, prompt: object, *, owner: str | None = None) -> NoReturn:
        """Raises InvalidRequest."""
        raise _refused("start_score()")

    def _check_owner(self, owner: str | None) -> None:
        if self._is_closed:
            raise EngineClosed("the remote engine has been closed")
        if owner is not None and owner != self.owner:
            raise wrong("owner", owner, f"{self.owner!r}, which the API key names")

    @override
    def close(self) -> None:
        """Stops the generations of this client and closes its connections. Idempotent."""
        self._is_closed = True
        with self._lock:
            sessions = list(self._sessions.values())
        running = [*self._running, *(one for s in sessions if (one := s.running) is not None)]
        for generation in running:
            generation.cancel()
        for generation in running:
            generation.wait()
        for session in sessions:
            with contextlib.suppress(EngineClosed):
                session.close()
        self._connection.close()


def _prompt(prompt: str | Iterable[int]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Iterable):
        raise wrong("prompt", prompt, "a string or token ids")
    return sequence_of_ids(prompt, "prompt")


def _refused(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not offered by a remote engine, expected a ChatEngine")
