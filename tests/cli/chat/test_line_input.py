"""The input line without a terminal: its history and its keys."""

import os
import stat
from pathlib import Path

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from lmchat.cli.terminal import line_input
from lmchat.cli.terminal.key_parser import _ENTER, KeyParser
from lmchat.cli.terminal.line_input import LineInput, state_folder
from lmchat.errors import StoreError
from lmchat.store.data_directory import data_place


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "data"))
    (tmp_path / "data").mkdir(mode=0o700)
    return tmp_path / "data"


def history():
    made = LineInput(lambda _text: ())
    return made._session.history, made.warning


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_target_of_a_linked_history_keeps_its_mode_and_gets_the_line(home):
    mine = home.parent / "dotfile"
    mine.write_text("")
    mine.chmod(0o644)
    (home / "history").symlink_to(mine)
    found, warning = history()
    found.append_string("a line")
    assert (mode(mine), warning) == (0o644, "")
    assert "+a line" in mine.read_text()


def test_a_history_of_its_own_is_narrowed_to_its_user(home):
    (home / "history").write_text("")
    (home / "history").chmod(0o644)
    assert isinstance(history()[0], FileHistory)
    assert mode(home / "history") == 0o600


def test_a_link_to_the_null_device_keeps_no_history_and_changes_nothing(home):
    before = os.stat(os.devnull)
    (home / "history").symlink_to(os.devnull)
    found, warning = history()
    assert isinstance(found, InMemoryHistory)
    assert warning == ""
    assert os.stat(os.devnull).st_mode == before.st_mode


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_keeps_no_lines_is_a_warning(home, make):
    make(home / "history")
    found, warning = history()
    assert isinstance(found, InMemoryHistory)
    assert warning.startswith("no input history: ")


def test_history_and_data_mean_the_same_home(home, monkeypatch):
    monkeypatch.setenv("LMCHAT_HOME", "~/mine")
    assert state_folder() == data_place() == home.parent / "mine"
    monkeypatch.delenv("LMCHAT_HOME")
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, "relative")
    assert state_folder() == Path.home() / ".local/state/lmchat"
    assert data_place() == Path.home() / ".local/share/lmchat"


def parsed(*pieces):
    """Returns the keys of what a terminal sends, and the text that they insert."""
    keys = []
    parser = KeyParser(keys.append)
    for piece in pieces:
        parser.feed(piece)
    parser.flush()
    return [key.key for key in keys], keys


ALT_ENTER = [Keys.Escape, Keys.ControlM]


@pytest.mark.parametrize("modifiers", [2, 3, 5, 6, 4, 9, 2 + 64, 5 + 128])
@pytest.mark.parametrize("spelling", ["\x1b[13;{}u", "\x1b[57414;{}u", "\x1b[27;{};13~"])
def test_enter_with_a_modifier_is_a_new_line(spelling, modifiers):
    """Shift, Alt and Ctrl as 1 plus bits of 1, 2 and 4; also while a lock is on."""
    sequence = spelling.format(modifiers)
    assert parsed(sequence)[0] == ALT_ENTER
    assert parsed(*sequence)[0] == ALT_ENTER  # each byte in a read of its own


@pytest.mark.parametrize("sequence", ["\x1b[13u", "\x1b[13;1u", "\x1b[13;65u", "\x1b[27;1;13~"])
def test_enter_alone_is_enter(sequence):
    assert parsed(sequence)[0] == [Keys.ControlM]


@pytest.mark.parametrize(
    "sequence", ["\x1b[97;5u", "\x1b[27;5;97~", "\x1b[?62;22c", "\x1b[>0;10;1c", "\x1b[57441;2:3u"]
)
def test_an_unknown_sequence_inserts_nothing(sequence):
    assert parsed(f"a{sequence}b")[0] == ["a", "b"]
    assert parsed("a", *sequence, "b")[0] == ["a", "b"]


@pytest.mark.parametrize("sequence", [*ANSI_SEQUENCES, "\x1b[12;40R", "\x1b", "\x1bx", "é京"])
def test_known_keys_are_those_of_prompt_toolkit(sequence):
    if _ENTER.fullmatch(sequence) or sequence == "\x1b[200~":
        return
    keys = []
    reference = Vt100Parser(keys.append)
    reference.feed(sequence)
    reference.flush()
    assert parsed(sequence)[1] == keys
    assert parsed(*sequence)[1] == keys


def test_a_paste_is_one_text_whatever_it_has():
    text = "a\x1b[13;2ub\x1b[97;5u\rc"
    _, keys = parsed("x\x1b[200~" + text[:4], text[4:] + "\x1b[20", "1~y")
    assert [(key.key, key.data) for key in keys] == [
        ("x", "x"), (Keys.BracketedPaste, text), ("y", "y"),
    ]  # fmt: skip


def test_the_editor_without_a_folder_for_its_file_keeps_the_line(home, monkeypatch, capsys):
    def refuse():
        raise StoreError("no folder for temporary files")

    monkeypatch.setattr(line_input, "use_temporary_folder", refuse)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        session = PromptSession(key_bindings=line_input._bindings())
        pipe.send_text("typed\x18\x05\r")
        assert session.prompt() == "typed"
    assert "lmchat: no folder for temporary files" in capsys.readouterr().err
