"""The durable store: what is written is what is read, and the protocol's refusals."""

import contextlib
import dataclasses
import os
import random
import threading
import types
from datetime import datetime, timedelta, timezone

import pytest
from stores import another_owner, assert_same, grow, home_in_memory, opened_store, reply, talk, user  # noqa: F401 - fixtures

from lmchat import errors
from lmchat.errors import InvalidRequest, NotFound, StoreError
from lmchat.store import sqlite
from lmchat.store.memory_store import MemoryStore
from lmchat.store.protocol import Stale
from lmchat.store.records import SessionRecord, TurnStart
from lmchat.store.sqlite import checkpointer, codec, owners
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Timings, Turn, Usage, transcript

ODD = {
    "surrogates": "a\ud83d\ude00b\udc00",
    "pair": "\U0001f600",
    "nul": "a\0b",
    "marks": "e\u0301 \u200f \ufffe \uffff",
    "quotes": "'\"; DROP TABLE sessions; --",
    "tag": {"$": "tuple", "items": [1]},
    "numbers": {5: -1.5, 2**70: 1e300, True: None},
    "tuple": (1, [2, (3,)], {"$": {"$": ()}}),
    "deep": [[[{"a": [{}]}]]],
    "floats": [0.1, 1e-320, -0.0, float("inf")],
    "": "",
}


def test_a_record_is_read_as_it_was_written(store):
    zone = timezone(timedelta(hours=5, minutes=45))
    record = SessionRecord(
        "größer 名前",
        "öwner \ud800",
        "template",
        settings={"logit_bias": {7: 1.5, 2**40: -100.0}, "seed": 2**64 - 1, "stop_strings": ["x"]},
        template_variables=ODD,
        created=datetime(2024, 2, 29, 23, 59, 59, 999999, tzinfo=zone),
        last_used=datetime(1999, 1, 1, tzinfo=timezone.utc),
        own_title="T \0 \udfff",
        tags=("a", "b c", "\ud800"),
        pinned=True,
        overflow="drop",
        adapter="ad",
        model="/pfad/\udcff",
        fingerprint="f",
        tokenizer="t",
        template="u",
    )
    message = {"content": ODD["surrogates"], "role": "user", "parts": [{"type": "text"}, ODD]}
    first = Turn(1, None, "user", ODD["surrogates"], message, (0, 65535), 0, 2)
    grown = Turn(
        2**62, 1, "assistant", ODD["nul"], {"tool_calls": [ODD]}, (65536, 2**32, 2**64 - 1), 1, 4,
        reasoning=ODD["marks"], finish_reason="error", stopped=True,
        error=errors.Overloaded("many\ud800"), usage=Usage(1, 2, 3, 4, 5),
        timings=Timings(0.1, 0.2, 1e-9, 4.0, 5.0), settings=ODD,
    )  # fmt: skip
    second = Turn(7, None, "system", "", {"role": "system", "content": ""})
    record = record.changed([first, grown, second], leaf=2**62)
    record = store.add(record)
    found = store.find(record.owner, record.name)
    assert_same(found, record)
    assert found.created.utcoffset() == zone.utcoffset(None)
    assert list(found.tree.get(1).message) == list(message)  # a template may see the order
    assert found.revision == 1
    assert found.tree.new_id() == 2**62 + 1


def test_settings_may_be_any_mapping(store):
    record = talk()
    record = record.changed([reply(2, 1, 2, settings=types.MappingProxyType({"seed": 1}))])
    record = store.add(record)
    assert store.find("me", "talk").tree.get(2).settings == {"seed": 1}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {"a": {"b": datetime.now()}}])
def test_what_cannot_be_stored_is_refused(store, value):
    with pytest.raises(InvalidRequest, match="cannot be stored"):
        store.add(talk(template_variables={"x": value}))
    with pytest.raises(InvalidRequest, match="cannot be noted"):
        store.note("x", value)
    assert store.records() == []


@pytest.mark.parametrize("ids", [(-1,), (2**64,), (1.5,)])
def test_token_ids_that_are_none_are_refused(store, ids):
    record = talk(turns=0).changed([user(1, ids=ids)])
    with pytest.raises(InvalidRequest, match="token ids"):
        store.add(record)


def test_a_turn_whose_lengths_are_wrong_is_refused(store):
    record = talk(turns=0).changed([dataclasses.replace(user(1), length=7)])
    with pytest.raises(InvalidRequest, match="turn 1 is 7 tokens long, expected 2"):
        store.add(record)


def test_token_blobs_are_small():
    assert len(codec.pack_tokens(range(1000))) == 2001
    assert len(codec.pack_tokens([151643] * 1000)) == 4001
    assert codec.unpack_tokens(codec.pack_tokens([])) == ()


def test_find_gives_other_objects_and_nothing_of_others(store):
    store.add(talk())
    first, second = store.find("me", "talk"), store.find("me", "talk")
    assert first is not second
    assert store.find("you", "talk") is None
    assert store.find("me", "Talk") is None


def test_taken_and_unprintable_names_are_refused(store):
    store.add(talk())
    taken = "name is 'talk', expected one that is not taken"
    with pytest.raises(InvalidRequest, match=taken):
        store.add(talk())
    with pytest.raises(InvalidRequest, match="printable"):
        store.add(talk(" x"))
    with pytest.raises(InvalidRequest, match="printable"):
        store.add(talk("\ud800"))
    again = store.find("me", "talk")
    with pytest.raises(InvalidRequest, match="^id is"):
        store.add(again.changed(name="other"))
    store.add(SessionRecord("talk", "you", "append"))
    second = talk("second")
    second = store.add(second)
    with pytest.raises(InvalidRequest, match=taken):
        store.rename(second, "talk")
    with pytest.raises(InvalidRequest, match="taken"):  # as the store within the process has it
        store.rename(second, "second")
    assert second.name == "second"
    second = store.rename(second, "third")
    assert store.find("me", "second") is None
    assert_same(store.find("me", "third"), second)
    assert store.verify() == []


def test_a_new_name_follows_the_highest_number(store):
    for owner, given, expected in [
        ("me", "", "chat-1"), ("me", "", "chat-2"), ("me", "chat-9", "chat-9"),
        ("me", "chat-x", "chat-x"), ("me", "", "chat-10"), ("me", "chat-9", "chat-11"),
        ("you", "", "chat-1"), ("me", "chat-012", "chat-012"), ("me", "", "chat-12"),
    ]:  # fmt: skip
        record = store.add_numbered(SessionRecord(given, owner, "append"))
        assert record.name == expected
    wrong = SessionRecord("", "me", "append", template_variables={"x": object()})
    with pytest.raises(InvalidRequest):
        store.add_numbered(wrong)
    assert wrong.name == ""


def test_a_refresh_gives_what_another_writer_stored(store, other):
    record = talk(turns=3)
    record = store.add(record)
    theirs = other.find("me", "talk")
    record = store.change(record.changed(leaf=1, pinned=True, settings={"top_k": 3}))
    record, new = grow(record, "more")
    record = store.change(record, new)
    theirs = other.refresh(theirs)
    assert_same(theirs, record)
    assert other.refresh(theirs) is theirs
    grown = reply(new[1].id, new[0].id, new[0].length, (9,) * 30)
    record = store.change(record.changed([grown], own_title="mine"), [grown])
    theirs = other.refresh(theirs)
    assert_same(theirs, record)
    assert theirs.tree.get(grown.id).token_ids == (9,) * 30


def test_a_refresh_reads_only_what_changed(store, other, monkeypatch):
    record = talk(turns=50)
    record = store.add(record)
    theirs = other.find("me", "talk")
    record = store.change(*grow(record))
    read = []
    unread = sqlite.rows.unread
    monkeypatch.setattr(
        sqlite.rows, "unread", lambda session, rows: read.extend(rows) or unread(session, rows)
    )
    theirs = other.refresh(theirs)
    assert len(read) == 2
    assert_same(theirs, record)


def test_a_transcript_takes_no_turn_apart(store, monkeypatch):
    record = talk(turns=50)
    record = store.add(record)
    read = []
    turn = sqlite.rows.UnreadTurn.turn
    monkeypatch.setattr(sqlite.rows.UnreadTurn, "turn", lambda it: read.append(it) or turn(it))
    found = store.find("me", "talk")
    ends = [t.id for t in record.tree if not record.tree.children(t.id)]
    assert found.tree.ends() == sorted(ends)
    for end in ends:
        assert found.tree.token_ids(end) == transcript(record.tree.path(end))
    copied = found.tree.with_turns(())
    assert read == []
    assert list(copied) == list(found.tree) == list(record.tree)
    assert len(read) == 2 * len(record.tree)
    assert list(found.tree) == list(record.tree)
    assert len(read) == 2 * len(record.tree)  # each was read once


def test_the_checksum_of_a_turn_is_that_of_its_columns():
    source = random.Random(5)
    texts = ["", "user", "ä\ud83d", "x" * 300, b"\xff1:;"]
    for _ in range(200):
        number = [source.choice([None, 0, -1, 7, 2**40]) for _ in range(4)]
        role, text, session = source.choices(texts, k=3)
        columns = (number[0], number[1], role, *number[2:], text, source.randbytes(9), b"{}")
        expected = sqlite.codec.checksum(session, *columns)
        assert sqlite.rows.turn_checksum(session, columns) == expected


def test_a_refresh_after_a_refused_change_reads_the_other_writers(store, other):
    record = talk()
    record = store.add(record)
    theirs = other.find("me", "talk")
    record = store.change(*grow(record, "one way"))
    with pytest.raises(Stale, match="'talk' is at revision 2, the record at 1"):
        other.change(*grow(theirs, "another way"))
    theirs = other.refresh(theirs)
    assert_same(theirs, record)
    new = user(50, 2, prefix_length=2)
    record = store.change(record.changed([new]), [new])
    assert_same(other.refresh(theirs), record)


def test_a_refresh_after_the_file_went_back(store, data_dir, other):
    """For example after a backup was restored."""
    record = talk(turns=2)
    record = store.add(record)
    theirs = other.find("me", "talk")
    theirs = grow(theirs)[0].changed(revision=7)
    with pytest.raises(Stale):
        other.change(theirs)
    assert_same(other.refresh(theirs), record)


def test_stale_records_are_refused_and_deleted_sessions_not_found(store, other):
    record = talk()
    record = store.add(record)
    theirs = other.find("me", "talk")
    record = store.change(record)
    with pytest.raises(Stale):
        other.change(theirs)
    with pytest.raises(Stale):
        other.begin(theirs, TurnStart(2, 5, 3, {}))
    other.remove(theirs)  # a delete needs no newest state
    for act in (
        lambda: store.change(record),
        lambda: store.refresh(record),
        lambda: store.remove(record),
        lambda: store.rename(record, "x"),
        lambda: store.begin(record, TurnStart(2, 5, 3, {})),
        lambda: store.recover(record),
        lambda: store.unfinished(record),
    ):
        with pytest.raises(NotFound, match="no session 'talk'"):
            act()
    assert store.verify() == []
    assert store.summaries(search="hi") == []


def test_a_rename_makes_no_one_stale(store, other):
    record = talk()
    record = store.add(record)
    theirs = other.find("me", "talk")
    lease = store.begin(record, TurnStart(2, 5, 4, {}, user(3, 2, prefix_length=5)))
    theirs = other.rename(theirs, "neu")
    record = store.finish(lease, *grow(record))
    assert record.name == "neu"
    assert_same(store.find("me", "neu"), record)
    assert_same(other.refresh(theirs), record)


def test_turns_that_hang_nowhere_are_refused(store):
    record = talk()
    record = store.add(record)
    unstored = user(3, 2, prefix_length=5)
    answer = reply(4, 3, 7)
    record = record.changed([unstored, answer])
    with pytest.raises(StoreError, match="turn 4 has the parent 3, which is not in the store"):
        store.change(record, [answer])
    with pytest.raises(StoreError, match="turn 3 is not in the store"):
        store.change(record.changed(leaf=3))
    with pytest.raises(StoreError, match="turn 3 is not in the store"):
        store.begin(record, TurnStart(3, 7, 4, {}))
    with pytest.raises(StoreError, match="turn 2 cannot move to parent None"):
        store.change(record, [user(2)])
    assert len(store.find("me", "talk").tree) == 2
    assert record.revision == 1


# --- the rest ---------------------------------------------------------------------------------


def test_notes_are_shared_between_stores(store, other):
    assert store.noted("speed") is None
    store.note("speed", {"disk": 1.5, 3: (4,)})
    assert other.noted("speed") == {"disk": 1.5, 3: (4,)}
    other.note("speed", None)
    assert store.noted("speed") is None


def test_close_releases_the_owner_file(store, data_dir):
    store.add(talk())
    lease = store.begin(store.find("me", "talk"), TurnStart(2, 5, 3, {}))
    assert len(list((data_dir / "owners").iterdir())) == 1
    store.close()
    store.close()
    assert list((data_dir / "owners").iterdir()) == []
    assert not (data_dir / "sessions.db-wal").exists()
    for act in (store.records, store.sync, lambda: store.release(lease)):
        with pytest.raises(StoreError, match="is closed"):
            act()


def test_a_store_that_is_forgotten_closes_itself(data_dir):
    opened = SqliteStore(data_dir)
    opened.add(talk())
    opened.begin(opened.find("me", "talk"), TurnStart(2, 5, 3, {}))
    del opened
    assert list((data_dir / "owners").iterdir()) == []


def test_an_owner_without_a_readable_file_lives_too(tmp_path):
    owner = owners.Owner(tmp_path)
    (tmp_path / owner.token).write_text("{")
    assert owners.living(tmp_path, owner.token) == "another process"
    (tmp_path / owner.token).write_text('{"pid": 7, "host": "elsewhere"}')
    assert owners.living(tmp_path, owner.token) == "process 7 on 'elsewhere'"
    owner.close()
    assert owners.living(tmp_path, owner.token) is None


def test_files_of_dead_owners_go(tmp_path):
    (tmp_path / "0123").write_text("")
    (tmp_path / "4567.new").write_text("")
    os.utime(tmp_path / "4567.new", (0, 0))
    owner, second = owners.Owner(tmp_path), owners.Owner(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {owner.token, second.token}
    owner.close()
    second.close()


def test_the_log_does_not_grow_without_bound(store, data_dir, monkeypatch):
    monkeypatch.setattr(checkpointer, "LOG_BYTES", 512 << 10)
    monkeypatch.setattr(checkpointer, "_LOG_STEP", 64 << 10)
    record = talk()
    record = store.add(record)
    lease = store.begin(record, TurnStart(2, 5, 3, {}))
    largest = 0
    for number in range(1500):
        store.journal([(lease, [number] * 64)])
        if number % 10 == 0:
            store.sync()
            thread = store._database._checkpointer._thread
            if thread is not None:
                thread.join()
        largest = max(largest, (data_dir / "sessions.db-wal").stat().st_size)
    assert 512 << 10 < largest < 2 << 20
    assert store._database._log_bytes() < 2 << 20


def test_many_threads_lose_no_turn_and_no_change(store):
    """Each on its own session, and all on one that they refresh."""
    store.add(talk("shared", 0))
    wrong = []

    def work(number):
        try:
            mine = talk(f"t{number}", 0)
            mine = store.add(mine)
            shared = store.find("me", "shared")
            for _ in range(10):
                lease = store.begin(mine, TurnStart(mine.leaf, 0, 99, {}))
                store.journal([(lease, [number])])
                mine = store.finish(lease, *grow(mine))
                store.release(lease)
                while True:
                    try:
                        shared = store.change(shared.changed(tags=(*shared.tags, str(number))))
                        break
                    except Stale:
                        shared = store.refresh(shared)
            assert_same(store.find("me", f"t{number}"), mine)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tags = store.find("me", "shared").tags
    assert sorted(tags) == sorted(str(n) for n in range(6) for _ in range(10))
    assert len(store._database._readers) <= 6


def test_the_store_within_the_process_says_the_same(store):
    """Names and refusals of the two stores."""
    for any_store in (store, MemoryStore()):
        record = talk()
        any_store.add(record)
        with pytest.raises(InvalidRequest, match="name is 'talk', expected one that is not taken"):
            any_store.add(talk())
        any_store.remove(record)
        with pytest.raises(NotFound, match="no session 'talk'"):
            any_store.remove(record)
        with pytest.raises(NotFound, match="no session 'talk'"):
            any_store.rename(record, "x")


def test_no_connection_needs_a_folder_for_temporary_files(data_dir):
    with contextlib.closing(SqliteStore(data_dir)) as store:
        database = store._database
        for context in (database.reading(), database.writing(), database.writing(durable=False)):
            with context as connection:
                assert connection.execute("PRAGMA temp_store").fetchone() == (2,)  # memory
