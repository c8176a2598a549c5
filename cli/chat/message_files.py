"""Text files that the next message of a chat carries: `/file PATH`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from lmchat.errors import InvalidRequest

from ..terminal.texts import counted, human_bytes
from .text_input import decode
from .typed import path_of

MOST_BYTES = 1 << 20
"""Bytes of a file that a message takes, at most."""


@dataclass(frozen=True)
class MessageFile:
    """A text file.

    Attributes:
        name: Its name, without the folder.
        text: Its text, without line ends at the end.
    """

    name: str
    text: str

    @property
    def size(self) -> str:
        """Its size, as shown to the user."""
        return counted(len(self.text), "character")


def read(argument: str) -> MessageFile:
    """Reads a text file.

    Args:
        argument: The path as it was typed: as it is, spaces included, or quoted as for a shell.

    Raises:
        InvalidRequest: There is no such file, it cannot be read, is too large, or is not text.
    """
    path = path_of(argument)
    try:
        data = _content(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot read {path}: {reason}") from error
    text = decode(data, f"{path} is not a text file")
    if not text.strip():
        raise InvalidRequest(f"{path} has no text")
    return MessageFile(os.path.basename(path), text.rstrip("\r\n"))


def joined(message: str, files: Iterable[MessageFile]) -> str:
    """Returns a message followed by files, each under its name."""
    return "\n\n".join([message, *(f"{file.name}:\n{file.text}" for file in files)])


def _content(path: str) -> bytes:
    mode = os.stat(path).st_mode  # before it is opened: a pipe without a writer would wait
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise InvalidRequest(f"{path} is {what}, expected a text file")
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
        size = os.fstat(file.fileno()).st_size
    if len(data) > MOST_BYTES:
        raise InvalidRequest(
            f"{path} has {human_bytes(max(size, len(data)))}, expected at most "
            f"{human_bytes(MOST_BYTES)}"
        )
    return data
