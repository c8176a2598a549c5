"""A full disk is a place from which there is a way back: sessions can be deleted there."""

import resource
import subprocess

import process_limits
import pytest
from command import ENVIRONMENT, LMCHAT
from stores import assert_same, fill, grow, small_disk, talk  # noqa: F401 - a fixture

from lmchat.errors import StoreError
from lmchat.store.sqlite import reserve_file
from lmchat.store.sqlite.database import Database
from lmchat.store.sqlite.sqlite_store import SqliteStore

LONG = "much " * 20_000


@pytest.fixture
def data_dir(disk):
    """With two sessions in it, one of them long."""
    store = SqliteStore(disk / "data")
    for name in ("long", "short"):
        record = talk(name, 3)
        record = store.add(record)
        if name == "long":
            record = store.change(*grow(record, LONG))
    store.close()
    return disk / "data"


def names(store):
    return {summary.name for summary in store.summaries("me")}


def reserve_of(data_dir):
    return data_dir / "sessions.db-spare"


@pytest.mark.parametrize("opened_before", [True, False])
def test_every_session_can_be_deleted(disk, data_dir, opened_before):
    store = SqliteStore(data_dir) if opened_before else None
    fill(disk)
    store = store or SqliteStore(data_dir)
    short = store.find("me", "short")
    with pytest.raises(StoreError, match="the disk is full"):
        store.change(*grow(short, LONG))
    short = store.find("me", "short")
    store.remove(store.find("me", "long"))
    assert names(store) == {"short"}
    assert_same(store.find("me", "short"), short)
    assert (
        reserve_of(data_dir).stat().st_size
        == reserve_of(data_dir).stat().st_blocks * 512
        >= 1 << 20
    )
    assert reserve_of(data_dir).stat().st_mode & 0o777 == 0o600
    fill(disk)
    store.remove(short)
    assert names(store) == set()
    store.close()
    for file in disk.glob("fill-*"):
        file.unlink()
    store = SqliteStore(data_dir)
    assert (names(store), store.verify()) == (set(), [])
    assert reserve_of(data_dir).stat().st_size == reserve_file.BYTES  # its full size again
    store.close()


def test_a_store_that_could_only_be_read_is_written_when_there_is_room(disk, data_dir):
    reserve_of(data_dir).unlink()
    fill(disk)
    store = SqliteStore(data_dir)
    record = store.find("me", "short")
    for verb in (lambda: store.change(*grow(record)), lambda: store.remove(record)):
        with pytest.raises(StoreError, match="the disk is full|cannot be opened"):
            verb()
    assert_same(store.find("me", "short"), record)
    for file in (*disk.glob("fill-*"), disk / "last"):
        file.unlink()
    record = store.change(*grow(record, LONG))
    assert_same(store.find("me", "short"), record)
    store.close()


def test_the_command_deletes_on_a_full_disk(disk, data_dir):
    store = SqliteStore(data_dir)
    store.add(talk("mine", 2).changed(owner="local"))
    store.close()
    fill(disk)
    environment = {**ENVIRONMENT, "LMCHAT_HOME": str(data_dir)}

    def run(*arguments):
        return subprocess.run(
            [*LMCHAT, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )

    done = run("chat", "-p", "Hi", "--session", "mine")
    assert (done.returncode, "the disk is full" in done.stderr) == (1, True)
    for arguments, printed in ((["list"], "mine"), (["rm", "mine", "--yes"], "deleted: mine")):
        done = run("sessions", *arguments)
        assert (done.returncode, done.stderr, printed in done.stdout) == (0, "", True)


def test_where_nothing_can_be_mounted(tmp_path, monkeypatch):
    """No file grows beyond a limit, which ends when the reserve file is deleted."""
    data_dir = tmp_path / "data"
    store = SqliteStore(data_dir)
    store.add(talk("a", 3))
    store.add(talk("b", 3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    give_up = Database._release_reserve

    def giving_up(database):
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return give_up(database)

    monkeypatch.setattr(Database, "_release_reserve", giving_up)
    size = (data_dir / "sessions.db-wal").stat().st_size
    with process_limits.lowered(resource.RLIMIT_FSIZE, size):
        record = store.find("me", "a")
        with pytest.raises(StoreError, match="the disk"):
            store.change(*grow(record, LONG))
        store.remove(store.find("me", "a"))
    assert names(store) == {"b"}
    store.close()


def test_the_reserve_file_grows_with_the_room(tmp_path, monkeypatch):
    """It takes an eighth of what is free, nothing of a disk that is almost full."""
    free = [1 << 20]
    monkeypatch.setattr("lmchat.store.sqlite.reserve_file.free_bytes", lambda folder: free[0])
    store, reserve = SqliteStore(tmp_path / "data"), reserve_of(tmp_path / "data")
    assert not reserve.exists()
    record = store.add(talk("a", 1))
    for free[0], size in ((10 << 20, 1 << 20), (1 << 20, 1 << 20), (100 << 20, 4 << 20)):
        record = store.change(record)
        assert reserve.stat().st_size == size
    reserve.unlink()
    store.change(record)
    assert reserve.stat().st_size == 4 << 20
    store.close()
