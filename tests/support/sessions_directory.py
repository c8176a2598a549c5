"""A data directory with sessions and pages, for the commands of `lmchat sessions`."""

import itertools
import json
import random
import sys
from datetime import datetime, timedelta, timezone

import pytest

from lmchat.cli import main
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn

FINGERPRINT = "0123456789abcdef"
BYTES = 2000  # of a page
START = datetime(2026, 5, 1, tzinfo=timezone.utc)


class DataDirectory:
    """A data directory with sessions, and the command in this process."""

    def __init__(self, path, capsys, monkeypatch):
        self.path = path
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._clock = itertools.count()
        monkeypatch.setenv("LMCHAT_HOME", str(path))
        self.store = SqliteStore(path)

    def session(self, name, *rounds, **fields):
        """Stores a session of (question, reply) texts. Each word is ten tokens."""
        fields = {"owner": "local", "fingerprint": FINGERPRINT, **fields}
        used = START + timedelta(hours=next(self._clock))
        record = SessionRecord(name=name, history="append", created=used, last_used=used, **fields)
        for question, reply in rounds:
            record = with_round(record, record.leaf, question, reply)
        return self.store.add(record)

    def find(self, name, owner="local"):
        return self.store.find(owner, name)

    def names(self, owner="local"):
        return [one.name for one in self.store.summaries(owner)]

    def run(self, *arguments, code=0):
        """Runs `lmchat sessions ...`. Returns stdout, or stderr if another exit code is
        expected."""
        self._monkeypatch.setattr(sys, "argv", ["lmchat", "sessions", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        found = self.last = self._capsys.readouterr()
        assert ended.value.code == code, found
        return found.out if code == 0 else found.err

    def json(self, *arguments):
        return json.loads(self.run(*arguments, "--json"))

    def rows(self, *arguments):
        return {row["name"]: row for row in self.json("list", *arguments)["sessions"]}

    def persist_pages(self, record, upto=None):
        """Writes the pages that closing an engine writes: the KV of all but the last token of each
        branch."""
        from turbomind.engine.pages import Page, PageStore, page_keys, root_key

        with PageStore(self.path / "pages") as pages:
            for leaf in [turn for turn in record.tree if not record.tree.children(turn.id)]:
                ids = record.tree.token_ids(leaf.id)[:-1][:upto]
                made = page_keys(record.fingerprint, ids, record.owner)
                keys = [root_key(record.fingerprint, record.owner), *made]
                for i, start in enumerate(range(0, len(ids), 64)):
                    payload = random.Random(keys[i + 1]).randbytes(BYTES)
                    tokens = ids[start : start + 64]
                    page = Page(keys[i + 1], keys[i], tokens, payload, heads=1,
                                fingerprint=record.fingerprint, numerics="cpu/avx2/1")  # fmt: skip
                    assert pages.write(page)

    def page_count(self):
        from turbomind.engine.pages import PageStore

        with PageStore(self.path / "pages") as pages:
            return len(pages.pages())


@pytest.fixture(name="data_dir")
def made_home(tmp_path, capsys, monkeypatch):
    made = DataDirectory(tmp_path / "data", capsys, monkeypatch)
    yield made
    made.store.close()


@pytest.fixture(name="trip")
def made_trip(data_dir):
    return make_trip(data_dir)


def with_round(record, parent, question, reply):
    """Returns the record at a new question and its reply."""
    tree = record.tree
    before = 0 if parent is None else tree.get(parent).length
    ids = tokens_of(question)
    user = Turn(tree.new_id(), parent, "user", question, {"role": "user", "content": question},
                ids, before, before + len(ids))  # fmt: skip
    ids = tokens_of(reply)
    answer = Turn(tree.new_id(), user.id, "assistant", reply,
                  {"role": "assistant", "content": reply}, ids, user.length,
                  user.length + len(ids), finish_reason="stop", settings={"seed": 7})  # fmt: skip
    return record.changed([user, answer], leaf=answer.id)


def tokens_of(text):
    return tuple(ord(word[0]) * 10 + i for word in text.split() for i in range(10))


def make_trip(data_dir):
    """Stores a session with a branch at each of its two questions, and one that was undone."""
    record = data_dir.session(
        "trip",
        ("Plan a day in Kyoto please", "See the golden temple, then walk."),
        ("And with children?", "Feed the deer in Nara."),
        tags=("travel",),
        settings={"temperature": 0.5},
        model="org/model",
    )
    questions = [turn for turn in record.tree.path(record.leaf) if turn.role == "user"]
    leaf = record.leaf
    record = with_round(record, questions[1].parent, "And by train?", "Take the slow one.")
    reply = Turn(record.tree.new_id(), questions[0].id, "assistant", "Or the silver one.", {},
                 (5, 6), questions[0].length, questions[0].length + 2,
                 finish_reason="cancelled")  # fmt: skip
    record = with_round(record.changed([reply]), leaf, "Thanks", "Any time").changed(leaf=leaf)
    return data_dir.store.change(record, list(record.tree)[-5:])
