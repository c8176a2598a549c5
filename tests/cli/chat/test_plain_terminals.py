"""Terminals that take no escape sequences, and messages while a model loads."""

import io
import logging
import shlex
import sys

import pytest
from assets import ROOT
from chat_models import chat_model
from chat_terminal import send
from command import LMCHAT
from terminal import Terminal

from lmchat.cli.terminal.escapes import loading, takes_escapes

OPTIONS = ["--cache-memory", "32MiB", "--threads", "1", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def start(tmp_path):
    def one(term, *arguments, output=""):
        env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(tmp_path / "data"), "TERM": term}
        unset = "unset TERM; " if term == "unset" else ""
        line = f"{unset}exec {shlex.join([*LMCHAT, *arguments])} {output}"
        return Terminal(["sh", "-c", line], env=env)

    return one


@pytest.mark.parametrize(("term", "output"), [("dumb", ""), ("unset", "> answers")])
def test_a_chat_writes_no_escape_sequences(start, model, tmp_path, monkeypatch, term, output):
    monkeypatch.chdir(tmp_path)
    with start(term, "chat", model, *OPTIONS, output=output) as terminal:
        send(terminal, "hello")
        terminal.wait(lambda: "TTFT" in terminal.everything)
        for line, words in [
            ("/help", "/help COMMAND explains one."),
            ("/sessions", "chat-1"),
            ("/clear", "[y/N]"),
        ]:
            send(terminal, line)
            terminal.wait(lambda words=words: words in terminal.everything)
        terminal.type("y")
        terminal.key("enter")
        terminal.wait("session chat-2 begins")
        terminal.wait_prompt("chat-2> ")
        terminal.key("ctrl-d")
        assert terminal.wait_end() == 0
        assert b"\x1b" not in terminal.raw
        assert terminal.raw.startswith(b"loading tiny ...\r\n")


def test_other_commands_write_no_escape_sequences(start, model):
    for arguments in (
        ["chat", model, "-p", "hello", "--session", "trip", *OPTIONS],
        ["chat", "-p", "hello"],  # with a line about the bundled model
        ["sessions", "list"],
        ["sessions", "show", "trip"],
        ["info", model],
    ):
        with start("dumb", *arguments) as terminal:
            assert terminal.wait_end() == 0
            assert terminal.everything.strip()
            assert b"\x1b" not in terminal.raw, arguments


def test_an_ordinary_terminal_gets_escape_sequences(start, model):
    with start("xterm-256color", "chat", model, *OPTIONS) as terminal:
        terminal.wait_prompt()
        assert terminal.raw.startswith(b"loading tiny ...\r\x1b[K")
        terminal.key("ctrl-d")
        assert terminal.wait_end() == 0


@pytest.mark.parametrize("term", ["dumb", "Dumb", "unknown", "", None])
def test_terminals_that_take_no_escape_sequences(monkeypatch, term):
    monkeypatch.setenv("TERM", "xterm")
    assert takes_escapes(_Tty())
    assert not takes_escapes(io.StringIO())
    monkeypatch.delenv("TERM") if term is None else monkeypatch.setenv("TERM", term)
    assert not takes_escapes(_Tty())


class _Tty(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, term, kind=_Tty):
    file = kind()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", term)
    with loading("x"):
        logging.getLogger("turbomind.engine.engine").warning("float16 takes %s times", 1.6)
    assert not [h for h in logging.getLogger().handlers if "Line" in type(h).__name__]
    return file.getvalue()


def test_a_warning_while_a_model_loads_has_its_own_line(monkeypatch):
    clear, line = "\r\x1b[K", "loading x ..."
    warning = "lmchat: float16 takes 1.6 times\n"
    assert printed(monkeypatch, "xterm") == line + clear + warning + line + clear
    assert printed(monkeypatch, "dumb") == f"{line}\n{warning}"
    assert "loading" not in printed(monkeypatch, "xterm", io.StringIO)
