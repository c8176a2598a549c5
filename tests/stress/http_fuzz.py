"""Sends mutated requests to every route of a server, and bytes that are no requests.

    python -m tests.stress.http_fuzz --count 100000 --seed 1

The routes and what their bodies and parameters look like come from the app's OpenAPI schema, so new
ones are covered. The server must not end, answer with 500 or log an error. After every 1,000
requests it must answer `/health`, have no request left, and give an equal reply to a fixed greedy
request. `--first N --count 1` repeats request N of a seed; ids of objects that earlier requests
made differ then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import re
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT), str(SUPPORT), str(SUPPORT / "serving")]
from http_raw import connected, parse_head, request  # noqa: E402
from http_server import RunningServer  # noqa: E402

import conftest  # noqa: E402, F401 - maps cli/ where nothing is installed
from lmchat.server import Limits, ServerConfig  # noqa: E402

MOST = 1 << 16  # bytes of a response that are read
ROUND = 1000  # requests between two looks at the server
GREEDY = {"text_input": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, Any] = {  # of routes that parse their bodies themselves
    "/generate": {"text_input": "Hello", "parameters": {"max_tokens": 3, "seed": 1}},
    "/generate_stream": {"text_input": "Hello", "max_tokens": 3, "stream": True},
    "/infer": {
        "id": "1",
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hello"]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [3]},
        ],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}],
    },
}
STRINGS = (
    "", " ", "memo", "user", "assistant", "system", "developer", "Hello", "local", "auto", "0",
    "\x00", "\ud800", "\U0010ffff", "<|im_end|>", "{{ 7 * 7 }}", "../../etc/passwd", "%s%n",
    "x" * 300,
    "é" * 5000, "\r\nX: y", "null", "-1", "1e999", "🙂" * 50, "a\u202eb",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 8, 9, 16, 20, 21, 0.5, 1.5, -0.0, 1e-300, 1e300, 2**31, 2**32, 2**63, -(2**63),
    2**64, 10**400, 255, 65536,
)  # fmt: skip
KEYS = ("model", "n", "stop", "x", "", "__proto__", "messages", "stream", "session", "input", "id")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "x", "CONNECT")
TYPES = ("text/plain", "application/json; charset=utf-16", "application/octet-stream", "", "*/*")
ID = re.compile(rb'"(?:id|session_id)": ?"([\w-]{8,64})"')


class Schema:
    """Makes values that fit the schemas of an OpenAPI document."""

    def __init__(self, document: dict[str, Any], rng: random.Random) -> None:
        self._document, self._rng = document, rng

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Returns a value for a schema. Deep ones are short."""
        rng = self._rng
        if "$ref" in schema:
            found: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            return self.value(found, depth)
        for kind in ("anyOf", "oneOf"):
            if kind in schema:
                return self.value(rng.choice(schema[kind]), depth + 1)
        if "allOf" in schema:
            return self.value(schema["allOf"][0], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        return self._typed(schema, depth)

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        rng = self._rng
        match schema.get("type"):
            case "object":
                needed = set(schema.get("required", ()))
                return {
                    name: self.value(one, depth + 1)
                    for name, one in schema.get("properties", {}).items()
                    if name in needed or rng.random() < 0.15
                }
            case "array":
                count = rng.choice((0, 1, 1, 2)) if depth < 6 else 0
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
            case "string":
                return rng.choice(("Hello", "memo", "user", rng.choice(STRINGS)))
            case "integer":
                low = max(-(2**31), int(schema.get("minimum", 0)))
                return rng.randint(low, min(int(schema.get("maximum", low + 8)), low + 8))
            case "number":
                return rng.random()
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return rng.choice(STRINGS)


def mutate(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Returns a value in which something differs."""
    if isinstance(value, dict) and value and depth < 8:
        return _mutate_object(value, rng, depth)
    if isinstance(value, list) and value and rng.random() < 0.7:
        found = list(value)
        at = rng.randrange(len(found))
        choice = rng.random()
        if choice < 0.6:
            found[at] = mutate(found[at], rng, depth + 1)
        elif choice < 0.8:
            del found[at]
        else:
            found *= rng.choice((2, 10, 1100))
        return found
    return any_value(rng)


def _mutate_object(value: dict[str, Any], rng: random.Random, depth: int) -> dict[str, Any]:
    found = dict(value)
    name = rng.choice(list(found))
    choice = rng.random()
    if choice < 0.6:
        found[name] = mutate(found[name], rng, depth + 1)
    elif choice < 0.75:
        del found[name]
    elif choice < 0.9:
        found[rng.choice((*KEYS, name.upper()))] = any_value(rng)
    else:
        found[name] = None
    return found


def enlarged(value: Any, rng: random.Random) -> Any:
    """Returns a value of 1 to 8 MiB: one of its fields is a long text or list."""
    size = rng.randrange(1 << 20, 8 << 20)
    large: Any
    match rng.randrange(6):
        case 0:
            large = "a long text. " * (size // 13)
        case 1:
            large = rng.choice(("\x00", "é", "🙂", " ", "0", "<|end|>")) * (size // 12)
        case 2:
            large = [rng.choice(NUMBERS[:8])] * (size // 4)
        case 3:
            large = [{"type": "text", "text": ""}] * (size // 28)
        case 4:
            large = json.dumps({"max_tokens": [1] * (size // 4)})
        case _:
            large = [{"role": "user", "content": "a" * 4096}] * (size // 4130)
    if not isinstance(value, dict):
        return large
    names = ("prompt", "text", "text_input", "input", "messages", "sampling_parameters", "system")
    return {**value, rng.choice([*value, *names]): large}


def any_value(rng: random.Random) -> Any:
    """Returns some JSON value."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(STRINGS)
        case 2 | 3:
            return rng.choice(NUMBERS)
        case 4:
            return rng.choice((None, True, False, [], {}))
        case 5:
            return [rng.choice(STRINGS) for _ in range(rng.choice((1, 20, 70)))]
        case 6:
            return {rng.choice(KEYS): rng.choice(NUMBERS) for _ in range(3)}
    nested: Any = "x"
    for _ in range(rng.choice((5, 90, 300))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


class Fuzzer:
    """Makes requests for one server, sends them, and collects what is wrong in `failures`."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.failures: list[str] = []
        self.statuses: Counter[str] = Counter()
        self._server, self._seed = server, seed
        self._document: dict[str, Any] = server.app.app.openapi()
        self._routes = [
            (method.upper(), path, described)
            for path, methods in sorted(self._document["paths"].items())
            for method, described in sorted(methods.items())
        ]
        self._ids: deque[str] = deque(["0" * 32], 50)
        self._expected = self._greedy()

    def run(self, first: int, count: int) -> None:
        """Sends requests `first` to `first + count`."""
        for case in range(first, first + count):
            rng = random.Random(f"{self._seed}:{case}")
            is_garbage = rng.random() < 0.1
            data = self._garbage(rng) if is_garbage else self._request(rng)
            status = self._send(data, rng, half_closed=is_garbage and rng.random() < 0.8)
            self.statuses[status] += 1
            if status == "500":
                self.failures.append(f"request {case} (seed {self._seed}): 500 to {data[:2000]!r}")
            if (case + 1) % ROUND == 0 or case + 1 == first + count:
                self._look(case)

    def _request(self, rng: random.Random) -> bytes:
        method, path, described = rng.choice(self._routes)
        if rng.random() < 0.05:
            method = rng.choice(METHODS)
        target = re.sub(r"\{([^}]*)\}", lambda found: self._parameter(found[1], rng), path)
        query = self._declared(described, "query", rng)
        if rng.random() < 0.05:
            query.append(rng.choice((("a&b", "%ff"), ("search", "\x00"), ("limit", "2"))))
        if query:
            target += "?" + urlencode(query, safe="&%" if rng.random() < 0.1 else "")
        headers = [("Host", "localhost"), ("Connection", "close")]
        headers += self._declared(described, "header", rng)
        if rng.random() < 0.1:
            headers.append(
                (rng.choice(("Idempotency-Key", "x-session-id", "Range", "Accept", "Upgrade",
                             "Inference-Header-Content-Length")),
                 rng.choice(("1", "x" * 200, "-5", "é", "*/*", "websocket", "99999")))
            )  # fmt: skip
        body = None
        if "requestBody" in described or method in ("POST", "PUT", "PATCH"):
            body = self._body(path, described, rng)
            kind = rng.choice(TYPES) if rng.random() < 0.05 else "application/json"
            headers.append(("Content-Type", kind))
        return request(method, target.encode("utf-8", "replace"), headers, body)

    def _declared(
        self, described: dict[str, Any], where: str, rng: random.Random
    ) -> list[tuple[str, str]]:
        """Returns values of parameters that a route declares: those that it needs, some others."""
        found = []
        for one in described.get("parameters", ()):
            if one["in"] != where or rng.random() > (0.95 if one["required"] else 0.25):
                continue
            value = Schema(self._document, rng).value(one["schema"])
            if "id" in one["name"] or one["name"] in ("after", "known", "reply", "turn"):
                value = rng.choice((value, rng.choice(self._ids), 2))
            if rng.random() < 0.3:
                value = rng.choice((*STRINGS, *NUMBERS))
            text = str(value).lower() if isinstance(value, bool) else str(value)[:3000]
            data = text.encode("utf-8", "replace").decode(
                "latin-1" if where == "header" else "utf-8"
            )
            found.append(
                (one["name"], re.sub(r"[\r\n\0]", "", data) if where == "header" else data)
            )
        return found

    def _parameter(self, name: str, rng: random.Random) -> str:
        if rng.random() < 0.8:
            return "memo" if name == "model" else rng.choice(self._ids)
        text = rng.choice(("x", "%00", "..", "%2e%2e", "é", "0", "-1", "a" * 3000, "%ff", "%F0%9F"))
        return text.encode("ascii", "replace").decode()

    def _body(self, path: str, described: dict[str, Any], rng: random.Random) -> bytes:
        content = described.get("requestBody", {}).get("content", {}).get("application/json", {})
        own = next((body for end, body in BODIES.items() if path.endswith(end)), None)
        examples = [one["value"] for one in content.get("examples", {}).values() if "value" in one]
        value: Any
        if own is not None:
            value = own
        elif examples and rng.random() < 0.5:
            value = rng.choice(examples)
        else:
            value = Schema(self._document, rng).value(content.get("schema", {"type": "object"}))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            value = mutate(value, rng)
        if rng.random() < 0.01:
            value = enlarged(value, rng)
        data = json.dumps(value).encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            data = flipped(data, rng)
        return data

    def _garbage(self, rng: random.Random) -> bytes:
        """Returns bytes that are no request, or one whose parts are wrong."""
        match rng.randrange(4):
            case 0:
                return rng.randbytes(rng.choice((1, 10, 100, 20_000)))
            case 1:
                return flipped(self._request(rng), rng)
            case 2:
                data = self._request(rng)
                return data[: rng.randrange(len(data) + 1)]
        size = rng.choice((b"-1", b"ffffffffffffffffffff", b"0x5", b"5;a=b", b"zz", b"5", b""))
        head = request("POST", "/v1/conversations", [("Host", "localhost"), ("Content-Type",
                       "application/json"), ("Transfer-Encoding", "chunked")])  # fmt: skip
        return head + size + b"\r\nhello\r\n0\r\n\r\n"

    def _send(self, data: bytes, rng: random.Random, half_closed: bool) -> str:
        """Returns the status, or "none" without a response."""
        with connected(self._server.port) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                if rng.random() < 0.02:
                    return "left"
                if half_closed:
                    connection.shutdown(socket.SHUT_WR)
            found = b""
            connection.settimeout(5)
            with contextlib.suppress(OSError):
                while len(found) < MOST and (more := connection.recv(MOST)):
                    found += more
                    if b"\r\nconnection: close" not in found[:2000].lower():
                        connection.shutdown(socket.SHUT_WR)
        self._ids.extend(one.decode() for one in ID.findall(found)[:4])
        head, end, _ = found.partition(b"\r\n\r\n")
        return str(parse_head(head).status) if end and head.startswith(b"HTTP/1.1 ") else "none"

    def _greedy(self) -> Any:
        answer = self._server.client().post("/v2/models/memo/generate", json=GREEDY)
        return answer.json().get("text_output")

    def _look(self, case: int) -> None:
        """Checks that the server is as it was at the start."""
        where = f"after request {case} (seed {self._seed})"
        deadline = time.monotonic() + 60
        while self._server.app.state.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._server.app.state.in_flight:
            self.failures.append(f"{where}: {self._server.app.state.in_flight} requests are left")
        with self._server.client() as client:
            if client.get("/health").status_code != 200:
                self.failures.append(f"{where}: /health does not answer 200")
        reply = self._greedy()
        if reply != self._expected:
            self.failures.append(f"{where}: {reply!r}, expected {self._expected!r}")


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Returns the data with some bytes changed, taken out or repeated."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not found:
            break
        at = rng.randrange(len(found))
        match rng.randrange(4):
            case 0:
                found[at] = rng.randrange(256)
            case 1:
                del found[at : at + rng.choice((1, 5))]
            case 2:
                found[at:at] = found[at : at + rng.choice((1, 20))]
            case _:
                found[at:at] = rng.choice((b"\r\n", b"\x00", b"\xff", b'"', b"[" * 200, b"1e999"))
    return bytes(found)


class Errors(logging.Handler):
    """Collects what the server logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:2000])


def run(count: int, seed: int, first: int = 0, progress: Callable[[str], object] = print) -> dict:
    """Runs the requests and returns the record; `failures` in it is empty if all is well."""
    errors = Errors()
    logging.getLogger().addHandler(errors)
    limits = Limits(receive_seconds=0.3, send_seconds=5)
    begun = time.monotonic()
    try:
        with RunningServer(ServerConfig(limits=limits), threads=1) as server:
            fuzzer = Fuzzer(server, seed)
            for start in range(first, first + count, ROUND):
                fuzzer.run(start, min(ROUND, first + count - start))
                progress(f"{start - first + ROUND} requests, {len(fuzzer.failures)} failures")
            routes = len(fuzzer._routes)
            tasks = threading.active_count()
    finally:
        logging.getLogger().removeHandler(errors)
    return {
        "requests": count, "seed": seed, "first": first, "routes": routes, "threads": tasks,
        "statuses": dict(sorted(fuzzer.statuses.items())),
        "failures": fuzzer.failures + [f"logged: {line}" for line in errors.lines],
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000, help="requests to send")
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests")
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--record", type=Path, help="file to write the results to, as JSON")
    given = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    record = run(given.count, given.seed, given.first)
    text = json.dumps(record, indent=1)
    if given.record:
        given.record.write_text(text + "\n")
    print(text)
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
