"""Input of the chat: keys, signals, several lines, history, editor, completion."""

import os
import shlex
import shutil
import signal
import stat
import termios
from queue import SimpleQueue

import pytest
from chat_terminal import OK, SCRIPTED, Chat, check_restored, leave, send, wait_replies
from terminal import Terminal

from lmchat.cli.terminal.interrupts import Interrupts, Signal


@pytest.fixture
def chat(tmp_path):
    return Chat(tmp_path)


# --- signals and leaving -----------------------------------------------------------------------


def test_ctrl_c_stops_a_reply_which_stays_in_the_session(chat):
    long = [["text", "One.\n\nTwo **th"], ["wait", "never"], ["text", "never"]]
    with chat(long, [["text", "ree** four"]], OK) as terminal:
        send(terminal, "x")
        terminal.wait("Two")
        terminal.key("ctrl-c", "ctrl-c")
        wait_replies(terminal, 1)
        assert "One.\n\nTwo **th\nstopped; /continue goes on\n12 new + 0 cached" in terminal.text
        assert "^C" not in terminal.everything
        send(terminal, "/continue")
        wait_replies(terminal, 2)
        assert "> /continue\nTwo three four\n12 new" in terminal.text
        send(terminal, "more")
        wait_replies(terminal, 3)
        leave(terminal)


@pytest.mark.parametrize("before", [[], [["progress", 10, 4000]]])
def test_ctrl_c_before_the_first_token(chat, before):
    with chat([*before, ["wait", "never"]], OK) as terminal:
        send(terminal, "x")
        terminal.wait("10 of 4,000" if before else "waiting for the first token")
        terminal.key("ctrl-c")
        terminal.wait("> x\nstopped before its first token; Enter asks again\n12 new")
        terminal.wait_prompt("> x")  # offered again
        terminal.key("enter")
        terminal.wait("> x\nok\n")
        leave(terminal)
    assert chat.messages() == ["x"]


def test_ctrl_c_at_the_prompt(chat):
    with chat(OK) as terminal:
        terminal.wait_prompt()
        terminal.key("ctrl-c")
        terminal.wait("Ctrl-D or /exit leaves.")
        terminal.wait_prompt()
        terminal.type("half a line")
        terminal.wait("half a line")
        terminal.key("ctrl-c")
        terminal.wait(lambda: "half" not in terminal.text)
        terminal.type('"""')
        terminal.key("enter")
        terminal.type("block")
        terminal.wait("block")
        terminal.key("ctrl-c")
        terminal.wait(lambda: "block" not in terminal.text)
        send(terminal, "x")
        wait_replies(terminal, 1)
        leave(terminal)


def test_keys_typed_during_a_reply_go_to_the_next_prompt(chat):
    with chat([["text", "a"], ["wait", "a"], ["text", "b"]], OK) as terminal:
        send(terminal, "x")
        terminal.wait("\na")
        assert not terminal.settings[3] & (termios.ECHO | termios.ICANON)
        terminal.type("typed ahead")
        chat.go("a")
        terminal.wait("> typed ahead")
        assert terminal.everything.count("typed ahead") == 1
        terminal.key("enter")
        wait_replies(terminal, 2)
        leave(terminal)


def test_ctrl_d_during_a_reply_leaves_after_it(chat):
    with chat([["text", "a"], ["wait", "a"], ["text", "b"]]) as terminal:
        send(terminal, "x")
        terminal.wait("\na")
        terminal.key("ctrl-d")
        chat.go("a")
        assert terminal.wait_end() == 0
        assert "\nab\n12 new" in terminal.everything
        check_restored(terminal)


def test_a_ctrl_c_just_before_a_reply_stops_it():
    queue = SimpleQueue()
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with interrupts.to(queue):
            assert queue.get_nowait() is Signal.STOP
            signal.raise_signal(signal.SIGWINCH)
            signal.raise_signal(signal.SIGINT)
            assert [queue.get_nowait(), queue.get_nowait()] == [Signal.RESIZE, Signal.STOP]
        signal.raise_signal(signal.SIGINT)
        assert queue.empty()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("where", ["prompt", "reply"])
def test_a_signal_restores_the_terminal(chat, number, where):
    with chat([["text", "a\n\nb"], ["wait", "never"]]) as terminal:
        terminal.wait_prompt()
        if where == "reply":
            send(terminal, "x")
            terminal.wait("\nb")
        os.kill(terminal.pid, number)
        assert terminal.wait_end() == 128 + number
        check_restored(terminal)


def test_a_hang_up_ends_the_chat(chat):
    with chat([["text", "a\n\nb"], ["wait", "never"]]) as terminal:
        send(terminal, "x")
        terminal.wait("\nb")
        terminal.hang_up()
        assert terminal.wait_end() != 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, for its job control")
def test_ctrl_z_suspends_and_fg_resumes(chat):
    chat.write([["text", "One.\n\nTwo"], ["wait", "a"], ["text", " three"]])
    command = " ".join(shlex.quote(word) for word in [*SCRIPTED, str(chat.script)])
    env = chat.env | {"PS1": "shell$ "}
    with Terminal(["bash", "--norc", "-i"], columns=200, env=env) as terminal:
        terminal.wait("shell$")
        terminal.type(command)
        terminal.key("enter")
        send(terminal, "x")
        terminal.wait("\nTwo")
        assert terminal.cursor_hidden
        terminal.key("ctrl-z")
        terminal.wait("Stopped")
        terminal.wait_prompt("shell$ ")
        assert not terminal.cursor_hidden
        assert "\nTwo" not in terminal.text
        terminal.type("fg")
        terminal.key("enter")
        terminal.wait("\nTwo")
        assert terminal.cursor_hidden
        chat.go("a")
        wait_replies(terminal, 1)
        terminal.key("ctrl-d")
        terminal.wait_prompt("shell$ ")


# --- typing ----------------------------------------------------------------------------------


def test_messages_of_several_lines(chat):
    with chat(*[OK] * 4) as terminal:
        send(terminal, '"""')
        terminal.type("one")
        terminal.key("enter", "enter")
        terminal.type('two"""')
        terminal.key("enter")
        wait_replies(terminal, 1)
        assert '> """\n  one\n\n  two"""\nok\n' in terminal.text
        terminal.type("a")
        terminal.key("alt-enter")
        terminal.type("b")
        terminal.key("enter")
        wait_replies(terminal, 2)
        assert "> a\n  b\nok\n" in terminal.text
        terminal.paste("p 1\n/p 2\n")
        terminal.wait("  /p 2")
        terminal.key("enter")
        wait_replies(terminal, 3)
        leave(terminal)
    assert chat.messages() == ["one\n\ntwo", "a\nb", "p 1\n/p 2"]


@pytest.mark.parametrize("stopped", [False, True])
def test_what_is_pasted_while_a_reply_runs_is_one_draft(chat, stopped):
    """Also after Ctrl-C, which drops what a terminal holds unless it is told otherwise."""
    with chat([["text", "One\n\n"], ["wait", "go"], ["text", "two"]], OK) as terminal:
        send(terminal, "x")
        terminal.wait("One")
        on, off = (terminal.raw.rfind(b"\x1b[?2004" + end) for end in (b"h", b"l"))
        assert on > off
        terminal.type("see ")
        terminal.paste("p 1\np 2\n")
        terminal.type("end")
        if stopped:
            terminal.key("ctrl-c")
        else:
            chat.go("go")
        terminal.wait(lambda: terminal.text.endswith("> see p 1\n  p 2\n  end"))
        assert chat.messages() == ["x"]
        terminal.key("enter")
        wait_replies(terminal, 2)
        leave(terminal)
    assert chat.messages() == ["x", "see p 1\np 2\nend"]


def test_the_input_history_is_stored_and_private(chat):
    with chat(OK) as terminal:
        send(terminal, "first message")
        wait_replies(terminal, 1)
        leave(terminal)
    with chat(OK) as terminal:
        terminal.wait_prompt()
        terminal.key("ctrl-r")
        terminal.type("rst mess")
        terminal.wait("> first message")
        terminal.key("enter")
        terminal.wait(lambda: "I-search" not in terminal.text)
        terminal.key("enter")
        wait_replies(terminal, 1)
        terminal.key("up")
        terminal.wait(lambda: terminal.text.endswith("> first message"))
        terminal.key("ctrl-c")
        leave(terminal)
    data_dir = chat.folder / "data"
    assert stat.S_IMODE((data_dir / "history").stat().st_mode) == 0o600
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700


def test_an_unwritable_history_is_a_warning(chat):
    (chat.folder / "data").write_text("a file")
    with chat(OK) as terminal:
        terminal.wait("no input history: ")
        send(terminal, "x")
        wait_replies(terminal, 1)
        leave(terminal)


def test_ctrl_x_ctrl_e_opens_the_editor(chat):
    editor = chat.folder / "editor"
    editor.write_text('#!/bin/sh\necho " from the editor" >> "$1"\n')
    editor.chmod(0o755)
    with chat(OK, env={"EDITOR": str(editor), "VISUAL": ""}) as terminal:
        terminal.wait_prompt()
        terminal.type("begun")
        terminal.wait("> begun")
        terminal.key("ctrl-x", "ctrl-e")
        wait_replies(terminal, 1)
        leave(terminal)
    assert chat.messages() == ["begun from the editor"]


def test_the_first_key_of_a_prompt_prefetches_the_session(chat):
    warmed = chat.folder / "warmed"
    with chat(OK, OK) as terminal:
        terminal.wait_prompt()
        assert not warmed.exists()
        for count in (1, 2):
            terminal.type("several keys")
            terminal.wait(lambda: terminal.text.endswith("> several keys"))
            terminal.key("enter")
            wait_replies(terminal, count)
            terminal.wait(lambda count=count: warmed.read_text() == "warm\n" * count)
        leave(terminal)


def test_tab_completes_commands_and_arguments(chat):
    with chat(OK) as terminal:
        terminal.wait_prompt()
        terminal.type("/und")
        terminal.wait("take back the last question and its reply")
        terminal.key("tab")
        terminal.wait("> /undo")
        terminal.key("ctrl-c")
        terminal.wait_prompt()
        terminal.type("/set freq")
        terminal.wait("taken from a token's logit")
        terminal.key("tab")
        terminal.wait("> /set frequency_penalty")
        terminal.key("ctrl-c")
        terminal.wait_prompt()
        terminal.type("/think h")
        terminal.wait("only its length is shown")
        terminal.key("tab")
        terminal.wait("> /think hide")
        terminal.key("enter")
        terminal.wait("; hidden")
        leave(terminal)
