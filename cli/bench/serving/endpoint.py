"""An OpenAI-compatible server: what it supports, its tokenizer, and requests of turns to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmchat.errors import Error, InvalidRequest

from .event_stream import StreamReader
from .http_client import ConnectionLost, HttpClient, InvalidResponse, Response, parsed_url
from .turn import Outcome, Turn

SETUP_SECONDS = 60.0  # of a request that prepares the run
OPTIONAL = ("ignore_eos", "stream_options")
"""Fields that are left out where the server refuses them, in the order in which they are tried."""
SESSION_HEADER = "x-session-id"
LONGEST_EXAMPLE = 300  # characters of a server's message in a report

Message = Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """One turn to send.

    Attributes:
        messages: The messages, the new one last.
        max_tokens: Tokens of the reply.
        session: Name of the server's session that has the earlier messages, or None.
    """

    messages: Sequence[Message]
    max_tokens: int
    session: str | None = None


class Endpoint:
    """A server and the model on it.

    Args:
        url: URL of the server; a path of /v1 at its end is accepted.
        api_key: Bearer token of all requests, or None.
        kind: "chat" or "completions", the route that is measured.
        model: Name of the model; None: the first one that the server lists.
        temperature: Sampling temperature; None: the server's default.
        timeout: Seconds until a turn must be complete.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        kind: str = "chat",
        model: str | None = None,
        temperature: float | None = 0.0,
        timeout: float = 120.0,
    ) -> None:
        self.root = parsed_url(url).path.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.http = HttpClient(url, headers)
        self.kind = kind
        self.model = model
        self.temperature = temperature
        self.timeout = timeout
        self.fields = dict.fromkeys(OPTIONAL, True)
        self.server = ""
        self.reports = {"usage": False, "cached_tokens": False}

    async def prepare(self) -> None:
        """Finds the model and the optional fields that the server accepts.

        Raises:
            InvalidRequest: The server has no such model or refuses the request.
            Error: The server does not answer, or not as an OpenAI-compatible server.
        """
        response = await self._setup("GET", "/v1/models")
        listed = response.json() if response.status == 200 else None
        try:
            names = [str(each["id"]) for each in (listed or {})["data"]]
        except (KeyError, TypeError):
            names = []
        if self.model is None:
            if not names:
                raise InvalidRequest(
                    f"the server lists no model at /v1/models ({_shown(response)}): give --model"
                )
            self.model = names[0]
        self.server = response.headers.get("server", "")
        while True:
            turn, answer = await self.exchange(Request([_user("Hello")], 2), SETUP_SECONDS)
            if turn.outcome is Outcome.FINISHED:
                break
            refused = answer is not None and answer.status in (400, 422)
            left = [name for name in OPTIONAL if self.fields[name]]
            if not refused or not left:
                raise Error(f"the server does not answer a short request: {turn.error}")
            named = [name for name in left if name in turn.error]
            self.fields[(named or left)[0]] = False
        self.reports = {
            "usage": turn.completion_tokens is not None,
            "cached_tokens": turn.cached_tokens is not None,
        }

    async def _setup(self, method: str, path: str, body: object = None) -> Response:
        try:
            return await self.http.request(method, self.root + path, body, timeout=SETUP_SECONDS)
        except asyncio.TimeoutError:
            raise Error(f"{path}: no answer within {SETUP_SECONDS:.0f} s") from None
        except (ConnectionLost, InvalidResponse) as error:
            raise Error(f"{path}: {error}") from None

    async def count_tokens(self, text: str) -> int | None:
        """Returns the tokens of a text by the server's /tokenize, or None if it has none."""
        # vLLM's body, which this project's server takes too, and that of llama-server.
        for body in (
            {"model": self.model, "prompt": text, "add_special_tokens": False},
            {"content": text},
        ):
            response = await self._setup("POST", "/tokenize", body)
            answer = response.json() if response.status == 200 else None
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if isinstance(tokens, list) and tokens:
                return len(tokens)
        return None

    async def send(self, request: Request, due: float) -> Turn:
        """Sends a turn and returns how it went; it raises only asyncio.CancelledError.

        Args:
            request: The turn.
            due: When it was due, on the loop's clock.
        """
        turn, _ = await self.exchange(request, self.timeout, due)
        return turn

    async def exchange(
        self, request: Request, timeout: float, due: float | None = None
    ) -> tuple[Turn, Response | None]:
        """Sends a turn and returns how it went, and the response if there is one."""
        loop = asyncio.get_running_loop()
        turn = Turn(due=loop.time() if due is None else due)
        reader = StreamReader()
        response: Response | None = None
        headers = {} if request.session is None else {SESSION_HEADER: request.session}
        route = "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"
        try:
            response = await self.http.request(
                "POST",
                self.root + route,
                self.body(request),
                headers=headers,
                sink=reader.feed,
                timeout=timeout,
            )
        except asyncio.TimeoutError:
            turn.fail("timeout", f"the response was not complete after {timeout:g} s")
        except ConnectionLost as error:
            turn.fail("disconnected", str(error))
        except InvalidResponse as error:
            turn.fail("invalid response", str(error))
        finally:
            turn.ended = loop.time()
            turn.take(reader)
        if response is not None:
            _judge(turn, reader, response)
        return turn, response

    def body(self, request: Request) -> dict[str, Any]:
        """Returns the body of a turn's request."""
        body: dict[str, Any] = {"model": self.model, "stream": True}
        if self.kind == "chat":
            body["messages"] = list(request.messages)
        else:
            body["prompt"] = "\n".join(message["content"] for message in request.messages)
        body["max_tokens"] = request.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.fields["stream_options"]:
            body["stream_options"] = {"include_usage": True}
        if self.fields["ignore_eos"]:
            body["ignore_eos"] = True
        return body

    async def delete_sessions(self, prefix: str) -> int:
        """Deletes the server's sessions whose names start so; returns their number."""
        found: list[str] = []
        after = ""
        while True:
            response = await self._setup("GET", f"/v1/sessions?limit=100{after}")
            page = response.json()
            rows = page.get("data") if isinstance(page, dict) else None
            if response.status != 200 or not rows:
                break
            found += [row["id"] for row in rows if str(row.get("name", "")).startswith(prefix)]
            after = f"&after={rows[-1]['id']}"
            if not page.get("has_more"):
                break
        deleted = 0
        for each in found:
            response = await self._setup("DELETE", f"/v1/sessions/{each}")
            deleted += response.status < 300
        return deleted


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _judge(turn: Turn, reader: StreamReader, response: Response) -> None:
    """Sets the outcome of a turn from its complete response."""
    if response.status == 429:
        turn.refuse(_retry_after(response.headers), _shown(response))
    elif response.status != 200:
        turn.fail(f"status {response.status}", _shown(response))
    elif not response.is_stream:
        kind = response.headers.get("content-type", "none")
        turn.fail("not an event stream", f"content-type {kind}: {_shown(response)}")
    elif reader.error is not None:
        message = str(reader.error.get("message", reader.error))[:LONGEST_EXAMPLE]
        code, category = reader.error.get("code"), reader.error.get("type")
        if code in (429, "429", "overloaded") or category == "rate_limit_error":
            turn.refuse(None, message)
        else:
            turn.fail("error in the stream", message)
    elif reader.malformed is not None:
        turn.fail("malformed event", reader.malformed)
    elif not reader.complete:
        turn.fail("disconnected", f"the stream ended after {len(reader.times)} events")
    elif not turn.tokens:
        turn.fail("empty reply", f"the reply has no token; finish_reason {reader.finish_reason}")
    else:
        turn.outcome = Outcome.FINISHED


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds of retry-after-ms or Retry-After; a date counts as none."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * scale
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds):
            return seconds
    return None


def _shown(response: Response) -> str:
    """Returns status and message of a response, in one line of bounded length."""
    answer = response.json()
    error = answer.get("error", answer.get("message")) if isinstance(answer, dict) else None
    text: Any = error.get("message") if isinstance(error, dict) else error
    if text is None:
        text = response.body[:LONGEST_EXAMPLE].decode("utf-8", "replace")
    return f"status {response.status}: {' '.join(str(text).split())[:LONGEST_EXAMPLE]}"
