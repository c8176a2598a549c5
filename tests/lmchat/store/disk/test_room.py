"""KV gives way on a full disk: what users write is stored as long as there is any KV."""

import errno
import os
import threading

import pytest
from stores import assert_same, fill, grow, small_disk, talk, user  # noqa: F401 - a fixture

from lmchat.errors import StoreError
from lmchat.store.records import TurnStart
from lmchat.store.sqlite import room
from lmchat.store.sqlite.sqlite_store import SqliteStore
from turbomind.engine.pages import PAGE_TOKENS, Page, PageStore, page_keys, root_key

LONG = "much " * 20_000
MODEL = "a model"
PAYLOAD = bytes(512 << 10)


def chain(salt, ids):
    """Full pages of a transcript, 512 KiB each."""
    parent, pages = root_key(MODEL, salt), []
    for i, key in enumerate(page_keys(MODEL, ids, salt)):
        tokens = list(ids[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])
        pages.append(Page(key, parent, tokens, PAYLOAD, fingerprint=MODEL, heads=1))
        parent = key
    return pages


@pytest.fixture
def data_dir(disk):
    """A store with a long session, and KV on a disk that is full."""
    store = SqliteStore(disk / "data")
    store.add(talk("one", 3, fingerprint=MODEL))
    store.close()
    write_pages(disk / "data", "others", range(PAGE_TOKENS * 30))
    return disk / "data"


def write_pages(data_dir, salt, ids):
    with PageStore(data_dir / "pages") as pages:
        assert all(pages.write(page) for page in chain(salt, ids))


def pages_left(data_dir, salt="others", ids=range(PAGE_TOKENS * 30)):
    with PageStore(data_dir / "pages") as pages:
        return sum(pages.contains(page_keys(MODEL, ids, salt)))


def talk_until_full(disk, store):
    """Adds turns, each on a full disk. Returns the record of the last one that was stored."""
    stored = [store.find("me", "one")]

    def talk_more():
        fill(disk)
        stored.append(store.change(*grow(stored[-1], LONG)))
        talk_more()

    with pytest.raises(StoreError, match="the disk is full"):
        talk_more()
    return stored[-1]


WRITES = {
    "change": lambda store, record: store.change(*grow(record, LONG)),
    "add": lambda store, record: store.add(talk("new", 1, LONG)),
    "begin": lambda store, record: store.begin(record, TurnStart(record.leaf, 1, 99, {"x": LONG})),
    "note": lambda store, record: store.note("x", LONG),
    "rename": lambda store, record: store.rename(record, "other"),
    "remove": lambda store, record: store.remove(record),
}


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize("opened_before", [True, False])
def test_every_write_is_stored(disk, data_dir, verb, opened_before):
    store = SqliteStore(data_dir) if opened_before else None
    fill(disk)
    store = store or SqliteStore(data_dir)
    WRITES[verb](store, store.find("me", "one"))
    assert 0 < pages_left(data_dir) <= 30
    assert store.verify() == []
    store.close()


def test_turn_after_turn_is_stored_until_no_page_is_left(disk, data_dir):
    """Then the disk is full, reading works, and nothing that was acknowledged is lost."""
    store = SqliteStore(data_dir)
    record = talk_until_full(disk, store)
    assert pages_left(data_dir) == 0
    assert len(record.tree) > 10
    store.close()
    store = SqliteStore(data_dir)
    assert_same(store.find("me", "one"), record)
    store.close()


def test_a_journal_is_stored(disk, data_dir):
    """On the thread that meets the full disk, which nothing else is waited for."""
    store = SqliteStore(data_dir)
    record = store.find("me", "one")
    lease = store.begin(record, TurnStart(record.leaf, 1, 99, {}))
    tokens = list(range(2000))
    for _ in range(3):
        fill(disk)
        store.journal([(lease, tokens)])
    assert len(store.unfinished(record, living=True).token_ids) == 6000
    assert pages_left(data_dir) < 30
    store.close()


@pytest.mark.parametrize("is_first_turn", [True, False])
def test_pages_of_running_turns_stay(disk, data_dir, is_first_turn):
    """Those of another process too, of its prompt and of its reply so far."""
    store, other = SqliteStore(data_dir), SqliteStore(data_dir)
    prompt, reply = list(range(700, 700 + 64 * 6)), list(range(64 * 2))
    running = talk("running", 0, fingerprint="" if is_first_turn else MODEL)
    lease = other.begin(other.add(running), TurnStart(None, 0, 2, {}, asked(prompt)))
    other.journal([(lease, reply)])
    write_pages(data_dir, "me", [*prompt, *reply])
    talk_until_full(disk, store)
    assert (pages_left(data_dir), pages_left(data_dir, "me", [*prompt, *reply])) == (0, 8)
    other.close()
    store.close()


def asked(ids):
    return user(1, ids=tuple(ids))


def test_threads_that_meet_it_at_once(disk, data_dir):
    store = SqliteStore(data_dir)
    names = [store.add(talk(f"n{i}", 1)).name for i in range(6)]
    fill(disk)
    errors = []

    def work(name):
        record = store.find("me", name)
        try:
            for _ in range(4):
                record = store.change(*grow(record, LONG))
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store.close()


def test_a_disk_that_fails_otherwise_costs_no_page(data_dir, monkeypatch):
    store = SqliteStore(data_dir)
    record = store.find("me", "one")
    os.chmod(data_dir, 0o500)
    monkeypatch.setattr(room, "is_full", lambda folder: False)

    def work():
        error = StoreError("the disk refused to write")
        error.__cause__ = OSError(errno.EIO, "x")
        raise error

    with pytest.raises(StoreError, match="refused"):
        store._database.with_room(work)
    os.chmod(data_dir, 0o700)
    assert pages_left(data_dir) == 30
    store.change(record)
    store.close()


def test_a_quota_of_the_user_is_a_full_disk(data_dir, monkeypatch):
    files = sorted(data_dir.iterdir())
    assert not room.is_full(data_dir)
    for number in (errno.ENOSPC, errno.EDQUOT):

        def refuse(*_arguments, number=number):
            raise OSError(number, "x")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert room.is_full(data_dir)
    assert sorted(data_dir.iterdir()) == files
