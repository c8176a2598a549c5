"""The folder for temporary files, and what ended processes have left in it."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile

import command
import pytest

from lmchat.errors import StoreError
from lmchat.store import temporary
from lmchat.store.choice import open_store
from lmchat.store.temporary import temporary_folder, use_temporary_folder

NAMES = ("TMPDIR", "TEMP", "TMP")


@pytest.fixture(autouse=True)
def no_system_folder(monkeypatch, tmp_path):
    """The system has no folder for temporary files; the current one can be written."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(temporary, "_USUAL", ("/nowhere",))
    monkeypatch.setattr(temporary, "_own", None)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    yield
    temporary._leave()


def test_the_folder_of_the_system_is_preferred(tmp_path, monkeypatch, data_dir):
    monkeypatch.setattr(temporary, "_USUAL", (str(tmp_path),))
    assert temporary_folder() == tmp_path
    for number, name in enumerate(reversed(NAMES)):
        named = tmp_path / str(number)
        named.mkdir()
        monkeypatch.setenv(name, str(named))
        assert temporary_folder() == named
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the program's own choice
    assert temporary_folder() == tmp_path
    assert not (data_dir / "tmp").exists()


@pytest.mark.parametrize("named", ["", "/nowhere", "relative", "file", "/proc"])
def test_a_variable_that_names_no_usable_folder_is_passed_over(tmp_path, monkeypatch, named):
    (tmp_path / "current" / "file").write_text("")
    monkeypatch.setenv("TMPDIR", named)
    monkeypatch.setattr(temporary, "_USUAL", (str(tmp_path),))
    assert temporary_folder() == tmp_path


def test_a_full_folder_is_passed_over(tmp_path, monkeypatch, data_dir):
    (tmp_path / "full").mkdir()
    made = tempfile.TemporaryFile

    def full(*arguments, dir, **options):
        if dir == tmp_path / "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return made(*arguments, dir=dir, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    assert temporary_folder().parent == data_dir / "tmp"


def test_without_one_it_is_in_the_data_directory(tmp_path, data_dir):
    folder = temporary_folder()
    assert folder.parent == data_dir / "tmp"
    assert [one.stat().st_mode & 0o777 for one in (folder, folder.parent)] == [0o700, 0o700]
    assert temporary_folder() == folder
    assert list((tmp_path / "current").iterdir()) == []
    shutil.rmtree(data_dir / "tmp")
    assert temporary_folder().is_dir()
    use_temporary_folder()
    assert tempfile.gettempdir() == str(temporary_folder())
    shutil.rmtree(data_dir / "tmp")
    assert temporary_folder().is_dir()


def test_where_the_current_folder_is_gone_there_is_one(tmp_path, monkeypatch, data_dir):
    monkeypatch.setenv("TMPDIR", "relative")
    (tmp_path / "current").rmdir()
    assert temporary_folder().parent == data_dir / "tmp"


def test_without_any_the_error_names_what_is_needed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "file" / "data"))
    with pytest.raises(StoreError) as caught:
        temporary_folder()
    message = str(caught.value)
    assert "none of /nowhere can be written" in message
    assert f"cannot use the folder {tmp_path / 'file' / 'data'}" in message
    assert "Set TMPDIR, or LMCHAT_HOME, to a folder that can be written" in message


def test_leftovers_of_ended_processes_alone_are_removed(data_dir):
    left = data_dir / "tmp" / "lmchat-process-ended"
    left.mkdir(parents=True)
    (left / "upload.zip").write_bytes(b"half")
    (data_dir / "tmp" / "of the user").mkdir()
    link = data_dir / "tmp" / "lmchat-link"
    link.symlink_to(data_dir / "tmp" / "of the user")
    live = data_dir / "tmp" / "lmchat-deploy-live"
    live.mkdir()
    descriptor = os.open(live, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    open_store(data_dir)[0].close()
    assert sorted(one.name for one in (data_dir / "tmp").iterdir()) == [
        "lmchat-deploy-live", "lmchat-link", "of the user"
    ]  # fmt: skip
    os.close(descriptor)
    temporary_folder()
    assert not live.exists()


CODE = """
import sys, tempfile
from lmchat.store import temporary
tempfile.tempdir, temporary._USUAL = None, ()
print(temporary.temporary_folder(), flush=True)
sys.stdin.read()
"""


def test_a_folder_lives_as_long_as_its_process(data_dir):
    """Two processes have one each; that of a killed one goes with the next."""
    env = {name: text for name, text in command.ENVIRONMENT.items() if name not in NAMES}

    def started():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", CODE], env=env, **pipes)

    with started() as first, started() as second:
        folders = [one.stdout.readline().strip() for one in (first, second)]
        mine = str(temporary_folder())
        assert len({*folders, mine}) == 3
        assert all(map(os.path.isdir, folders))
        first.kill()
        first.wait()
        temporary.remove_leftovers(data_dir)
        assert [os.path.isdir(one) for one in [*folders, mine]] == [False, True, True]
        second.communicate()
        assert not os.path.exists(folders[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own():
    mine = temporary_folder()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, os.fsencode(temporary_folder()))
        temporary._leave()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        theirs = pipe.read()
    os.wait()
    assert theirs != os.fsencode(mine)
    assert mine.is_dir()
    assert not os.path.exists(theirs)
