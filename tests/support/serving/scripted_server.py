"""An OpenAI-compatible HTTP server whose answers are scripts, on a thread of its own."""

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field


@dataclass
class Request:
    method: str
    path: str
    headers: dict
    body: object


@dataclass
class Script:
    """An answer. With `events` it is an event stream, else `body` as JSON.

    `ends`: "done" sends [DONE]; "cut" closes the connection in the middle; "never" sends nothing
    more and leaves it open; "closed" completes the response and then closes the connection;
    "early" completes it without [DONE]; "silent" closes the connection without a response.
    """

    status: int = 200
    headers: dict = field(default_factory=dict)
    body: object = None
    events: list | None = None
    ends: str = "done"


def delta(text=None, **choice):
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": content, "finish_reason": None, **choice}]}


def usage(prompt, completion, cached=None):
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": counts}


def stream(*texts, counted=None, ids=1, ends="done", **choice):
    """Returns a stream of texts; `counted` is its usage, and a text stands for `ids` tokens."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    parts = [delta(text, token_ids=[7] * ids) if ids > 1 else delta(text) for text in texts]
    final = [delta(None, finish_reason="length", **choice)] if ends == "done" else []
    counts = [usage(*counted)] if counted else []
    return Script(events=[role, ": keep-alive", *parts, *final, *counts], ends=ends)


def refusal(seconds=3):
    error = {"message": "too many requests are waiting", "type": "rate_limit_error"}
    return Script(429, {"Retry-After": str(seconds)}, {"error": error})


def failure(status, message):
    return Script(status, body={"error": {"message": message, "type": "invalid_request_error"}})


class ScriptedServer:
    """A server on the loopback interface; `with` starts and stops it.

    Args:
        answer: Returns the script of a completion from the request and its number, from 0 on.
        tokenizer: Name of the field of /tokenize that holds the text; None: there is no such route.
    """

    def __init__(self, answer, tokenizer="prompt"):
        self.answer = answer
        self.tokenizer = tokenizer
        self.requests = []
        self.completions = []
        self.connections = 0
        self.sessions = {}
        self.deleted = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self):
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self):
        self._stop = asyncio.Event()
        self._tasks = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        ends = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, path, headers, json.loads(data) if data else None)
        self.requests.append(request)
        return await self._send(reader, writer, self._script(request))

    def _script(self, request):
        path = request.path.partition("?")[0]
        if path.endswith("completions"):
            self.completions.append(request)
            if name := request.headers.get("x-session-id"):
                self.sessions.setdefault(name, f"id{len(self.sessions)}")
            return self.answer(request, len(self.completions) - 1)
        if path == "/v1/models":
            return Script(body={"object": "list", "data": [{"id": "scripted"}]})
        if path == "/tokenize" and self.tokenizer:
            words = request.body.get(self.tokenizer, "").split()
            return Script(body={"tokens": list(range(len(words)))})
        if path == "/v1/sessions":
            rows = [{"name": name, "id": each} for name, each in self.sessions.items()]
            return Script(body={"object": "list", "data": rows, "has_more": False})
        if request.method == "DELETE":
            self.deleted.append(path.rpartition("/")[2])
            return Script(204)
        return failure(404, "no such route")

    async def _send(self, reader, writer, script):
        """Sends an answer; returns whether the connection can be used again."""
        if script.ends == "silent":
            return False
        headers = {"Server": "scripted", **script.headers}
        if script.events is None:
            data = b"" if script.body is None else json.dumps(script.body).encode()
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
            writer.write(_head(script.status, headers) + data)
            await writer.drain()
            return script.ends != "closed"
        headers |= {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Transfer-Encoding": "chunked",
        }
        writer.write(_head(script.status, headers))
        for event in script.events:
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}"
            writer.write(_chunk(text))
            await writer.drain()
        if script.ends == "never":
            await reader.read(1)  # until the client goes
        if script.ends in ("cut", "never"):
            return False
        last = b"" if script.ends == "early" else _chunk("data: [DONE]")
        writer.write(last + b"0\r\n\r\n")
        await writer.drain()
        return script.ends != "closed"


def _head(status, headers):
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {text}" for name, text in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _chunk(text):
    data = text.encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)
