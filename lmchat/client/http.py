"""Requests to a server, and its errors as errors of `lmchat`."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from lmchat.errors import (
    EngineClosed,
    Error,
    InvalidRequest,
    Overloaded,
    Unreachable,
    class_of,
)
from turbomind.params import wrong

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""Longest time without a byte of an answer, which the server may still compute."""

SILENCE_SECONDS = 60.0
"""Longest silence of a stream, in which the server sends comments."""

_UNIX = "unix:"
_SETTINGS = "settings."  # where a body has them
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Connection:
    """The HTTP client of one server, for any number of threads.

    Args:
        url: http://HOST:PORT, https://HOST, or unix:/PATH of a socket.
        api_key: the key; None: none.

    Raises:
        InvalidRequest: the URL is malformed.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._closed = False
        base, transport, is_local = url.rstrip("/").removesuffix("/v1"), None, True
        if url.startswith(_UNIX):
            path = url.removeprefix(_UNIX).removeprefix("//")
            if not path.startswith("/"):
                raise wrong("url", url, "unix:/PATH of a socket")
            base, transport = "http://localhost", httpx.HTTPTransport(uds=path)
        else:
            is_local = _check(url)
        headers = {} if api_key is None else {"Authorization": f"Bearer {_checked(api_key)}"}
        self._client = httpx.Client(
            base_url=base,
            headers=headers,
            transport=transport,
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
            trust_env=not is_local,  # no proxy of the environment for this machine
        )

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Sends a request and returns the JSON object of the answer.

        Raises:
            Error: the server refused it.
            Unreachable: the server does not answer.
        """
        answer = self.request(method, path, body, query)
        with contextlib.suppress(ValueError):
            found = answer.json()
            if isinstance(found, dict):
                return found
        raise Unreachable(f"{self.url} answered something else than JSON; is it lmchat serve?")

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
    ) -> httpx.Response:
        """Sends a request and returns the whole answer, of status 2xx or 304."""
        with self._errors():
            answer = self._client.send(self._made(method, path, body, query, headers, content))
        if answer.status_code != 304:
            check(answer)
        return answer

    def open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> httpx.Response:
        """Sends a request and returns the answer with its body unread.

        Args:
            method: the method.
            path: the path.
            body: the JSON body.
            query: parameters of the query.
            headers: further headers.
            silence: longest time without a byte of the answer, in seconds.
        """
        made = self._made(method, path, body, query, headers, None)
        made.extensions["timeout"]["read"] = silence
        with self._errors():
            answer = self._client.send(made, stream=True)
            if answer.status_code >= 300:
                answer.read()
        check(answer)
        return answer

    def _made(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        content: Any,
    ) -> httpx.Request:
        if self._closed:
            raise EngineClosed("the connection to the server has been closed")
        sent = dict(headers or {})
        if body is not None:
            content, sent["Content-Type"] = _encoded(body), "application/json"
        return self._client.build_request(method, path, content=content, params=query, headers=sent)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise self.lost(error) from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise EngineClosed("the connection to the server has been closed") from error

    def lost(self, error: BaseException) -> Unreachable:
        """Returns the error of a server that does not answer."""
        why = str(error) or type(error).__name__
        return Unreachable(f"no answer from {self.url}: {why}")

    def close(self) -> None:
        """Closes all connections."""
        self._closed = True
        self._client.close()


def check(answer: httpx.Response) -> None:
    """Raises the error of an answer whose status is none of 2xx."""
    if answer.is_success:
        return
    try:
        found = answer.json()["error"]
        message, code, kind = str(found["message"]), found.get("code"), found.get("type")
        param = found.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"the server answered {answer.status_code} {answer.reason_phrase}"
        raise Unreachable(f"{text}; is it lmchat serve?") from None
    if answer.status_code in (401, 403):
        raise InvalidRequest(f"the server refused the request: {message}")
    raise error_of(message, code, kind, param, _retry_after(answer))


def error_of(
    message: str, code: Any, kind: Any, param: Any = None, retry_after: float = 1.0
) -> Error:
    """Returns an error of the server as one of `lmchat`.

    Args:
        message: its message.
        code: its word for programs.
        kind: OpenAI's type of the error.
        param: name of the field that is wrong; that of a setting is "settings.NAME".
        retry_after: predicted seconds until a retry can succeed.
    """
    found = class_of(code, kind)(message)
    if isinstance(found, Overloaded):
        found.retry_after = retry_after
    if isinstance(found, InvalidRequest) and isinstance(param, str):
        found.param = name = param.removeprefix(_SETTINGS)
        if message.startswith(param):
            found.args = (name + message.removeprefix(param),)
    return found


def _retry_after(answer: httpx.Response) -> float:
    with contextlib.suppress(ValueError):
        return float(answer.headers.get("retry-after-ms", "1000")) / 1000
    return 1.0


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"an argument is not a JSON value ({error}), expected finite numbers, strings, lists "
            "and mappings: a remote engine is called with JSON"
        ) from error


def _check(url: str) -> bool:
    """Checks a URL and returns whether it names this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise wrong("url", url, "http://HOST:PORT, https://HOST or unix:/PATH")
    return host in _LOOPBACK


def _checked(api_key: str) -> str:
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise wrong("api_key", "", "printable ASCII without spaces", seen="malformed")
    return api_key


def hang_up(answer: httpx.Response) -> None:
    """Ends the reading of an answer by another thread. Never waits."""
    with contextlib.suppress(Exception):
        stream = answer.extensions["network_stream"]
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
