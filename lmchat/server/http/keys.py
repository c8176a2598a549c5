"""API keys as they are configured: on the command line, in the environment, in a file.

A key is written as KEY or NAME:KEY. NAME is the owner of its requests; without one it is "local".
A file has one key per line; empty lines and lines that begin with # are ignored.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from lmchat.errors import InvalidRequest
from lmchat.store.records import LOCAL_OWNER

VARIABLE = "LMCHAT_API_KEY"
"""Environment variable with one key."""

_KEY = re.compile(r"[\x21-\x7e]{8,256}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_MAX_FILE = 1 << 20


def parse_key(text: str, where: str) -> tuple[str, str]:
    """Returns a key and its owner. Errors do not repeat the key.

    Args:
        text: NAME:KEY, or KEY without a colon in it.
        where: the option, variable or line that it stands in.

    Raises:
        InvalidRequest: it is malformed.
    """
    name, colon, key = text.partition(":")
    if not colon:
        name, key = LOCAL_OWNER, text
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}: the name before the colon is {name[:64]!r}, expected 1 to 64 of A-Z, a-z, "
            "0-9 and . _ @ -"
        )
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"{where}: the key has {len(key)} characters, expected 8 to 256 printable ASCII "
            "characters without spaces"
        )
    return key, name


def collect(
    given: Iterable[str], file: Path | None, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns all configured keys with their owners.

    Args:
        given: values of --api-key.
        file: the file of --api-keys.
        environment: the environment.

    Raises:
        InvalidRequest: a key is malformed, or two owners have the same; the file cannot be read or
            others may read it.
    """
    found: dict[str, str] = {}
    pairs = [parse_key(text, "--api-key") for text in given]
    if VARIABLE in environment:
        pairs.append(parse_key(environment[VARIABLE], VARIABLE))
    if file is not None:
        pairs += _read(file)
    for key, owner in pairs:
        if found.setdefault(key, owner) != owner:
            raise InvalidRequest(f"{found[key]!r} and {owner!r} have the same API key")
    return found


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            _check(path, facts)
            text = file.read(_MAX_FILE + 1).decode("ascii")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} has other characters than ASCII") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error
    if len(text) > _MAX_FILE:
        raise InvalidRequest(f"{path} is larger than {_MAX_FILE} bytes")
    found = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if line and not line.startswith("#"):
            found.append(parse_key(line, f"{path} line {number}"))
    if not found:
        raise InvalidRequest(f"{path} has no key, expected one per line")
    return found


def _check(path: Path, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidRequest(f"{path} is not a regular file")
    if facts.st_uid not in (os.geteuid(), 0):
        raise InvalidRequest(f"{path} belongs to user {facts.st_uid}, expected {os.geteuid()}")
    # So mounted secrets look: root's, and readable by the group that the pod's processes have.
    of_own_group = facts.st_uid == 0 and facts.st_gid in (os.getegid(), *os.getgroups())
    if not mode & (0o037 if of_own_group else 0o077):
        return
    remedy = f"run chmod 600 {path}"
    if facts.st_uid == 0 and os.geteuid() != 0:
        remedy = (
            "of a mounted secret, root's with mode 0440 and a group of this process will do, such "
            "as a pod's fsGroup with defaultMode 0440"
        )
    raise InvalidRequest(
        f"{path} has mode {mode:04o}, expected 0600: other users can read the keys; {remedy}"
    )
