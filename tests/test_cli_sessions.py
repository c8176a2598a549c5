"""`lmchat sessions`: every command on a real store and real pages, and no model anywhere."""

import io
import itertools
import json
import os
import random
import re
import sys
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from assets import ROOT
from command import ENVIRONMENT, LMCHAT
from command import lmchat as process
from terminal import Terminal

from lmchat.cli import main, session_views
from lmchat.cli.session_row import Row, ago, ordered, predicted_ttft
from lmchat.durable.sqlite_store import SqliteStore
from lmchat.errors import InvalidRequest
from lmchat.store import SessionRecord, Summary, TurnStart
from lmchat.turns import Turn

FINGERPRINT = "0123456789abcdef"
BYTES = 2000  # of a page
START = datetime(2026, 5, 1, tzinfo=timezone.utc)


class Home:
    """A home with sessions in it, and the command in this process."""

    def __init__(self, path, capsys, monkeypatch):
        self.path = path
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self._clock = itertools.count()
        monkeypatch.setenv("LMCHAT_HOME", str(path))
        self.store = SqliteStore(path)

    def session(self, name, *rounds, **fields):
        """Keeps a session of (question, reply) texts; a word is ten tokens."""
        fields = {"owner": "local", "fingerprint": FINGERPRINT, **fields}
        record = SessionRecord(name=name, history="keep", **fields)
        record.created = record.last_used = START + timedelta(hours=next(self._clock))
        for question, reply in rounds:
            record.leaf = add_round(record, record.leaf, question, reply)
        self.store.add(record)
        return record

    def find(self, name, owner="local"):
        return self.store.find(owner, name)

    def names(self, owner="local"):
        return [one.name for one in self.store.summaries(owner)]

    def run(self, *arguments, code=0):
        """stdout of `lmchat sessions ...`, or stderr where another exit code is expected."""
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

    def keep_pages(self, record, upto=None):
        """Writes what a close would have: the KV of all but the last token of each branch."""
        from turbomind.pages import Page, PageStore, page_keys, root_key

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
        from turbomind.pages import PageStore

        with PageStore(self.path / "pages") as pages:
            return len(pages.pages())


def add_round(record, parent, question, reply):
    tree = record.tree
    before = 0 if parent is None else tree.get(parent).length
    ids = tokens_of(question)
    user = Turn(tree.new_id(), parent, "user", question, {"role": "user", "content": question},
                ids, before, before + len(ids))  # fmt: skip
    tree.add(user)
    ids = tokens_of(reply)
    answer = Turn(tree.new_id(), user.id, "assistant", reply,
                  {"role": "assistant", "content": reply}, ids, user.length,
                  user.length + len(ids), finish_reason="stop", settings={"seed": 7})  # fmt: skip
    return tree.add(answer).id


def tokens_of(text):
    return tuple(ord(word[0]) * 10 + i for word in text.split() for i in range(10))


@pytest.fixture
def home(tmp_path, capsys, monkeypatch):
    made = Home(tmp_path / "home", capsys, monkeypatch)
    yield made
    made.store.close()


@pytest.fixture
def trip(home):
    """A session with a branch at each of its two questions, and one that was taken back."""
    record = home.session(
        "trip",
        ("Plan a day in Kyoto please", "See the golden temple, then walk."),
        ("And with children?", "Feed the deer in Nara."),
        tags=("travel",),
        settings={"temperature": 0.5},
        model="org/model",
    )
    questions = [turn for turn in record.tree.path(record.leaf) if turn.role == "user"]
    add_round(record, questions[1].parent, "And by train?", "Take the slow one.")
    reply = Turn(record.tree.new_id(), questions[0].id, "assistant", "Or the silver one.", {},
                 (5, 6), questions[0].length, questions[0].length + 2,
                 finish_reason="cancelled")  # fmt: skip
    record.tree.add(reply)
    add_round(record, record.leaf, "Thanks", "Any time")
    home.store.change(record, list(record.tree)[-5:])
    return record


# --- lists ------------------------------------------------------------------------------------


def test_no_sessions_at_all(home):
    assert home.run("list") == ""
    assert home.last.err == "lmchat: there are no sessions yet\n"
    assert home.json("list") == {"sessions": []}
    assert home.json("gc") == {"pages": 0, "bytes": 0, "disk_bytes": 0, "dry_run": False}
    assert home.json("verify")["problems"] == []
    assert not (home.path / "pages").exists()
    assert "there are none yet" in home.run("show", "x", code=2)


def test_list_says_what_there_is(home, trip):
    home.session("other", ("Hello", "Hi"), pinned=True, own_title="A greeting")
    home.session("theirs", ("Hello", "Hi"), owner="somebody")
    lines = home.run("list").splitlines()
    assert lines[0].split() == [
        "session", "turns", "tokens", "disk", "KV", "used", "TTFT", "title",
    ]  # fmt: skip
    assert re.match(r"other +1 +20 .* pinned +A greeting$", lines[1])
    assert re.match(r"trip +2 +200 .* Plan a day in Kyoto please$", lines[2])
    assert len(lines) == 3
    row = home.rows()["trip"]
    assert row == {
        "name": "trip", "id": trip.id, "owner": "local", "title": "Plan a day in Kyoto please",
        "tags": ["travel"], "turns": 2, "tokens": 200,
        "bytes": {"device": None, "host": None, "disk": 0}, "residence": "none",
        "resident_tokens": 0, "predicted_ttft": None, "pinned": False, "busy": "",
        "created": "2026-05-01T00:00:00+00:00", "last_used": "2026-05-01T00:00:00+00:00",
        "model": "org/model", "fingerprint": FINGERPRINT,
    }  # fmt: skip
    row = home.rows("--no-pages")["trip"]
    assert (row["bytes"]["disk"], row["residence"], row["resident_tokens"]) == (None, None, None)
    assert list(home.rows("--owner", "somebody")) == ["theirs"]
    assert list(home.rows("--tag", "travel")) == ["trip"]
    assert list(home.rows("--limit", "1")) == ["other"]
    assert home.run("list", "--tag", "x") == ""
    assert "no such sessions" in home.last.err


def test_list_in_every_order(home):
    home.session("b", ("x", "y " * 9), ("x", "y"))
    home.session("A", ("x", "y " * 50))
    home.session("c", ("x", "y"), ("x", "y"), ("x", "y"))
    expected = {
        "used": "c A b", "created": "c A b", "name": "A b c", "turns": "c b A", "tokens": "A b c",
    }  # fmt: skip
    for order, names in expected.items():
        assert list(home.rows("--sort", order)) == names.split()
        assert list(home.rows("--sort", order, "--limit", "2")) == names.split()[:2]
    assert "--sort is 'size', expected one of used" in home.run("list", "--sort", "size", code=2)


def test_list_knows_where_keys_and_values_are_and_what_a_turn_costs(home, trip):
    part = home.session("part", ("a " * 20, "b " * 20))
    home.session("none", ("c " * 20, "d " * 20))
    home.session("never", ("e", "f"), fingerprint="")
    home.keep_pages(trip)
    home.keep_pages(part, upto=70)
    home.store.note(
        "speeds", {FINGERPRINT: {"disk_read": 1e6, "prefill": 100, "kv_bytes_per_token": 1000}}
    )
    rows = home.rows()
    assert [rows[n]["residence"] for n in ("trip", "part", "none")] == ["all", "part", "none"]
    assert [rows[n]["resident_tokens"] for n in ("trip", "part", "none")] == [200, 70, 0]
    assert rows["part"]["bytes"]["disk"] >= 2 * BYTES
    assert rows["part"]["bytes"]["disk"] < rows["trip"]["bytes"]["disk"]
    assert rows["trip"]["predicted_ttft"] == pytest.approx(200_000 / 1e6 + 1 / 100)
    assert rows["part"]["predicted_ttft"] == pytest.approx(70_000 / 1e6 + 330 / 100)
    assert rows["none"]["predicted_ttft"] == pytest.approx(400 / 100)
    assert rows["never"]["predicted_ttft"] is None
    assert list(home.rows("--sort", "bytes"))[:2] == ["trip", "part"]
    text = home.run("list")
    assert re.search(r"trip +2 +200 .* KiB +all .* 210 ms", text)
    assert re.search(r"part .* KiB +part .* 3.37 s", text)


def test_predictions_without_all_speeds_are_none():
    speeds = {"disk_read": 1e6, "prefill": 100, "kv_bytes_per_token": 1000}
    assert predicted_ttft(100, 99, speeds) == pytest.approx(0.109)
    assert predicted_ttft(100, 99, {**speeds, "disk_read": 1}) == pytest.approx(1.0)  # computed
    assert predicted_ttft(100, 0, {"prefill": 100}) == pytest.approx(1.0)
    for wrong in (None, {}, [], "x", {**speeds, "prefill": 0}, {**speeds, "prefill": True}):
        assert predicted_ttft(100, 99, wrong) is None
    assert predicted_ttft(100, 99, {**speeds, "disk_read": None}) is None
    assert predicted_ttft(0, 0, speeds) is None


def summary(name="x", title="", **fields):
    facts = {
        "id": "1", "owner": "local", "tags": (), "turns": 1, "tokens": 10, "pinned": False,
        "created": START, "last_used": START, "model": "", "fingerprint": "",
    }  # fmt: skip
    return Summary(**{**facts, "name": name, "title": title, **fields})


def shown(rows, width, **options):
    """The lines of a table on a terminal of that width."""
    lines = []
    screen = SimpleNamespace(
        plain=False,
        width=width,
        print=lambda *texts: lines.extend(text.plain for text in texts),
    )
    session_views.table(screen, rows, now=START + timedelta(minutes=3), **options)
    return lines


def test_tables_fit_every_terminal():
    rows = [
        Row(summary("short", "A title " * 30, pinned=True)),
        Row(summary("日本語の名前" * 12, "t"), disk_bytes=1 << 40, resident=4, predicted_ttft=99.9),
        Row(summary("x" * 200, turns=10**6, tokens=10**9, busy="process 123456 on 'some host'")),
        Row(summary("empty", turns=0, tokens=0), device_bytes=7, host_bytes=1 << 20),
    ]
    from rich.cells import cell_len

    for width in (40, 60, 79, 80, 99, 100, 120, 200):
        lines = shown(rows, width)
        assert max(map(cell_len, lines)) <= width
        for text in (
            "short",
            "日本語",
            "xxxxx",
            "1,000,000",
            "3 min ago",
            "pinned",
            "process 1234",
        ):
            assert any(text in line for line in lines), (width, text)
    wide = shown(rows[:1], 200, current="short")
    assert wide[1].startswith("* short")
    assert "device" not in wide[0]
    assert "device" in shown(rows, 200)[0]


def test_how_long_ago():
    for seconds, text in (
        (-5, "now"), (59, "now"), (60, "1 min ago"), (7199, "1 h ago"), (86_400 * 3, "3 d ago"),
        (86_400 * 20, "2 w ago"), (86_400 * 800, "2 y ago"),
    ):  # fmt: skip
        assert ago(START, START + timedelta(seconds=seconds)) == text
    with pytest.raises(InvalidRequest, match="--sort"):
        ordered([], "x")


# --- one session ------------------------------------------------------------------------------


def test_show_prints_facts_and_the_conversation(home, trip):
    text = home.run("show", "trip")
    for line in (
        r"session +trip", r"tags +travel", r"length +2 turns, 200 tokens", r"model +org/model",
        r"settings +temperature 0.5", rf"id +{trip.id}",
    ):  # fmt: skip
        assert re.search(f"^{line}$", text, re.M), line
    assert "1> Plan a day in Kyoto please\nSee the golden temple, then walk.\n" in text
    assert "2> And with children?\nFeed the deer in Nara.\n" in text
    last = home.run("show", "trip", "--turns", "1")
    assert "2> And with children?" in last
    assert "1> " not in last
    assert "> " not in home.run("show", "trip", "--turns", "0")


def test_show_tokens_branches_and_json(home, trip):
    text = home.run("show", "trip", "--tokens", "--turns", "1")
    assert "assistant: 50 tokens\n700 701 702" in text
    rows = re.findall(r"^([* ]) (\d) (\d)  (.*)$", home.run("show", "trip", "--branches"), re.M)
    assert rows == [
        ("*", "1", "1", "Plan a day in Kyoto please → See the golden temple, then walk."),
        (" ", "1", "2", "Plan a day in Kyoto please → Or the silver one."),
        ("*", "2", "1", "And with children? → Feed the deer in Nara."),
        (" ", "2", "2", "And by train? → Take the slow one."),
        (" ", "3", "1", "Thanks → Any time"),
    ]
    found = home.json("show", "trip", "--turns", "1", "--branches")
    assert [m["text"] for m in found["messages"]] == [
        "And with children?",
        "Feed the deer in Nara.",
    ]
    assert found["messages"][1]["token_ids"] == list(tokens_of("Feed the deer in Nara."))
    assert found["messages"][1]["settings"] == {"seed": 7}
    assert (found["settings"], found["tokens"]) == ({"temperature": 0.5}, 200)
    assert [b["active"] for b in found["branches"]] == [True, False, True, False, False]
    home.session("plain", ("a", "b"))
    assert "no branches" in home.run("show", "plain", "--branches")


def test_names_ids_and_what_is_neither(home):
    ids = ["abcd1" + "0" * 27, "abcd2" + "0" * 27, "ffff" + "0" * 28]
    for i, name in zip(ids, ("one", "two", "abcd1"), strict=True):
        home.session(name, id=i)
    assert home.json("show", "abcd2")["name"] == "two"
    assert home.json("show", "ABCD2")["name"] == "two"
    assert home.json("show", "abcd1")["name"] == "abcd1"  # a name before an id
    assert home.json("show", ids[0])["name"] == "one"
    assert "'abcd' begins the ids of 'two', 'one'" in home.run("show", "abcd", code=2)
    assert "no session 'fff'" in home.run("show", "fff", code=2)
    assert "did you mean 'one'?" in home.run("show", "onw", code=2)
    assert "no session 'one'" in home.run("show", "one", "--owner", "x", code=2)
    home.run("show", "nix", "--json", code=2)
    assert json.loads(home.last.out)["error"]["type"] == "NotFound"


def process_out(home, *arguments):
    env = ENVIRONMENT | {"LMCHAT_HOME": str(home.path)}
    return process("sessions", *arguments, env=env).stdout


def test_odd_names_and_texts_are_shown_harmlessly(home):
    names = ["-x", "a/b\\c", "日本 😀", "'q\" $(x)", "[bold]x[/bold]", "e\u0301"]
    for name in names:
        home.session(name, ("a \x1b[31m b \ud83d", "c \x07 d"), own_title="t \x1b]0;x\x07")
    for name in names:
        text = home.run("show", "--", name)
        assert name in text
        assert "\x1b" not in text
        assert "\x07" not in text
        assert json.loads(home.run("show", "--json", "--", name))["name"] == name
    text = home.run("list")
    assert all(name in text for name in names)
    assert "\x1b" not in text
    found = process_out(home, "list")  # the locale cannot write half a character
    assert "-x" in found


def test_search_finds_and_marks(home, trip):
    home.session("other", ("The Golden Gate", "a bridge"), tags=("x",))
    assert home.run("search", "golden").startswith(("trip  ", "other  "))
    found = home.json("search", "gold*", "temple")["sessions"]
    assert [row["name"] for row in found] == ["trip"]
    assert "golden temple" in found[0]["snippet"]
    assert "bytes" not in found[0]
    assert [r["name"] for r in home.json("search", "golden", "--tag", "x")["sessions"]] == ["other"]
    assert len(home.json("search", "golden", "--limit", "1")["sessions"]) == 1
    assert home.json("search", "nothing")["sessions"] == []
    assert home.run("search", "nothing") == ""
    marked = session_views.highlighted("Zoë's golden goldfish", "zoe GOLD*")
    assert [marked.plain[s.start : s.end] for s in marked.spans] == ["Zoë", "golden", "goldfish"]


def test_search_marks_on_a_terminal_only(home, trip):
    command = [*LMCHAT, "sessions", "search", "golden"]
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(home.path)}
    with Terminal(command, columns=40, rows=20, env=env) as terminal:
        assert terminal.wait_end() == 0
        assert "bold" in terminal.style("golden")
        assert "bold" not in terminal.style("temple")
    assert "\x1b" not in home.run("search", "golden")


# --- changes ----------------------------------------------------------------------------------


def test_rename(home, trip):
    assert home.run("rename", "trip", "Ausflug nach Kyōto") == (
        "trip is called Ausflug nach Kyōto now\n"
    )
    assert home.find("Ausflug nach Kyōto").id == trip.id
    home.session("other")
    assert "'other' is taken" in home.run("rename", trip.id[:8], "other", code=2)
    assert "session name is ' x'" in home.run("rename", "other", " x", code=2)


def test_fork_copies_the_beginning_and_shares_pages(home, trip):
    home.keep_pages(trip)
    assert home.json("fork", "trip", "copy")["turns"] == 2
    copy = home.find("copy")
    assert copy.tree.token_ids(copy.leaf) == trip.tree.token_ids(trip.leaf)
    assert (copy.settings, copy.model) == (trip.settings, trip.model)
    assert copy.id != trip.id
    rows = home.rows()
    assert rows["copy"]["residence"] == "all"
    assert home.json("fork", "trip", "--at", "1")["name"] == "chat-1"
    first = home.find("chat-1")
    assert [turn.text for turn in first.tree.path(first.leaf)] == [
        "Plan a day in Kyoto please", "See the golden temple, then walk.",
    ]  # fmt: skip
    assert home.json("fork", "trip", "none", "--at", "0")["turns"] == 0
    assert "--at is 3, expected 0 to 2" in home.run("fork", "trip", "--at", "3", code=2)
    assert "'copy' is taken" in home.run("fork", "trip", "copy", code=2)
    assert len(home.find("trip").tree) == len(trip.tree)


def test_pin(home, trip):
    home.session("other")
    home.keep_pages(trip)
    assert home.run("pin", "trip", "other") == "trip, other: pinned\n"
    assert home.find("trip").pinned
    assert home.find("other").pinned
    assert keep_values(home, trip) == {2.0}
    assert home.json("pin", "trip", "--off") == {"names": ["trip"], "pinned": False}
    assert not home.find("trip").pinned
    assert home.find("other").pinned
    assert keep_values(home, trip) == {1.0}
    assert "no session 'x'" in home.run("pin", "other", "x", "--off", code=2)
    assert home.find("other").pinned


def keep_values(home, record):
    from turbomind.pages import PageStore

    with PageStore(home.path / "pages") as pages:
        return {page.keep_value for key, _ in pages.pages() for page in pages.read(key)}


def test_a_change_goes_behind_what_others_did(home, trip, monkeypatch):
    from lmchat.cli import session_upkeep

    seen = []

    def pin(record):
        if not seen:  # another process is faster
            other = home.find("trip")
            other.own_title = "theirs"
            home.store.change(other)
        seen.append(record.revision)
        record.pinned = True

    session_upkeep.change(home.store, home.find("trip"), pin)
    assert len(seen) == 2
    assert (home.find("trip").pinned, home.find("trip").title) == (True, "theirs")


def test_a_busy_session_is_told_in_one_line(home, trip):
    lease = home.store.begin(trip, TurnStart(trip.leaf, 10, 99, {}))
    assert f"process {os.getpid()}" in home.rows()["trip"]["busy"]
    for command in (["rm", "trip", "--yes"], ["pin", "trip"]):
        told = home.run(*command, code=1)
        who = f"session 'trip' is generating in process {os.getpid()}"
        assert told == f"lmchat: {who}: try again when that has ended\n"
    home.run("rename", "trip", "renamed")  # which makes nobody stale
    home.run("fork", "renamed", "copy")
    home.store.release(lease)
    assert home.rows()["renamed"]["busy"] == ""
    home.run("rm", "renamed", "--yes")


# --- files ------------------------------------------------------------------------------------


def test_export_and_import(home, trip, tmp_path):
    file = tmp_path / "trip.zip"
    home.keep_pages(trip)
    assert home.run("export", "trip", str(file)).startswith(
        f"{file}: {len(trip.tree)} messages and 0 pages written, "
    )
    assert f"{file} exists; --force replaces it" in home.run("export", "trip", str(file), code=2)
    done = home.json("export", "trip", str(file), "--pages", "--force")
    assert done["pages"] == home.page_count() > 3
    assert "'trip' is taken, expected another one for the import; --name gives another" in home.run(
        "import", str(file), code=2
    )
    assert home.json("import", str(file), "--owner", "me") == {
        "name": "trip", "id": home.find("trip", "me").id, "turns": 2, "model": "org/model",
    }  # fmt: skip
    # Another owner's keys have another salt: the pages are there once more.
    assert home.rows("--owner", "me")["trip"]["residence"] == "all"
    assert home.page_count() == 2 * done["pages"]
    home.json("export", "trip", str(tmp_path / "b.zip"), "--pages", "--owner", "me")
    assert (tmp_path / "b.zip").read_bytes() == file.read_bytes()
    said = home.run("import", str(file), "--name", "bare", "--no-pages", "--owner", "you")
    assert said == "session bare is here: 2 questions; the model it names is 'org/model'\n"
    said = home.run("show", "bare", "--owner", "you")
    assert re.search("^model +org/model, as its archive says$", said, re.M)
    home.run("fork", "bare", "fork", "--owner", "you")
    assert home.find("fork", "you").imported
    home.run("rm", "fork", "--owner", "you", "--yes")
    assert home.rows("--owner", "you")["bare"]["residence"] == "none"
    assert home.run("verify") == f"3 sessions and {home.page_count()} pages looked at: no damage\n"


def test_an_import_that_fails_changes_nothing(home, trip, tmp_path):
    file = tmp_path / "trip.zip"
    home.keep_pages(trip)
    home.run("export", "trip", str(file), "--pages")
    pages, data = home.page_count(), bytearray(file.read_bytes())
    data[data.index(b"pages/00000002") + 400] ^= 1
    file.write_bytes(data)
    for owner in ("local", "me"):
        told = home.run("import", str(file), "--name", "new", "--owner", owner, code=2)
        assert "pages/00000002.page" in told
        assert told.count("\n") == 1
    assert home.names() == ["trip"]
    assert home.names("me") == []
    assert home.page_count() == pages
    assert "cannot be read: No such file" in home.run("import", str(tmp_path / "x"), code=2)
    assert "cannot be written" in home.run("export", "trip", str(tmp_path / "x/y.zip"), code=2)


def test_pages_come_back_as_they_were(home, trip, tmp_path):
    home.keep_pages(trip)
    from turbomind.pages import PageStore

    home.run("export", "trip", str(tmp_path / "a.zip"), "--pages")
    before = all_pages(PageStore(home.path / "pages"))
    home.run("rm", "trip", "--yes")
    assert home.page_count() == 0
    home.run("import", str(tmp_path / "a.zip"))
    assert all_pages(PageStore(home.path / "pages")) == before


def all_pages(store):
    with store:
        found = [page for key, _ in store.pages() for page in store.read(key)]
        return sorted((p.key, p.parent, tuple(p.token_ids), p.numerics, p.payload) for p in found)


# --- deleting ---------------------------------------------------------------------------------


def test_rm_frees_what_no_other_session_has(home, trip):
    home.keep_pages(trip)
    only = home.session("only", ("q " * 30, "r " * 30))
    home.keep_pages(only)
    home.run("fork", "trip", "copy")
    pages = home.page_count()
    assert home.json("rm", "only", "--yes")["freed_bytes"] > 9 * BYTES
    assert home.page_count() == pages - 10
    home.json("rm", "trip", "--yes")
    assert home.rows()["copy"]["residence"] == "all"
    assert 0 < home.page_count() < pages - 10  # the branches went, the copy has what it shares
    home.json("rm", "copy", "--yes")
    assert home.page_count() == 0


def test_rm_frees_what_a_dead_process_had_generated(home, trip):
    dead = SqliteStore(home.path)
    record = dead.find("local", "trip")
    length = record.tree.get(record.leaf).length
    lease = dead.begin(record, TurnStart(record.leaf, length, 99, {}))
    ids = tokens_of("more " * 20)
    dead.journal([(lease, ids)])
    dead.close()
    reply = Turn(99, record.leaf, "assistant", "", {}, ids, length, length + len(ids))
    record.tree.adopt(reply)
    home.keep_pages(record)
    assert home.page_count() > 3
    home.run("rm", "trip", "--yes")
    assert home.page_count() == 0


def test_rm_asks_on_a_terminal(home, trip, monkeypatch):
    home.session("other")
    no = io.StringIO("n\n")
    no.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", no)
    home.run("rm", "trip", code=1)
    assert home.names() == ["other", "trip"]
    command = [*LMCHAT, "sessions", "rm", "trip", "other"]
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(home.path)}
    with Terminal(command, columns=80, rows=20, env=env) as terminal:
        terminal.wait("Delete trip (2 turns), other (0 turns)? [y/N]:")
        terminal.type("y\r")
        assert terminal.wait_end() == 0, terminal.text
    assert home.names() == []


def test_rm_of_several_deletes_none_when_one_is_none(home, trip, monkeypatch):
    assert "no session 'x'" in home.run("rm", "trip", "x", "--yes", code=2)
    monkeypatch.setattr(sys, "stdin", None)
    assert "expected --yes" in home.run("rm", "trip", code=2)
    assert home.names() == ["trip"]
    assert home.json("rm", "trip", trip.id, "--yes")["names"] == ["trip"]


def test_gc_frees_what_no_session_refers_to(home, trip):
    gone = SessionRecord("gone", "local", "keep", fingerprint=FINGERPRINT)
    gone.leaf = add_round(gone, None, "z " * 30, "y " * 30)
    theirs = home.session("theirs", ("k " * 10, "l"), owner="somebody")
    short = home.session("short", ("s", "t"))
    for record in (trip, gone, theirs, short):
        home.keep_pages(record)
    pages = home.page_count()
    assert home.json("gc", "--dry-run")["pages"] == 10
    assert home.page_count() == pages
    done = home.json("gc")
    assert done["pages"] == 10
    assert done["bytes"] > 10 * BYTES
    assert home.page_count() == pages - 10
    assert home.rows()["trip"]["residence"] == "all"
    assert home.rows()["short"]["residence"] == "all"
    assert home.rows("--owner", "somebody")["theirs"]["residence"] == "all"
    assert home.json("gc")["pages"] == 0


# --- damage -----------------------------------------------------------------------------------


def test_verify_finds_damaged_pages_and_takes_them_out(home, trip):
    home.keep_pages(trip)
    file = max((home.path / "pages").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[BYTES // 2] ^= 1
    file.write_bytes(data)
    told = home.run("verify", code=1)
    assert re.search(r"[1-9]\d* damaged pages? taken out", told)
    assert home.json("verify")["problems"] == []
    assert home.rows()["trip"]["residence"] in ("part", "none")


def test_a_damaged_session_is_told_and_others_go_on(home, trip):
    import sqlite3

    home.keep_pages(home.session("good", ("a", "b")))
    with sqlite3.connect(home.path / "sessions.db") as connection:
        connection.execute("UPDATE turns SET token_ids = x'09' WHERE text LIKE 'And with%'")
    assert "session 'trip' is damaged" in home.run("verify", code=1)
    assert {"trip", "good"} == set(home.rows())
    assert "damaged" in home.run("show", "trip", code=1)
    assert "damaged" in home.run("gc", code=1)
    home.run("show", "good")
    home.run("rm", "trip", "--yes")
    home.run("gc")
    assert home.run("verify").startswith("1 session and 1 page looked at: no")


def test_a_home_that_cannot_be_used_is_one_line(tmp_path, home, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "file"))
    told = home.run("list", code=1)
    assert str(tmp_path / "file") in told
    assert told.count("\n") == 1


def test_a_reader_that_goes_away_ends_it_quietly(home):
    for i in range(40):
        home.session(f"s{i}", own_title="t" * 3000)
    import subprocess

    env = ENVIRONMENT | {"LMCHAT_HOME": str(home.path)}
    command = [*LMCHAT, "sessions", "list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 141


def test_no_model_is_loaded_for_a_list(home, trip):
    import subprocess

    code = (
        "import sys, conftest; from lmchat.cli.app import app\n"
        "app(['sessions', 'list'], standalone_mode=False)\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    env = ENVIRONMENT | {"LMCHAT_HOME": str(home.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "lmchat.durable.sqlite_store" in loaded
    assert not {"lmchat.engine", "tokenizers", "turbomind.pages", "torch"} & loaded
