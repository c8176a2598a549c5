"""Options of `lmchat serve` as configurations of the engine and the server."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from lmchat.deploy.replica import with_launcher_key
from lmchat.errors import InvalidRequest
from lmchat.server.config import Limits, ServerConfig
from lmchat.server.http.keys import collect
from lmchat.server.http.sockets import is_loopback
from turbomind.machine import parse_bytes

Usage = Callable[[str, "Path | None", str, bool], str]
"""Returns how the server is used, from its URL, its Unix socket, the model's name for clients, and
whether a key is needed."""

_SIZES = ("body", "import_body", "bodies", "head", "stop_bytes")


def config_of(
    *,
    host: str | None,
    api_key: Iterable[str],
    api_keys: Path | None,
    insecure: bool,
    model_name: str | None,
    import_pages: bool,
    drain_seconds: float,
    limit: Iterable[str],
    allow_origin: Iterable[str],
    root_path: str,
) -> ServerConfig:
    """Returns the server's configuration.

    Args:
        host: the address; None: a Unix socket.
        api_key: values of --api-key.
        api_keys: the file of --api-keys.
        insecure: whether other machines are served without a key.
        model_name: name of the model for clients.
        import_pages: whether KV pages in archives are used.
        drain_seconds: time for running replies after SIGTERM.
        limit: values of --limit.
        allow_origin: values of --allow-origin.
        root_path: path of a proxy below which the server is.

    Raises:
        InvalidRequest: an option is out of range, or other machines would be served without a key.
    """
    keys = with_launcher_key(collect(api_key, api_keys))
    if host is not None and not is_loopback(host) and not keys and not insecure:
        raise InvalidRequest(
            f"--host is {host!r}, which other machines can reach, and there is no API key: set "
            "$LMCHAT_API_KEY or --api-keys, or --insecure to serve everybody"
        )
    if not 0 <= drain_seconds < math.inf:
        raise InvalidRequest(f"--drain-seconds is {drain_seconds}, expected 0 or more")
    if model_name is not None and not (model_name.isprintable() and 1 <= len(model_name) <= 256):
        raise InvalidRequest(
            f"--model-name is {model_name[:64]!r}, expected 1 to 256 printable characters"
        )
    return ServerConfig(
        keys=keys,
        any_host=insecure,
        limits=limits_of(limit),
        drain_seconds=drain_seconds,
        import_pages=import_pages,
        model_name=model_name,
        allow_origins=tuple(allow_origin),
        root_path=root_path,
    )


def example(url: str, uds: Path | None, name: str, has_keys: bool) -> str:
    """Returns a call of the server in three lines of a shell.

    Args:
        url: the address.
        uds: the Unix socket, if it listens there.
        name: name of the model for clients.
        has_keys: whether a key is needed.
    """
    where = f"--unix-socket {uds} http://localhost" if uds is not None else url
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    return (
        f"  curl {where}/v1/chat/completions{key} \\\n"
        "    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )


def limits_of(given: Iterable[str]) -> Limits:
    """Returns the limits, with those that are given as NAME=VALUE.

    Raises:
        InvalidRequest: one is unknown, given twice, or out of range.
    """
    kinds = {one.name: str(one.type) for one in fields(Limits)}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidRequest(f"--limit is {text!r}, expected NAME=VALUE")
        if name not in kinds:
            raise InvalidRequest(f"limit is {name!r}, expected one of {', '.join(sorted(kinds))}")
        if name in found:
            raise InvalidRequest(f"limit {name} is given twice, expected once")
        found[name] = _number(name, kinds[name], value)
    return Limits(**found)


def _number(name: str, kind: str, value: str) -> int | float:
    if name in _SIZES and not value.isdigit():
        return parse_bytes(f"limit {name}", value)
    try:
        return float(value) if kind == "float" else int(value)
    except ValueError as error:
        raise InvalidRequest(f"limit {name} is {value!r}, expected a number") from error


def engine_options(engine: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Returns the options of the engine: the common ones, and those that are given here."""
    return {**engine, **{name: value for name, value in own.items() if value is not None}}


def log_level(name: str) -> str:
    """Returns the name of a log level.

    Raises:
        InvalidRequest: it is unknown.
    """
    from lmchat.server.logs import LEVELS

    if name not in LEVELS:
        raise InvalidRequest(f"--log-level is {name!r}, expected one of {', '.join(LEVELS)}")
    return name
