"""Lists of sessions: their fields, their filters, and the results of searches."""

import signal
import subprocess
import sys
from datetime import datetime, timezone

import pytest
from assets import ROOT
from stores import another_owner, grow, home_in_memory, opened_store, talk, user  # noqa: F401 - fixtures

from lmchat.store.records import SessionRecord, TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore


def day(number):
    return datetime(2024, 1, number, tzinfo=timezone.utc)


def test_summaries_have_the_fields_of_a_list(store):
    store.add(talk("a", 2, "what is\n a  kernel?", last_used=day(2), tags=("x", "y")))
    store.add(talk("b", 0, last_used=day(3), model="m", fingerprint="f", pinned=True))
    other_owner = SessionRecord("c", "you", "append", last_used=day(1), own_title="Mine")
    other_owner = store.add(other_owner)
    found = store.summaries()
    assert [s.name for s in found] == ["b", "a", "c"]
    assert [s.title for s in found] == ["", "what is a kernel?", "Mine"]
    assert [(s.turns, s.tokens) for s in found] == [(0, 0), (2, 10), (0, 0)]
    assert found[1].tags == ("x", "y")
    assert (found[0].model, found[0].fingerprint, found[0].pinned) == ("m", "f", True)
    assert [s.name for s in store.summaries("me")] == ["b", "a"]
    assert [s.name for s in store.summaries(tag="x")] == ["a"]
    assert [s.name for s in store.summaries(limit=2)] == ["b", "a"]
    assert store.summaries(limit=0) == []
    assert [r.name for r in store.records()] == ["b", "a", "c"]
    assert [r.name for r in store.records("you")] == ["c"]
    assert (found[2].id, found[2].created) == (other_owner.id, other_owner.created)


def test_a_title_follows_the_branch(store):
    record = talk(turns=0)
    record = store.add(record)
    record = store.change(*grow(record, "first"))
    assert store.summaries()[0].title == "first"
    record = store.change(*grow(record.changed(leaf=None), "second"))
    assert store.summaries()[0].title == "second"
    record = store.change(record.changed(own_title="own"))
    assert store.summaries(search="own")[0].title == "own"
    assert store.summaries(search="second")[0].snippet == "second"


def test_a_summary_counts_a_reply_that_has_not_ended(store, data_dir):
    record = talk("first", turns=0)
    record = store.add(record)
    asked = user(1, text="a first   question")
    lease = store.begin(record, TurnStart(None, 0, 2, {}, user=asked))
    store.journal([(lease, [1, 2, 3])])
    for reader in (store, SqliteStore(data_dir)):
        (found,) = reader.summaries("me")
        assert (found.turns, found.tokens, found.title) == (1, 5, "a first question")
    record = store.finish(lease, *grow(record))
    assert store.summaries("me")[0].turns == 1


def test_a_summary_counts_what_an_edit_or_a_continuation_makes(store):
    record = talk("long", turns=3)
    record = store.add(record)
    first = record.tree.path(record.leaf)[1]
    edited = user(7, first.id, prefix_length=first.length)
    length, leaf = record.tree.get(record.leaf).length, record.leaf
    for start, turns, tokens in [
        (TurnStart(first.id, first.length, 8, {}, user=edited), 2, first.length + 2 + 1),
        (TurnStart(leaf, length, leaf, {}, extends=leaf), 3, length + 1),
        (TurnStart(5, record.tree.get(5).length, 9, {}), 3, record.tree.get(5).length + 1),
    ]:
        lease = store.begin(record, start)
        store.journal([(lease, [1])])
        (found,) = store.summaries("me")
        assert (found.turns, found.tokens) == (turns, tokens)
        store.release(lease)
        assert store.summaries("me")[0].turns == 3


def killed(data_dir, code):
    """Returns the work that a process did with `store` before it was killed."""
    program = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "import stores; from lmchat.store.records import TurnStart\n"
        "from lmchat.store.sqlite.sqlite_store import SqliteStore\n"
        "store = SqliteStore(sys.argv[1])\n"
        f"{code}\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    places = [str(ROOT), str(ROOT / "tests" / "support")]
    done = subprocess.run([sys.executable, "-c", program, str(data_dir), *places], timeout=60)
    assert done.returncode == -signal.SIGKILL


def names(store):
    return {summary.name for summary in store.summaries("me")}


def test_an_unused_session_of_a_killed_process_is_not_listed(data_dir):
    killed(data_dir, "store.add_numbered(stores.talk('', turns=0))")
    store = SqliteStore(data_dir)
    assert names(store) == set()
    assert store.find("me", "chat-1") is not None  # until another caller makes the next one
    record = talk("", turns=0)
    record = store.add_numbered(record)
    assert (record.name, names(store)) == ("chat-1", {"chat-1"})
    other = SqliteStore(data_dir)
    assert names(other) == {"chat-1"}  # its maker lives
    other.add_numbered(talk("", turns=0))
    assert names(store) == {"chat-1", "chat-2"}
    lease = other.begin(theirs := other.find("me", "chat-1"), TurnStart(None, 0, 2, {}))
    theirs = other.finish(lease, *grow(theirs))  # it keeps no one out
    other.close()
    store.close()
    assert names(SqliteStore(data_dir)) == {
        "chat-1",
        "chat-2",
    }  # an orderly end leaves what is there


@pytest.mark.parametrize(
    "used",
    [
        "store.change(record.changed(own_title='T'))",
        "store.rename(record, 'mine')",
        "store.release(store.begin(record, TurnStart(None, 0, 2, {})))",
        "store.change(*stores.grow(record))",
    ],
)
def test_what_a_killed_process_has_used_stays(data_dir, used):
    killed(
        data_dir,
        f"record = stores.talk('', turns=0)\nrecord = store.add_numbered(record)\n{used}\n"
        "store.add_numbered(stores.talk('', turns=1))\nstore.add(stores.talk('given', turns=0))",
    )
    store = SqliteStore(data_dir)
    before = names(store)
    assert len(before) == 3
    store.add_numbered(talk("", turns=0))
    assert names(store) > before


def test_a_search_finds_words(store):
    store.add(talk("recipes", 1, "How do I bake a Käsekuchen without an oven?"))
    store.add(talk("code", 2, "explain page tables and kernels"))
    store.add(SessionRecord("kernel-notes", "you", "append"))
    names = lambda text, **more: [s.name for s in store.summaries(search=text, **more)]  # noqa: E731
    assert names("bake oven") == ["recipes"]
    assert names("kasekuchen") == ["recipes"]
    assert names("oven tables") == []
    assert names("kern*") == ["kernel-notes", "code"]
    assert names("kern*", owner="me") == ["code"]
    assert names("kern*", limit=1) == ["kernel-notes"]
    assert names("kernel") == ["kernel-notes"]
    assert names("there", tag="no") == []
    assert names("") == names(" \n") == names("?!") == names("*") == []
    (found,) = store.summaries(search="bake")
    assert "bake" in found.snippet
    record = store.find("me", "code")
    record = store.rename(record, "talks")
    record = store.change(record, [user(1, text="something else")])
    assert names("talks") == ["talks"]
    store.remove(record)
    assert names("talks") == names("tables") == []
    assert store.verify() == []


ODD_SEARCHES = [
    '"', '""', '"a', "a AND", "AND", "NOT a", "(", "a)", "a OR (b", "x:y", "^a", "a + b", "-a",
    "NEAR(a b, 3)", "{a b}: c", "'", "';--", "a*b", "**", "\0", "\ud800", "a" * 5000, "*a", "a**",
    "a\u0308", "\U0001f600", "\n", "%", "_", "\\", "\u00b2", "\u0e33 \u2460*",
]  # fmt: skip


def test_no_search_is_a_syntax_error(store):
    for number, text in enumerate(ODD_SEARCHES):
        store.add(talk(f"odd-{number}", 1, f"words {text} words"))
    for text in ODD_SEARCHES:
        store.summaries(search=text)
        assert len(store.summaries(search=f"words {text}*")) <= len(ODD_SEARCHES)
    assert len(store.summaries(search="words")) == len(ODD_SEARCHES)
    assert store.verify() == []
