"""Files with which another supervisor runs a deployment, without the launcher."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lmchat.deploy.placement import LAST_SECONDS, Place
from lmchat.deploy.process import SILENT_SECONDS
from lmchat.deploy.proxy import configuration, program
from lmchat.errors import InvalidRequest
from lmchat.server.config import ServerConfig
from lmchat.server.http.keys import VARIABLE
from lmchat.server.http.sockets import addresses_of
from lmchat.store.data_directory import data_dir

_FOLDER = "${RUNTIME_DIRECTORY}"  # systemd sets the variable
_DEFAULT = "/run/lmchat"
_INHERITED = re.compile(r"(TURBOMIND|HF|CUDA)_\w+|XDG_CACHE_HOME|LD_LIBRARY_PATH|PYTHONPATH")
_SECRET = re.compile(r"\w*(KEY|TOKEN|SECRET)\w*")
_END = "END-OF-FILE"

_REPLICA = """\
[Unit]
Description=lmchat replica %i
PartOf=lmchat.target
StartLimitIntervalSec=0

[Service]
Type=notify
WatchdogSec={silent}
WatchdogSignal=SIGKILL
User={user}
UMask=0077
ProtectSystem=full
NoNewPrivileges=yes
WorkingDirectory={working_directory}
RuntimeDirectory=lmchat
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
{environment}
ExecStart={command}
ExecStartPost=-{proxy} resume {folder} %i
ExecStop=-{proxy} drain {folder} %i
Restart=always
RestartSec=1
TimeoutStartSec={start}
TimeoutStopSec={stop}
"""

_PLACE = """\
[Service]
CPUAffinity={cpus}
{environment}
"""

# SIGUSR1: it takes no more connections, and ends with its last one. Replicas are stopped after it.
_PROXY = """\
[Unit]
Description=HAProxy in front of lmchat's replicas
PartOf=lmchat.target
After={replicas}
StartLimitIntervalSec=0

[Service]
Type=exec
User={user}
ProtectSystem=full
RuntimeDirectory=lmchat
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
ExecStart={command}
KillSignal=SIGUSR1
Restart=always
RestartSec=1
TimeoutStopSec={stop}
"""

_TARGET = """\
[Unit]
Description=lmchat: several replicas at {address}
Wants={replicas} lmchat-proxy.service

[Install]
WantedBy=multi-user.target
"""


def printed(
    kind: str,
    places: Sequence[Place],
    arguments: Sequence[str],
    host: str,
    port: int,
    config: ServerConfig,
    page: str,
    start_seconds: float,
) -> str:
    """Returns HAProxy's configuration, or a script of the shell that writes units of systemd.

    Args:
        kind: "haproxy" or "systemd".
        places: what each replica computes on.
        arguments: the command line of a replica, the program first.
        host: what HAProxy listens on.
        port: its port.
        config: the configuration of each replica.
        page: pattern of the paths of the chat page; "" without it.
        start_seconds: time in which a replica has to be ready.

    Raises:
        InvalidRequest: the address or the replicas cannot be written down.
    """
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"--port is {port}, expected 1 to 65535 for a file")
    address = ",".join(addresses_of(host, port))
    head = f"global\n    presetenv RUNTIME_DIRECTORY {_DEFAULT}\n"
    proxy = head + configuration(_FOLDER, len(places), address, port, config, page)
    if kind == "haproxy":
        return proxy
    files = _units(places, arguments, address, config.drain_seconds, start_seconds)
    return _script({"lmchat-proxy.cfg": proxy, **files})


def _units(
    places: Sequence[Place],
    arguments: Sequence[str],
    address: str,
    drain_seconds: float,
    start_seconds: float,
) -> dict[str, str]:
    """Returns the files of the units by name."""
    if VARIABLE in os.environ:
        raise InvalidRequest(
            f"${VARIABLE} is set, which a unit must not show: write the key to a file of mode "
            "0600, unset the variable and use --api-keys"
        )
    shared = places[0].environment.items() & places[-1].environment.items()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if _INHERITED.fullmatch(name) and not _SECRET.fullmatch(name)
    }
    inherited |= {"LMCHAT_HOME": str(data_dir()), **dict(shared)}
    replicas = " ".join(f"lmchat@{n}.service" for n in range(1, len(places) + 1))
    user = os.geteuid()
    files = {
        "lmchat@.service": _REPLICA.format(
            user=user,
            working_directory=_escaped(os.getcwd()),
            environment=_environment(inherited),
            command=f"{_line(places[0].command(arguments))} --uds={_FOLDER}/replica-%i",
            silent=round(SILENT_SECONDS),
            start=math.ceil(start_seconds) if start_seconds < math.inf else "infinity",
            proxy=_line([sys.executable, "-m", "lmchat.deploy.proxy"]),
            folder=_FOLDER,
            stop=round(drain_seconds + LAST_SECONDS),
        ),
        "lmchat-proxy.service": _PROXY.format(
            user=user,
            replicas=replicas,
            command=f"{_line([program(), '-db', '-q', '-f'])} %Y/lmchat-proxy.cfg",
            stop=round(drain_seconds + LAST_SECONDS),
        ),
        "lmchat.target": _TARGET.format(address=address, replicas=replicas),
    }
    for n, place in enumerate(places, start=1):
        own = dict(place.environment.items() - shared)
        files[f"lmchat@{n}.service.d/place.conf"] = _PLACE.format(
            cpus=" ".join(map(str, sorted(place.cpus))), environment=_environment(own)
        )
    return files


def _script(files: dict[str, str]) -> str:
    """Returns a script of the shell that writes files."""
    lines = [
        "#!/bin/sh",
        "# Writes units of systemd to the folder $1. To start them, as root:",
        "#   systemctl daemon-reload && systemctl enable --now lmchat.target",
        "set -e",
        'cd "${1:-/etc/systemd/system}"',
    ]
    for name, text in files.items():
        folder = Path(name).parent
        lines += [f"mkdir -p {folder}"] if folder.name else []
        lines += [f"cat > {name} <<'{_END}'", text.rstrip("\n"), _END]
    return "\n".join(lines)


def _environment(variables: dict[str, str]) -> str:
    pairs = (_quoted(f"{name}={value}") for name, value in sorted(variables.items()))
    return "\n".join(f"Environment={pair}" for pair in pairs)


def _line(words: Sequence[str]) -> str:
    """Returns a command line as a unit has it; there $ stands for variables."""
    return " ".join(_quoted(word).replace("$", "$$") for word in words)


def _quoted(text: str) -> str:
    text = _escaped(text)
    if re.fullmatch(r"[\w%@/.,:=+-]+", text, re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    """Returns a text in which nothing is a specifier."""
    if not text.isprintable():
        raise InvalidRequest(f"{text[:100]!r} has control characters, expected none in a unit")
    return text.replace("%", "%%")
