"""Text from standard input and from files: its encoding, its size, and the wait for it."""

from __future__ import annotations

import codecs
import io
import select
import sys

from lmchat.errors import InvalidRequest

from ..errors import note
from ..terminal.texts import human_bytes

MOST_BYTES = 8 << 20  # of standard input: more text than any context has
PATIENCE = 1.0  # seconds until a note says that the command waits for standard input
_PIECE = 1 << 16  # bytes of one read
_MARKS = (  # the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)


def decode(data: bytes, complaint: str) -> str:
    """Returns the text of bytes: UTF-8, or what a byte-order mark says, which is left out.

    Args:
        data: The bytes.
        complaint: Begin of the message if they are not text.

    Raises:
        InvalidRequest: The bytes are in another encoding, or have a zero character.
    """
    mark, encoding = next((m for m in _MARKS if data.startswith(m[0])), (b"", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = len(mark) + error.start
        raise InvalidRequest(
            f"{complaint}: byte {at} is 0x{data[at]:02x}, which is not {encoding.upper()}"
        ) from None
    if "\0" in text:
        at = len(mark) + len(text.partition("\0")[0].encode(encoding))
        raise InvalidRequest(f"{complaint}: byte {at} is 0x00")
    return text


def read_stdin(is_waiting_told: bool) -> str:
    """Returns the text of standard input, without its line ends at the end.

    Args:
        is_waiting_told: Print a note on stderr if it takes long, since the caller may expect
            nothing from there.

    Raises:
        InvalidRequest: It has more than MOST_BYTES, or is not text.
    """
    data = _bytes_of_stdin(is_waiting_told)
    try:
        text = decode(data, "stdin is not text")
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; expected a question in UTF-8, UTF-16 or UTF-32") from None
    return text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")


def _bytes_of_stdin(is_waiting_told: bool) -> bytes:
    data = bytearray()
    file = sys.stdin.buffer
    while True:
        if is_waiting_told and not _is_ready(PATIENCE):
            is_waiting_told = False
            note("waiting for the end of standard input, which belongs to the question; "
                 "</dev/null gives it none")  # fmt: skip
        _is_ready(None)
        piece = file.read1(_PIECE) if isinstance(file, io.BufferedReader) else file.read(_PIECE)
        if piece == b"":
            return bytes(data)
        data += piece or b""  # None: nothing was there after all
        if len(data) > MOST_BYTES:
            raise InvalidRequest(
                f"stdin has more than {human_bytes(MOST_BYTES)}, expected at most that: no context "
                "has room for more"
            )


def _is_ready(seconds: float | None) -> bool:
    """Waits until standard input can be read, and returns whether it can."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # it is not a file of the system
        return True
