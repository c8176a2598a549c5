"""`lmchat sessions`: the commands that change, copy, move and delete; damage."""

import errno
import io
import json
import math
import os
import re
import sys
from dataclasses import replace

import pytest
from assets import ROOT
from command import ENVIRONMENT, LMCHAT
from sessions_directory import (  # noqa: F401 - fixtures
    BYTES,
    FINGERPRINT,
    DataDirectory,
    made_home,
    made_trip,
    make_trip,
    tokens_of,
    with_round,
)
from terminal import Terminal

from lmchat.cli.sessions.export import Conversation, as_json
from lmchat.generation.settings import validate
from lmchat.store.records import SessionRecord, TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn


def test_a_renamed_session_is_found_by_its_new_name_only(data_dir, trip):
    assert data_dir.run("rename", "trip", "Ausflug nach Kyōto") == (
        "session trip renamed to Ausflug nach Kyōto\n"
    )
    assert data_dir.find("Ausflug nach Kyōto").id == trip.id
    data_dir.session("other")
    assert "name is 'other', expected one that is not taken" in data_dir.run(
        "rename", trip.id[:8], "other", code=2
    )
    assert "name is ' x'" in data_dir.run("rename", "other", " x", code=2)


def test_fork_copies_a_prefix_and_shares_pages(data_dir, trip):
    data_dir.persist_pages(trip)
    assert data_dir.json("fork", "trip", "copy")["turns"] == 2
    copy = data_dir.find("copy")
    assert copy.tree.token_ids(copy.leaf) == trip.tree.token_ids(trip.leaf)
    assert (copy.settings, copy.model) == (trip.settings, trip.model)
    assert copy.id != trip.id
    rows = data_dir.rows()
    assert rows["copy"]["residence"] == "all"
    assert data_dir.json("fork", "trip", "--at", "1")["name"] == "chat-1"
    first = data_dir.find("chat-1")
    assert [turn.text for turn in first.tree.path(first.leaf)] == [
        "Plan a day in Kyoto please", "See the golden temple, then walk.",
    ]  # fmt: skip
    assert data_dir.json("fork", "trip", "none", "--at", "0")["turns"] == 0
    assert "--at is 3, expected an integer from 0 to 2" in data_dir.run(
        "fork", "trip", "--at", "3", code=2
    )
    assert "name is 'copy', expected one that is not taken" in data_dir.run(
        "fork", "trip", "copy", code=2
    )
    assert len(data_dir.find("trip").tree) == len(trip.tree)


def test_a_pin_raises_the_retention_priority_of_stored_pages(data_dir, trip):
    data_dir.session("other")
    data_dir.persist_pages(trip)
    assert data_dir.run("pin", "trip", "other") == "trip, other: pinned\n"
    assert data_dir.find("trip").pinned
    assert data_dir.find("other").pinned
    assert retention_priorities(data_dir, trip) == {2.0}
    assert data_dir.json("pin", "trip", "--off") == {"names": ["trip"], "pinned": False}
    assert not data_dir.find("trip").pinned
    assert data_dir.find("other").pinned
    assert retention_priorities(data_dir, trip) == {1.0}
    assert "no session 'x'" in data_dir.run("pin", "other", "x", "--off", code=2)
    assert data_dir.find("other").pinned


def retention_priorities(data_dir, record):
    from turbomind.engine.pages import PageStore

    with PageStore(data_dir.path / "pages") as pages:
        return {page.retention_priority for key, _ in pages.pages() for page in pages.read(key)}


def test_a_change_applies_to_the_current_version_of_a_session(data_dir, trip, monkeypatch):
    from lmchat.cli.sessions import maintenance

    record = data_dir.find("trip")
    data_dir.store.change(record.changed(own_title="theirs"))  # another process
    stored = maintenance.change(data_dir.store, record, pinned=True)
    assert (stored.pinned, stored.revision) == (True, record.revision + 2)
    assert (data_dir.find("trip").pinned, data_dir.find("trip").title) == (True, "theirs")


def test_a_busy_session_is_reported_in_one_line(data_dir, trip):
    lease = data_dir.store.begin(trip, TurnStart(trip.leaf, 10, 99, {}))
    assert f"process {os.getpid()}" in data_dir.rows()["trip"]["busy"]
    for command in (["rm", "trip", "--yes"], ["pin", "trip"]):
        reported = data_dir.run(*command, code=1)
        who = f"session 'trip' is generating in process {os.getpid()}"
        assert reported == f"lmchat: {who}: try again when that has ended\n"
    data_dir.run("rename", "trip", "renamed")  # which does not make the session stale
    data_dir.run("fork", "renamed", "copy")
    data_dir.store.release(lease)
    assert data_dir.rows()["renamed"]["busy"] == ""
    data_dir.run("rm", "renamed", "--yes")


# --- files ------------------------------------------------------------------------------------


def test_an_imported_export_equals_the_session(data_dir, trip, tmp_path):
    file = tmp_path / "trip.zip"
    data_dir.persist_pages(trip)
    assert data_dir.run("export", "trip", str(file)).startswith(
        f"{file}: {len(trip.tree)} messages and 0 pages written, "
    )
    assert f"{file} exists; --force replaces it" in data_dir.run(
        "export", "trip", str(file), code=2
    )
    done = data_dir.json("export", "trip", str(file), "--pages", "--force")
    assert done["pages"] == data_dir.page_count() > 3
    assert "'trip', expected one that is not taken; --name gives another" in data_dir.run(
        "import", str(file), code=2
    )
    assert data_dir.json("import", str(file), "--owner", "me") == {
        "name": "trip", "id": data_dir.find("trip", "me").id, "turns": 2, "model": "org/model",
    }  # fmt: skip
    # The block hashes of another owner have another salt, so the pages are stored again.
    assert data_dir.rows("--owner", "me")["trip"]["residence"] == "all"
    assert data_dir.page_count() == 2 * done["pages"]
    data_dir.json("export", "trip", str(tmp_path / "b.zip"), "--pages", "--owner", "me")
    assert (tmp_path / "b.zip").read_bytes() == file.read_bytes()
    printed = data_dir.run("import", str(file), "--name", "bare", "--no-pages", "--owner", "you")
    assert printed == "session bare imported: 2 questions; its model is 'org/model'\n"
    printed = data_dir.run("show", "bare", "--owner", "you")
    assert re.search(r"^model +org/model \(named by its archive\)$", printed, re.M)
    data_dir.run("fork", "bare", "fork", "--owner", "you")
    assert data_dir.find("fork", "you").imported
    data_dir.run("rm", "fork", "--owner", "you", "--yes")
    assert data_dir.rows("--owner", "you")["bare"]["residence"] == "none"
    assert (
        data_dir.run("verify")
        == f"checked 3 sessions and {data_dir.page_count()} pages: no damage\n"
    )


def test_an_import_that_fails_changes_nothing(data_dir, trip, tmp_path):
    file = tmp_path / "trip.zip"
    data_dir.persist_pages(trip)
    data_dir.run("export", "trip", str(file), "--pages")
    pages, data = data_dir.page_count(), bytearray(file.read_bytes())
    data[data.index(b"pages/00000002") + 400] ^= 1
    file.write_bytes(data)
    for owner in ("local", "me"):
        reported = data_dir.run("import", str(file), "--name", "new", "--owner", owner, code=2)
        assert "pages/00000002.page" in reported
        assert reported.count("\n") == 1
    assert data_dir.names() == ["trip"]
    assert data_dir.names("me") == []
    assert data_dir.page_count() == pages
    assert "cannot be read: No such file" in data_dir.run("import", str(tmp_path / "x"), code=2)
    assert "cannot be written" in data_dir.run("export", "trip", str(tmp_path / "x/y.zip"), code=2)


def test_imported_pages_equal_the_exported_ones(data_dir, trip, tmp_path):
    data_dir.persist_pages(trip)
    from turbomind.engine.pages import PageStore

    data_dir.run("export", "trip", str(tmp_path / "a.zip"), "--pages")
    before = all_pages(PageStore(data_dir.path / "pages"))
    data_dir.run("rm", "trip", "--yes")
    assert data_dir.page_count() == 0
    data_dir.run("import", str(tmp_path / "a.zip"))
    assert all_pages(PageStore(data_dir.path / "pages")) == before


def all_pages(store):
    with store:
        found = [page for key, _ in store.pages() for page in store.read(key)]
        return sorted((p.key, p.parent, tuple(p.token_ids), p.numerics, p.payload) for p in found)


def test_export_of_a_text(data_dir, trip, tmp_path):
    file = tmp_path / "trip.md"
    reported = data_dir.run("export", "trip", str(file))
    assert reported == f"{file}: 4 messages written, {file.stat().st_size} B\n"
    assert file.read_text().startswith("# Plan a day in Kyoto please\n\n## User\n\nPlan a day")
    assert file.read_text().count("## ") == 4  # the current branch
    assert "--force replaces it" in data_dir.run("export", "trip", str(file), code=2)
    assert data_dir.json("export", "trip", str(file), "--force")["turns"] == 4
    assert "in .zip" in data_dir.run("export", "trip", str(file), "--force", "--pages", code=2)
    file = tmp_path / "trip.json"
    data_dir.run("export", "trip", str(file))
    found = json.loads(file.read_text())
    assert found["token_ids"] == trip.tree.token_ids(trip.leaf)
    assert [turn["role"] for turn in found["turns"]] == ["user", "assistant"] * 2
    assert "cannot be written" in data_dir.run("export", "trip", str(tmp_path / "x/y.md"), code=2)


def test_an_excluded_token_is_exported_as_json_has_it(trip):
    """RFC 8259 has no infinities: the export reads without them, and its value is taken."""
    found = replace(trip, id="b" * 32, name="biased", settings={"logit_bias": {5: -math.inf}})
    text = as_json(Conversation.of_record(found))
    read = json.loads(text, parse_constant=pytest.fail)
    assert read["settings"] == {"logit_bias": {"5": "-Infinity"}}
    assert validate(read["settings"]) == found.settings


def test_a_full_disk_leaves_the_old_file_unchanged(data_dir, trip, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "full")

    file = tmp_path / "trip.md"
    file.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    for name, options in (("trip.md", ["--force"]), ("new.json", [])):
        printed = data_dir.run("export", "trip", str(tmp_path / name), *options, code=2)
        assert f"{tmp_path / name} cannot be written: No space left" in printed
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["trip.md"]
    assert file.read_text() == "before"


# --- unfinished replies -----------------------------------------------------------------------


@pytest.fixture
def at_it(data_dir, trip):
    """Starts a turn of the session as another process; yields its store."""
    stores = []

    def begin(ids, **start):
        store = SqliteStore(data_dir.path)
        stores.append(store)
        record = store.find("local", "trip")
        leaf = record.tree.get(record.leaf)
        given = {
            "parent": leaf.id,
            "prefix_length": leaf.length,
            "reply_id": 99,
            "settings": {},
        } | start
        lease = store.begin(record, TurnStart(**given))
        store.journal([(lease, ids)])
        return store

    yield begin
    for store in stores:
        store.close()


def user_turn(record, text):
    leaf, ids = record.tree.get(record.leaf), tokens_of(text)
    return Turn(98, leaf.id, "user", text, {}, ids, leaf.length, leaf.length + len(ids))


def test_an_unfinished_reply_of_a_killed_process_is_shown(data_dir, trip, at_it, tmp_path):
    at_it((7, 8, 9), user=user_turn(trip, "Is it far")).close()
    assert data_dir.rows()["trip"]["turns"] == 3
    printed = data_dir.run("show", "trip", "--turns", "1")
    assert printed.endswith(
        "\n3> Is it far\n\n(interrupted: the process ended)\n\n"
        "the last 3 tokens of the reply have no text yet: "
        "lmchat chat --session trip recovers it\n"
    )
    assert "assistant: 3 tokens\n7 8 9\n" in data_dir.run("show", "trip", "--tokens")
    found = data_dir.json("show", "trip")
    assert found["unfinished"] == {"question": "Is it far", "token_ids": [7, 8, 9]}
    assert len(found["messages"]) == 4
    for arguments in (["fork", "trip"], *(["export", "trip", f"{tmp_path}/a.{e}"] for e in
                                          ("zip", "md"))):  # fmt: skip
        data_dir.run(*arguments)
        assert data_dir.last.err.count("an unfinished reply is left out; opening") == 1


def test_a_continued_reply_is_shown_as_one(data_dir, trip, at_it):
    reply = trip.tree.get(trip.leaf)
    at_it((7, 8), parent=reply.id, extends=reply.id, reply_id=reply.id).close()
    found = data_dir.run("show", "trip", "--tokens")
    assert f"assistant: {len(reply.token_ids) + 2} tokens\n" in found
    assert data_dir.json("show", "trip")["unfinished"]["question"] == "And with children?"


def test_a_question_without_an_answer_is_shown(data_dir, trip, at_it):
    at_it((), user=user_turn(trip, "Is it far")).close()
    printed = data_dir.run("show", "trip")
    assert printed.endswith(
        "3> Is it far\nthe last question was not answered because its process ended; "
        "lmchat chat --session trip asks it again\n"
    )
    record = data_dir.session("asked", ("x", "y"), unanswered="Are you there?")
    assert "the last question was not answered: Are you there?" in data_dir.run("show", record.id)


def test_a_turn_being_generated_is_reported(data_dir, trip, at_it):
    at_it((7, 8, 9), user=user_turn(trip, "Is it far"))
    printed = data_dir.run("show", "trip")
    assert "Is it far" not in printed
    assert printed.endswith(
        f"process {os.getpid()} is generating in this session now: that turn is not shown\n"
    )
    assert data_dir.json("show", "trip")["unfinished"] is None


# --- deleting ---------------------------------------------------------------------------------


def test_rm_frees_pages_that_no_other_session_uses(data_dir, trip):
    data_dir.persist_pages(trip)
    only = data_dir.session("only", ("q " * 30, "r " * 30))
    data_dir.persist_pages(only)
    data_dir.run("fork", "trip", "copy")
    pages = data_dir.page_count()
    assert data_dir.json("rm", "only", "--yes")["freed_bytes"] > 9 * BYTES
    assert data_dir.page_count() == pages - 10
    data_dir.json("rm", "trip", "--yes")
    assert data_dir.rows()["copy"]["residence"] == "all"
    assert 0 < data_dir.page_count() < pages - 10  # the branches are gone, the shared pages stay
    data_dir.json("rm", "copy", "--yes")
    assert data_dir.page_count() == 0


def test_rm_of_a_forked_prefix_leaves_the_other_pages(data_dir, trip):
    """The page in whose middle the copy ends is a full one of the session."""
    data_dir.persist_pages(trip)
    data_dir.run("fork", "trip", "copy", "--at", "1")
    pages = data_dir.page_count()
    assert data_dir.rows()["copy"]["residence"] == "all"
    assert data_dir.json("rm", "copy", "--yes")["freed_bytes"] == 0
    assert data_dir.page_count() == pages
    assert data_dir.rows()["trip"]["residence"] == "all"


def test_rm_frees_pages_of_a_dead_process(data_dir, trip):
    dead = SqliteStore(data_dir.path)
    record = dead.find("local", "trip")
    length = record.tree.get(record.leaf).length
    lease = dead.begin(record, TurnStart(record.leaf, length, 99, {}))
    ids = tokens_of("more " * 20)
    dead.journal([(lease, ids)])
    dead.close()
    reply = Turn(99, record.leaf, "assistant", "", {}, ids, length, length + len(ids))
    data_dir.persist_pages(record.changed([reply]))
    assert data_dir.page_count() > 3
    data_dir.run("rm", "trip", "--yes")
    assert data_dir.page_count() == 0


def test_rm_asks_on_a_terminal(data_dir, trip, monkeypatch):
    data_dir.session("other")
    no = io.StringIO("n\n")
    no.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", no)
    data_dir.run("rm", "trip", code=1)
    assert data_dir.names() == ["other", "trip"]
    command = [*LMCHAT, "sessions", "rm", "trip", "other"]
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(data_dir.path)}
    with Terminal(command, columns=80, rows=20, env=env) as terminal:
        terminal.wait("Delete trip (2 turns), other (0 turns)? [y/N]:")
        terminal.type("y\r")
        assert terminal.wait_end() == 0, terminal.text
    assert data_dir.names() == []


def test_rm_reports_the_deleted_sessions_before_an_error(data_dir, trip, at_it):
    data_dir.session("other", ("x", "y"))
    at_it((7,), user=user_turn(trip, "Is it far"))
    reported = data_dir.run("rm", "other", "trip", "--yes", code=1)
    assert reported.startswith(
        "lmchat: already deleted: other\nlmchat: session 'trip' is generating"
    )
    assert data_dir.names() == ["trip"]


def test_rm_of_several_deletes_none_if_one_does_not_exist(data_dir, trip, monkeypatch):
    assert "no session 'x'" in data_dir.run("rm", "trip", "x", "--yes", code=2)
    monkeypatch.setattr(sys, "stdin", None)
    assert "expected --yes" in data_dir.run("rm", "trip", code=2)
    assert data_dir.names() == ["trip"]
    assert data_dir.json("rm", "trip", trip.id, "--yes")["names"] == ["trip"]


def test_gc_frees_pages_that_no_session_uses(data_dir, trip):
    gone = SessionRecord("gone", "local", "append", fingerprint=FINGERPRINT)
    gone = with_round(gone, None, "z " * 30, "y " * 30)
    theirs = data_dir.session("theirs", ("k " * 10, "l"), owner="other")
    short = data_dir.session("short", ("s", "t"))
    for record in (trip, gone, theirs, short):
        data_dir.persist_pages(record)
    pages = data_dir.page_count()
    assert data_dir.json("gc", "--dry-run")["pages"] == 10
    assert data_dir.page_count() == pages
    done = data_dir.json("gc")
    assert done["pages"] == 10
    assert done["bytes"] > 10 * BYTES
    assert data_dir.page_count() == pages - 10
    assert data_dir.rows()["trip"]["residence"] == "all"
    assert data_dir.rows()["short"]["residence"] == "all"
    assert data_dir.rows("--owner", "other")["theirs"]["residence"] == "all"
    assert data_dir.json("gc")["pages"] == 0


@pytest.mark.parametrize("lives", [False, True])
def test_gc_leaves_pages_of_a_running_process(data_dir, trip, at_it, lives):
    ids = tokens_of("more " * 20)
    store = at_it(ids)
    if not lives:
        store.close()
    leaf = trip.tree.get(trip.leaf)
    reply = Turn(99, leaf.id, "assistant", "", {}, ids, leaf.length, leaf.length + len(ids))
    data_dir.persist_pages(trip.changed([reply]))
    pages = data_dir.page_count()
    assert data_dir.json("gc")["pages"] == 0
    assert data_dir.page_count() == pages


def test_gc_while_another_process_deletes(data_dir, trip, monkeypatch):
    data_dir.persist_pages(trip)
    records = SqliteStore.records

    def slow(store, owner=None):
        found = records(store, owner)
        data_dir.store.remove(data_dir.find("trip"))
        return found

    monkeypatch.setattr(SqliteStore, "records", slow)
    assert data_dir.json("gc")["pages"] == 0  # the next one frees them
    monkeypatch.undo()
    monkeypatch.setenv("LMCHAT_HOME", str(data_dir.path))
    assert data_dir.json("gc")["pages"] > 0


# --- damage -----------------------------------------------------------------------------------


def test_verify_finds_and_removes_damaged_pages(data_dir, trip):
    data_dir.persist_pages(trip)
    file = max((data_dir.path / "pages").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[BYTES // 2] ^= 1
    file.write_bytes(data)
    reported = data_dir.run("verify", code=1)
    assert re.search(r"[1-9]\d* damaged pages? removed", reported)
    assert data_dir.json("verify")["problems"] == []
    assert data_dir.rows()["trip"]["residence"] in ("part", "none")


def test_a_damaged_session_is_reported_and_others_work(data_dir, trip):
    import sqlite3

    data_dir.persist_pages(data_dir.session("good", ("a", "b")))
    with sqlite3.connect(data_dir.path / "sessions.db") as connection:
        connection.execute("UPDATE turns SET token_ids = x'09' WHERE text LIKE 'And with%'")
    assert "session 'trip' is damaged" in data_dir.run("verify", code=1)
    assert {"trip", "good"} == set(data_dir.rows())
    assert "damaged" in data_dir.run("show", "trip", code=1)
    assert "damaged" in data_dir.run("gc", code=1)
    data_dir.run("show", "good")
    data_dir.run("rm", "trip", "--yes")
    data_dir.run("gc")
    assert data_dir.run("verify").startswith("checked 1 session and 1 page: no")


def test_an_unusable_data_directory_is_reported_in_one_line(tmp_path, data_dir, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "file"))
    reported = data_dir.run("list", code=1)
    assert str(tmp_path / "file") in reported
    assert reported.count("\n") == 1


def test_a_closed_pipe_ends_the_command_silently(data_dir):
    for i in range(40):
        data_dir.session(f"s{i}", own_title="t" * 3000)
    import subprocess

    env = ENVIRONMENT | {"LMCHAT_HOME": str(data_dir.path)}
    command = [*LMCHAT, "sessions", "list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 141


def test_no_model_is_loaded_for_a_list(data_dir, trip):
    import subprocess

    code = (
        "import sys, conftest; from lmchat.cli.app import app\n"
        "app(['sessions', 'list'], standalone_mode=False)\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    env = ENVIRONMENT | {"LMCHAT_HOME": str(data_dir.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "lmchat.store.sqlite.sqlite_store" in loaded
    assert not {"lmchat.engine", "tokenizers", "turbomind.engine.pages", "torch"} & loaded
