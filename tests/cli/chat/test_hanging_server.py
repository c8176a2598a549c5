"""The chat with a server that accepts requests and never answers: Ctrl-C, completion, leaving.

What waits for the server waits for an event here, which is set at the end of a test. The limits of
the patience are so short that they are over at once.
"""

import asyncio
import contextlib
import signal
import threading
from types import SimpleNamespace

import pytest
from chat_models import chat_model
from chat_terminal import ChatUser, send
from command import LMCHAT
from http_server import RunningServer
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from terminal import Terminal

from lmchat.cli.chat import one_answer
from lmchat.cli.chat.patience import GivenUp, Patience
from lmchat.cli.chat.remote import Server
from lmchat.cli.chat.repl import Repl
from lmchat.cli.terminal.line_input import _AskingCompleter
from lmchat.generation.parts import Delta

SHORT = 0.001  # seconds
NEVER = 1e6
MINUTE = 60


def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def server():
    """The event that the server waits for."""
    answers = threading.Event()
    yield answers
    answers.set()


class Stream:
    """A reply of the server, which says one word and no more until it answers."""

    def __init__(self, server):
        self.server, self.closed = server, threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def events(self):
        yield Delta("text", "one")
        press_ctrl_c()
        self.server.wait()

    def close(self):
        self.server.wait()
        self.closed.set()


class Session:
    """A session of the server."""

    name, owner, turns, length, overflow, unanswered = "trip", "me", (), 0, "drop", None

    def __init__(self, server):
        self.server = server
        self.stop = server.wait
        self.late = Stream(server)

    @property
    def title(self):
        press_ctrl_c()
        self.server.wait(0 if self.answers else None)
        return "the title"

    answers = False


def chat(session, *, url="http://127.0.0.1:1", stop=SHORT):
    engine = SimpleNamespace(max_context=100)
    server = Server(url) if url else None
    patience = Patience(stop, leave=SHORT)
    return Repl(
        engine, session, name="x", plain=True, private=True, server=server, patience=patience
    )


def test_ctrl_c_ends_a_command(server, capsys):
    repl = chat(Session(server))
    with repl.interrupts:
        repl.handle("/title")
    out = "".join(capsys.readouterr())
    assert "no answer from http://127.0.0.1:1 before Ctrl-C; what was asked may" in out
    assert "the title" not in out


def test_ctrl_c_ends_no_command_of_an_engine_here(server, capsys):
    session = Session(server)
    session.answers = True
    repl = chat(session, url=None, stop=None)
    with repl.interrupts:
        repl.handle("/title")
    assert repl.interrupts.pressed
    assert "title: the title" in "".join(capsys.readouterr())


def test_ctrl_c_after_the_first_token_gives_the_reply_up(server, capsys):
    session = Session(server)
    repl = chat(session)
    with repl.interrupts, pytest.raises(GivenUp, match="to Ctrl-C; the reply may still go on"):
        repl.answer(lambda: session.late)
    assert "one" in capsys.readouterr().out


def test_a_reply_that_starts_after_it_was_given_up_is_stopped(server):
    session = Session(server)
    repl = chat(session)

    def start():
        press_ctrl_c()
        server.wait()
        return session.late

    with repl.interrupts, pytest.raises(GivenUp):
        repl.answer(start)
    assert not session.late.closed.is_set()
    server.set()
    assert session.late.closed.wait(MINUTE)


def test_leaving_does_not_wait_for_the_server(server):
    repl = chat(Session(server))
    repl._loop = lambda: 0
    repl._greet = lambda _chosen: None
    repl._drop_empty = server.wait
    assert repl.run() == 0


def test_ctrl_c_during_the_greeting_leads_to_the_prompt(server, capsys):
    def greet(_chosen):
        press_ctrl_c()
        server.wait()

    repl = chat(Session(server))
    repl._greet, repl._drop_empty = greet, lambda: None
    repl._loop = lambda: 7
    assert repl.run() == 7
    assert "before Ctrl-C" in "".join(capsys.readouterr())


def test_an_engine_here_is_waited_for_and_its_errors_are_raised():
    patience = Patience()
    with pytest.raises(ZeroDivisionError):
        patience.leave(lambda: 1 / 0)
    remote = Patience(SHORT, leave=NEVER)
    remote.leave(lambda: 1 / 0)
    assert 0 < remote.left < NEVER


def test_ctrl_c_ends_one_answer(server, capsys):
    session = Session(server)
    session.stream = lambda _text, **_: Stream(server)
    engine = SimpleNamespace(max_context=100, model="x")
    patience = Patience(SHORT, leave=NEVER)
    code = one_answer.run(engine, session, "x", as_json=False, patience=patience)
    out, err = capsys.readouterr()
    assert (code, out) == (130, "one\n")
    assert "no answer from the server to Ctrl-C" in err
    assert patience.is_over


def test_completion_ends_with_its_prompt(server):
    asked = threading.Event()

    def complete(_text):
        asked.set()
        server.wait()
        yield "late", 0, ""

    async def prompt():
        completer = _AskingCompleter(complete)
        found = completer.get_completions_async(Document("/switch "), CompleteEvent())
        task = asyncio.ensure_future(anext(found))
        await asyncio.to_thread(asked.wait)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(prompt())


def test_completion_yields_what_the_server_has():
    async def prompt():
        completer = _AskingCompleter(lambda _text: [("trip", 0, "a title")])
        found = completer.get_completions_async(Document("/switch "), CompleteEvent())
        return [completion.text async for completion in found]

    assert asyncio.run(prompt()) == ["trip"]


def test_the_next_command_gets_its_own_answer(tmp_path, monkeypatch, server):
    asked = threading.Event()

    def held(*_arguments, **_options):
        asked.set()
        server.wait()
        return []

    model = chat_model(tmp_path / "tiny")
    with (
        RunningServer(model=str(model), threads=1, cache_memory="32MiB") as running,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.set)  # the server ends when its requests have
        monkeypatch.setattr(running.engine.sync, "sessions", held)
        command = [*LMCHAT, "chat", "--url", running.url, "--session", "trip"]
        with Terminal(command, columns=120, env={"LMCHAT_HOME": str(tmp_path)}) as terminal:
            terminal.wait("tiny answers")
            user = ChatUser(terminal)
            send(terminal, "/sessions")
            assert asked.wait(MINUTE)
            terminal.key("ctrl-c")
            terminal.wait("before Ctrl-C; what was asked may still be done there")
            user.type("/info", "context ")
            server.set()
            user.type("/title A journey", "title: A journey")
            user.leave()
