"""`lmchat sessions rm --older-than`: which sessions are deleted, by the time of their last use."""

import io
import os
import sys
from datetime import datetime, timedelta, timezone

import pytest
from assets import ROOT
from command import LMCHAT
from sessions_directory import (  # noqa: F401 - fixtures
    FINGERPRINT,
    DataDirectory,
    made_home,
    with_round,
)
from terminal import Terminal

from lmchat.cli.sessions import removal
from lmchat.errors import InvalidRequest
from lmchat.store.records import HIDDEN_TAG, SessionRecord, TurnStart

NOW = datetime.now(timezone.utc)


@pytest.fixture
def add(data_dir):
    """Stores a session that was last used some time ago."""

    def one(name, owner="local", question="Plan a day", **fields):
        ago = timedelta(**{k: fields.pop(k) for k in ("hours", "days") if k in fields})
        record = SessionRecord(
            name=name, history="append", owner=owner, fingerprint=FINGERPRINT, created=NOW - ago,
            last_used=NOW - ago, **fields,
        )  # fmt: skip
        return data_dir.store.add(with_round(record, record.leaf, question, "Walk"))

    return one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h", timedelta(hours=1)),
        ("30d", timedelta(days=30)),
        ("8w", timedelta(weeks=8)),
        ("999999w", timedelta(weeks=999999)),
    ],
)
def test_ages_are_hours_days_or_weeks(text, expected):
    assert removal.parse_age(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "30", "d", "0d", "-1d", "1.5d", "30 d", "30D", "30m", "1y", "1d12h", "٣d", "9" * 7 + "d"],
)
def test_other_ages_are_refused(data_dir, text):
    with pytest.raises(InvalidRequest, match="expected a number of hours, days or weeks: 12h, 30d"):
        removal.parse_age(text)
    assert data_dir.run("rm", "--older-than", text, "--yes", code=2).startswith(
        f"lmchat: --older-than is {text!r}, expected"
    )


def test_sessions_are_deleted_by_their_last_use(data_dir, add):
    add("used just now")
    add("used yesterday", hours=29)
    add("old", days=29, hours=23)
    add("older", days=30, hours=1)
    add("oldest", days=400, pinned=False)
    dry = data_dir.json("rm", "--older-than", "30d", "--dry-run")
    assert dry == {"names": ["oldest", "older"], "freed_bytes": 0, "skipped": {}, "dry_run": True}
    assert data_dir.run("rm", "--older-than", "30d", "--dry-run") == (
        "would be deleted: oldest, older\n"
    )
    assert len(data_dir.names()) == 5
    assert data_dir.json("rm", "--older-than", "30d", "--yes") == dry | {"dry_run": False}
    assert data_dir.run("rm", "--older-than", "30d", "--yes") == (
        "no session is deleted: all were used in the last 30d\n"
    )
    assert data_dir.run("rm", "--older-than", "4w", "-y") == (
        "deleted: old; 0 B of KV cache freed\n"
    )
    assert data_dir.run("rm", "--older-than", "999999w", "--yes").startswith("no session is")
    assert data_dir.json("rm", "--older-than", "28h", "--yes")["names"] == ["used yesterday"]
    assert data_dir.names() == ["used just now"]


def test_pages_of_deleted_sessions_are_freed(data_dir, add):
    for name, days in (("old", 31), ("new", 1)):
        data_dir.persist_pages(add(name, days=days, question=f"{name} " * 20))
    count = data_dir.page_count()
    found = data_dir.json("rm", "--older-than", "30d", "--yes")
    assert found["freed_bytes"] > 0
    assert 0 < data_dir.page_count() < count


def test_sessions_of_others_pinned_hidden_and_busy_ones_stay(data_dir, add):
    add("mine", days=40)
    add("pinned", days=40, pinned=True)
    add("of a program", days=40, tags=(HIDDEN_TAG,))
    add("of another", "you", days=40)
    data_dir.store.begin(add("busy", days=40), TurnStart(2, 10, 99, {}))
    data_dir.run("rm", "--older-than", "30d", "--yes")
    assert data_dir.last.out == "deleted: mine; 0 B of KV cache freed\n"
    assert {*data_dir.last.err.splitlines()} == {
        "lmchat: session pinned is not deleted: it is pinned",
        f"lmchat: session busy is not deleted: process {os.getpid()} is generating in it",
    }
    assert {*data_dir.names()} == {"busy", "pinned", "of a program"}
    assert data_dir.names("you") == ["of another"]
    found = data_dir.json("rm", "--older-than", "30d", "--owner", "you", "--yes")
    assert found["names"] == ["of another"]


def test_a_session_that_is_used_after_the_question_stays(data_dir, add):
    record = add("old", days=40)
    chosen = removal.by_age(data_dir.store, "local", timedelta(days=30))
    assert chosen.names == ["old"]
    data_dir.store.change(record.changed(last_used=NOW))
    assert removal.remove(data_dir.store, None, chosen) == 0
    assert (chosen.names, chosen.skipped) == ([], {"old": "it was used just now"})
    assert data_dir.names() == ["old"]


def test_a_clock_that_went_back_makes_no_session_younger(data_dir, add):
    add("of the right time", days=-100)
    add("old", days=-60)
    assert data_dir.json("rm", "--older-than", "30d", "--yes")["names"] == ["old"]


def test_names_or_an_age_are_expected(data_dir, add):
    add("one", days=40)
    for arguments in ([], ["one", "--older-than", "30d"], ["--dry-run"]):
        reported = data_dir.run("rm", *arguments, "--yes", code=2)
        assert reported == "lmchat: expected the NAMEs of sessions, or --older-than\n"
    assert data_dir.run("rm", "one", "--dry-run") == "would be deleted: one\n"
    assert data_dir.names() == ["one"]


def test_many_sessions_are_deleted_after_one_question(data_dir, add, monkeypatch):
    for i in range(13):
        add(f"s{i}", days=100 - i)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # not a terminal
    assert "expected --yes" in data_dir.run("rm", "--older-than", "30d", code=2)
    command = [*LMCHAT, "sessions", "rm", "--older-than", "30d"]
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(data_dir.path)}
    for answer, code, left in (("\r", 1, 13), ("y\r", 0, 0)):
        with Terminal(command, columns=200, env=env) as terminal:
            terminal.wait("Delete s0 (1 turn), s1 (1 turn), ")
            terminal.wait("s9 (1 turn), and 3 more? [y/N]:")
            terminal.type(answer)
            assert terminal.wait_end() == code
        assert len(data_dir.names()) == left
