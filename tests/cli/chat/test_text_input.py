"""Text of a question from standard input: encodings, sizes, and what is not text."""

import io
import itertools
import os
import sys

import pytest

from lmchat.cli.chat import one_answer, text_input
from lmchat.errors import InvalidRequest

TEXT = "Grüße 京都 🐙"


def pipe_in(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\r\n\r\n", "\r"])
def test_a_mark_and_line_ends_at_the_end_are_no_part_of_the_question(monkeypatch, encoding, end):
    pipe_in(monkeypatch, f"\ufeff{TEXT}\r\nmore{end}".encode(encoding))
    assert one_answer.question(None) == f"{TEXT}\nmore"
    pipe_in(monkeypatch, f"\ufeff{TEXT}{end}".encode(encoding))
    assert one_answer.question("Describe") == f"Describe\n\n{TEXT}"


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"\x89PNG\r\n\x1a\n", "byte 0 is 0x89, which is not UTF-8"),
        (b"\x7fELF\x02\x01\x01\0", "byte 7 is 0x00"),
        ("Grüße".encode("latin-1"), "byte 2 is 0xfc, which is not UTF-8"),
        (TEXT.encode("utf-16")[:-1], "which is not UTF-16-LE"),
        ("\ufeffa\0".encode("utf-16-be"), "byte 4 is 0x00"),
        (bytes(10), "byte 0 is 0x00"),
    ],
)
def test_what_is_not_text_is_refused_by_its_byte(monkeypatch, data, seen):
    pipe_in(monkeypatch, data)
    with pytest.raises(InvalidRequest, match=f"^stdin is not text: .*{seen}; expected a question"):
        one_answer.question("Describe")


@pytest.mark.parametrize(
    "data", [b"", b" \n\t\r\n", "\ufeff".encode(), "\ufeff".encode("utf-16-le")]
)
def test_a_blank_question_is_refused(monkeypatch, data):
    pipe_in(monkeypatch, data)
    with pytest.raises(InvalidRequest, match="^stdin is empty, expected a question"):
        one_answer.question(None)


def test_endless_input_is_refused_after_what_a_question_may_have(monkeypatch):
    class Endless(io.RawIOBase):
        taken = 0

        def readable(self):
            return True

        def readinto(self, buffer):
            self.taken += len(buffer)
            buffer[:] = bytes(itertools.repeat(ord("y"), len(buffer)))
            return len(buffer)

    source = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(source)))
    with pytest.raises(InvalidRequest, match="more than 8 MiB, expected at most that"):
        one_answer.question(None)
    assert source.taken < text_input.MOST_BYTES + (1 << 20)


def test_a_command_that_waits_for_an_open_pipe_says_so(monkeypatch, capsys):
    """Only where -p gives a question already; a pipe alone is what the command is for."""
    for given, is_told in (("Hello", True), (None, False)):
        reader, writer = os.pipe()
        with open(reader) as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            patch.setattr(text_input, "_is_ready", close_after_the_first(writer))
            os.write(writer, b"and this")
            assert one_answer.question(given).endswith("and this")
        assert ("waiting for the end of standard input" in capsys.readouterr().err) is is_told


def close_after_the_first(writer):
    """Returns a stand-in for the wait: nothing comes in time, then the pipe is closed."""
    calls = itertools.count()

    def is_ready(seconds):
        if next(calls) == 0:
            os.close(writer)
        return seconds is None

    return is_ready
