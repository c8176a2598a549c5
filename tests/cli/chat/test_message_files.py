"""`/file` puts text files into the next message, and `/copy` copies the last reply."""

import base64
import os
import re

import pytest
from chat_terminal import OK, Chat, leave, send, wait_replies

from lmchat.cli.chat.message_files import MOST_BYTES, joined, read
from lmchat.errors import InvalidRequest


@pytest.fixture
def chat(tmp_path):
    return Chat(tmp_path)


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("a.txt", "{}/a.txt"),
        ("two words.txt", "{}/two words.txt"),
        ("two words.txt", '"{}/two words.txt"'),
        ("two words.txt", "'{}/two words.txt'"),
        ("two words.txt", "{}/two\\ words.txt"),
        ('"quoted".txt', '{}/"quoted".txt'),
        ("it's.txt", "{}/it's.txt"),
        ("日本.txt", "{}/日本.txt"),
        ("home.txt", "~/home.txt"),
        ("home.txt", '"~/home.txt"'),
    ],
)
def test_a_path_is_read_as_it_is_or_quoted(tmp_path, monkeypatch, name, typed):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name).write_bytes("\tone\r\n\n日本\n\n".encode())
    file = read(typed.format(tmp_path))
    assert (file.name, file.text) == (name, "\tone\r\n\n日本")


def test_a_mark_of_utf_8_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone")
    assert read(str(tmp_path / "a")).text == "one"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x89PNG\r\n", "x.bin is not a text file: byte 0 is 0x89, which is not UTF-8"),
        (b"one\0two", "x.bin is not a text file: byte 3 is 0x00"),
        (
            "one".encode("utf-16")[:-1],
            "x.bin is not a text file: byte 6 is 0x65, which is not UTF-16",
        ),
        (b" \n", "x.bin has no text"),
        (b"", "x.bin has no text"),
        (b"a" * (MOST_BYTES + 1), "x.bin has 1 MiB, expected at most 1 MiB"),
        (b"a" * (3 << 20), "x.bin has 3 MiB, expected at most 1 MiB"),
    ],
)
def test_what_is_not_text_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=re.escape(f"{tmp_path}/{words}")):
        read(str(path))


def test_what_is_not_a_file_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nothing writes into it
    for path, words in [
        (tmp_path / "gone.txt", "cannot read {}: No such file or directory"),
        (tmp_path, "{} is a folder, expected a text file"),
        (tmp_path / "pipe", "{} is not a regular file, expected a text file"),
        (tmp_path / ("x" * 300), "cannot read {}: File name too long"),
        (f"'{tmp_path}", "cannot read {}: No such file or directory"),
        (f"{tmp_path}/a\0b", "cannot read {}: "),
    ]:
        with pytest.raises(InvalidRequest, match=re.escape(words.format(path))):
            read(str(path))


def test_the_largest_file_is_read(tmp_path):
    (tmp_path / "large").write_bytes(b"a" * MOST_BYTES)
    assert len(read(str(tmp_path / "large")).text) == MOST_BYTES


def test_files_follow_the_message_in_their_order(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"text of {name}\n")
    files = [read(str(tmp_path / name)) for name in ("one", "two")]
    assert joined("Compare.", files) == "Compare.\n\none:\ntext of one\n\ntwo:\ntext of two"
    assert joined("Compare.", []) == "Compare."


def test_the_next_message_carries_files_until_it_is_answered(chat, tmp_path):
    (tmp_path / "my notes.md").write_text("# Notes\n/exit\n")
    wait = [["wait", "a"]]
    with chat([["fail", "no room"]], wait, OK, OK, OK, columns=120) as terminal:
        send(terminal, "/file")
        terminal.wait("error: /file needs the path of a text file")
        send(terminal, f"/file {tmp_path}/nothing")
        terminal.wait("error: cannot read ")
        send(terminal, f"/file {tmp_path}/my notes.md")
        terminal.wait("the next message carries my notes.md (13 characters)")
        send(terminal, "What is this?")
        terminal.wait("error: no room\n")
        terminal.wait("carries my notes.md; /file off removes it\n")
        send(terminal, "Again")
        terminal.wait("waiting for the first token")
        terminal.key("ctrl-c")
        terminal.wait("stopped before its first token; Enter asks again")
        terminal.wait(lambda: terminal.text.endswith("> Again"))  # without the file
        terminal.key("enter")
        wait_replies(terminal, 2)
        send(terminal, "And now?")
        wait_replies(terminal, 3)
        send(terminal, f"/file {tmp_path}/my notes.md")
        send(terminal, "/file off")
        terminal.wait("the next message carries no file")
        send(terminal, "And then?")
        wait_replies(terminal, 4)
        leave(terminal)
    *_, first, second, third = chat.messages()
    assert first == "Again\n\nmy notes.md:\n# Notes\n/exit"
    assert (second, third) == ("And now?", "And then?")


def copied(raw):
    """The texts that a terminal was asked to copy, as xterm's control sequences say it."""
    return [
        base64.b64decode(data, validate=True).decode()
        for data in re.findall(rb"\x1b\]52;c;([^\x07\x1b]*)(?:\x07|\x1b\\)", raw)
    ]


@pytest.mark.parametrize("options", [[], ["--plain"]])
def test_copy_gives_the_terminal_the_last_reply_as_it_is(chat, options):
    text = "# Title\n\n**bold** 日本 😀\n" + "long " * 5000
    steps = [["reasoning", "Hm"], ["text", text]]
    with chat([["text", "first"]], steps, options=options) as terminal:
        send(terminal, "/copy")
        terminal.wait("There is no reply to copy.")
        assert copied(terminal.raw) == []
        send(terminal, "x")
        wait_replies(terminal, 1)
        send(terminal, "y")
        wait_replies(terminal, 2)
        send(terminal, "/copy")
        terminal.wait(f"{len(text):,} characters copied")
        assert copied(terminal.raw) == [text]
        leave(terminal)


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_copy_asks_no_terminal_without_escape_sequences(chat, term):
    with chat(OK, env={"TERM": term}) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        send(terminal, "/copy")
        terminal.wait("error: nothing is copied: the output is not a terminal that takes escape")
        assert b"\x1b]52" not in terminal.raw
        leave(terminal)


@pytest.mark.parametrize("name", ["exit", "quit", "bye", "q"])
def test_every_word_that_leaves(chat, name):
    with chat() as terminal:
        send(terminal, f"/{name}")
        assert terminal.wait_end() == 0
