"""The input line without a terminal: its history and its keys."""

import os
import stat
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory, InMemoryHistory

from lmchat.cli.terminal.line_input import LineInput, state_folder
from lmchat.store.data_directory import data_place


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "data"))
    (tmp_path / "data").mkdir(mode=0o700)
    return tmp_path / "data"


def history():
    line_input = LineInput(lambda _text: ())
    return line_input._session.history, line_input.warning


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
