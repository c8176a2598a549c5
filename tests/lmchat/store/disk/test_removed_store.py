"""A store whose files are removed or replaced under a running process refuses to write."""

import shutil

import pytest
from stores import grow, home_in_memory, opened_store, talk  # noqa: F401 - fixtures

from lmchat.errors import StoreError
from lmchat.store.records import TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore


def remove_folder(data_dir):
    shutil.rmtree(data_dir)


def remove_file(data_dir):
    (data_dir / "sessions.db").unlink()


def remove_log(data_dir):
    (data_dir / "sessions.db-wal").unlink()


def replace_folder(data_dir):
    data_dir.rename(data_dir.with_name("old"))
    other = SqliteStore(data_dir)
    other.add(talk("another"))
    other.close()


def put_back_a_copy(data_dir):
    shutil.copytree(data_dir, data_dir.with_name("copy"))
    shutil.rmtree(data_dir)
    data_dir.with_name("copy").rename(data_dir)


CHANGES = (remove_folder, remove_file, remove_log, replace_folder, put_back_a_copy)
GONE = "removed or replaced while this process had it open"


@pytest.mark.parametrize("happens", CHANGES)
@pytest.mark.parametrize("has_written", [True, False])
def test_nothing_is_acknowledged(store, data_dir, happens, has_written):
    """Neither a turn, nor its start, nor its tokens, nor another change."""
    record = store.add(talk())
    start = TurnStart(record.leaf, 5, 9, {})
    lease = store.begin(record, start)
    if has_written:
        store.journal([(lease, [1])])
    happens(data_dir)
    verbs = [
        lambda: store.finish(lease, *grow(record)),
        lambda: store.add(talk("new")),
        lambda: store.rename(record, "new"),
        lambda: store.note("key", 1),
        lambda: store.remove(record),
        lambda: store.journal([(lease, [2])]),
        store.sync,
    ]
    for verb in verbs:
        with pytest.raises(StoreError, match=GONE):
            verb()


def test_a_store_that_was_moved_and_put_back_continues(store, data_dir):
    record = store.add(talk())
    away = data_dir.with_name("away")
    data_dir.rename(away)
    with pytest.raises(StoreError, match=GONE):
        store.change(*grow(record))
    away.rename(data_dir)
    record = store.change(*grow(record))
    assert store.find("me", "talk").revision == record.revision


def test_another_process_may_open_and_close_it(store, data_dir):
    """That checkpoints the log, which stays the same file."""
    record = store.add(talk())
    for _ in range(3):
        other = SqliteStore(data_dir)
        other._database.checkpoint("TRUNCATE")
        other.close()
        record = store.change(*grow(record))
