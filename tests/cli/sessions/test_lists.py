"""`lmchat sessions`: lists, searches and one session, on a real store and real pages, without a
model."""

import json
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from assets import ROOT
from command import ENVIRONMENT, LMCHAT
from command import lmchat as process
from sessions_directory import (  # noqa: F401 - fixtures
    BYTES,
    FINGERPRINT,
    START,
    DataDirectory,
    made_home,
    made_trip,
    make_trip,
    tokens_of,
)
from terminal import Terminal

from lmchat.cli.sessions import views
from lmchat.cli.sessions.list_row import Row, ago, ordered, predicted_ttft
from lmchat.errors import InvalidRequest
from lmchat.store.records import Summary


def test_commands_without_any_session(data_dir):
    assert data_dir.run("list") == ""
    assert data_dir.last.err == "lmchat: there are no sessions yet\n"
    assert data_dir.json("list") == {"sessions": []}
    assert data_dir.json("gc") == {"pages": 0, "bytes": 0, "disk_bytes": 0, "dry_run": False}
    assert data_dir.json("verify")["problems"] == []
    assert not (data_dir.path / "pages").exists()
    assert "there are no sessions yet" in data_dir.run("show", "x", code=2)


def test_list_prints_the_sessions(data_dir, trip):
    data_dir.session("other", ("Hello", "Hi"), pinned=True, own_title="A greeting")
    data_dir.session("theirs", ("Hello", "Hi"), owner="other")
    lines = data_dir.run("list").splitlines()
    assert lines[0].split() == [
        "session", "turns", "tokens", "disk", "KV", "used", "TTFT", "model", "title",
    ]  # fmt: skip
    assert re.match(r"other +1 +20 .* pinned +A greeting$", lines[1])
    assert re.match(r"trip +2 +200 .* Plan a day in Kyoto please$", lines[2])
    assert len(lines) == 3
    row = data_dir.rows()["trip"]
    assert row == {
        "name": "trip", "id": trip.id, "owner": "local", "title": "Plan a day in Kyoto please",
        "tags": ["travel"], "turns": 2, "tokens": 200,
        "bytes": {"device": None, "host": None, "disk": 0}, "residence": "none",
        "resident_tokens": 0, "predicted_ttft": None, "pinned": False, "busy": "",
        "created": "2026-05-01T00:00:00+00:00", "last_used": "2026-05-01T00:00:00+00:00",
        "model": "org/model", "fingerprint": FINGERPRINT,
    }  # fmt: skip
    row = data_dir.rows("--no-pages")["trip"]
    assert (row["bytes"]["disk"], row["residence"], row["resident_tokens"]) == (None, None, None)
    assert list(data_dir.rows("--owner", "other")) == ["theirs"]
    assert list(data_dir.rows("--tag", "travel")) == ["trip"]
    assert list(data_dir.rows("--limit", "1")) == ["other"]
    assert data_dir.run("list", "--tag", "x") == ""
    assert "no such sessions" in data_dir.last.err


def test_list_in_every_order(data_dir):
    data_dir.session("b", ("x", "y " * 9), ("x", "y"))
    data_dir.session("A", ("x", "y " * 50))
    data_dir.session("c", ("x", "y"), ("x", "y"), ("x", "y"))
    expected = {
        "used": "c A b", "created": "c A b", "name": "A b c", "turns": "c b A", "tokens": "A b c",
    }  # fmt: skip
    for order, names in expected.items():
        assert list(data_dir.rows("--sort", order)) == names.split()
        assert list(data_dir.rows("--sort", order, "--limit", "2")) == names.split()[:2]
    assert "--sort is 'size', expected one of used" in data_dir.run(
        "list", "--sort", "size", code=2
    )


def test_list_prints_the_cached_part_and_the_predicted_ttft(data_dir, trip):
    part = data_dir.session("part", ("a " * 20, "b " * 20))
    data_dir.session("none", ("c " * 20, "d " * 20))
    data_dir.session("never", ("e", "f"), fingerprint="")
    data_dir.persist_pages(trip)
    data_dir.persist_pages(part, upto=70)
    data_dir.store.note(
        "speeds", {FINGERPRINT: {"disk_read": 1e6, "prefill": 100, "kv_bytes_per_token": 1000}}
    )
    rows = data_dir.rows()
    assert [rows[n]["residence"] for n in ("trip", "part", "none")] == ["all", "part", "none"]
    assert [rows[n]["resident_tokens"] for n in ("trip", "part", "none")] == [200, 70, 0]
    assert rows["part"]["bytes"]["disk"] >= 2 * BYTES
    assert rows["part"]["bytes"]["disk"] < rows["trip"]["bytes"]["disk"]
    assert rows["trip"]["predicted_ttft"] == pytest.approx(200_000 / 1e6 + 1 / 100)
    assert rows["part"]["predicted_ttft"] == pytest.approx(70_000 / 1e6 + 330 / 100)
    assert rows["none"]["predicted_ttft"] == pytest.approx(400 / 100)
    assert rows["never"]["predicted_ttft"] is None
    assert list(data_dir.rows("--sort", "bytes"))[:2] == ["trip", "part"]
    text = data_dir.run("list")
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
    views.table(screen, rows, now=START + timedelta(minutes=3), **options)
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


def test_ages_have_one_unit():
    for seconds, text in (
        (-5, "now"), (59, "now"), (60, "1 min ago"), (7199, "1 h ago"), (86_400 * 3, "3 d ago"),
        (86_400 * 20, "2 w ago"), (86_400 * 800, "2 y ago"),
    ):  # fmt: skip
        assert ago(START, START + timedelta(seconds=seconds)) == text
    with pytest.raises(InvalidRequest, match="--sort"):
        ordered([], "x")


# --- one session ------------------------------------------------------------------------------


def test_show_prints_facts_and_the_conversation(data_dir, trip):
    text = data_dir.run("show", "trip")
    for line in (
        r"session +trip", r"tags +travel", r"length +2 turns, 200 tokens", r"model +org/model",
        r"settings +temperature 0.5", rf"id +{trip.id}",
    ):  # fmt: skip
        assert re.search(f"^{line}$", text, re.M), line
    assert "1> Plan a day in Kyoto please\nSee the golden temple, then walk.\n" in text
    assert "2> And with children?\nFeed the deer in Nara.\n" in text
    last = data_dir.run("show", "trip", "--turns", "1")
    assert "2> And with children?" in last
    assert "1> " not in last
    assert "> " not in data_dir.run("show", "trip", "--turns", "0")


def test_show_tokens_branches_and_json(data_dir, trip):
    text = data_dir.run("show", "trip", "--tokens", "--turns", "1")
    assert "assistant: 50 tokens\n700 701 702" in text
    rows = re.findall(r"^([* ]) (\d) (\d)  (.*)$", data_dir.run("show", "trip", "--branches"), re.M)
    assert rows == [
        ("*", "1", "1", "Plan a day in Kyoto please → See the golden temple, then walk."),
        (" ", "1", "2", "Plan a day in Kyoto please → Or the silver one."),
        ("*", "2", "1", "And with children? → Feed the deer in Nara."),
        (" ", "2", "2", "And by train? → Take the slow one."),
        (" ", "3", "1", "Thanks → Any time"),
    ]
    found = data_dir.json("show", "trip", "--turns", "1", "--branches")
    assert [m["text"] for m in found["messages"]] == [
        "And with children?",
        "Feed the deer in Nara.",
    ]
    assert found["messages"][1]["token_ids"] == list(tokens_of("Feed the deer in Nara."))
    assert found["messages"][1]["settings"] == {"seed": 7}
    assert (found["settings"], found["tokens"]) == ({"temperature": 0.5}, 200)
    assert [b["active"] for b in found["branches"]] == [True, False, True, False, False]
    data_dir.session("plain", ("a", "b"))
    assert "no branches" in data_dir.run("show", "plain", "--branches")


def test_sessions_are_found_by_name_and_by_id(data_dir):
    ids = ["abcd1" + "0" * 27, "abcd2" + "0" * 27, "ffff" + "0" * 28]
    for i, name in zip(ids, ("one", "two", "abcd1"), strict=True):
        data_dir.session(name, id=i)
    assert data_dir.json("show", "abcd2")["name"] == "two"
    assert data_dir.json("show", "ABCD2")["name"] == "two"
    assert data_dir.json("show", "abcd1")["name"] == "abcd1"  # names take precedence over ids
    assert data_dir.json("show", ids[0])["name"] == "one"
    assert "id 'abcd' matches 'two', 'one', expected more characters" in data_dir.run(
        "show", "abcd", code=2
    )
    assert "no session 'fff'" in data_dir.run("show", "fff", code=2)
    assert "did you mean 'one'?" in data_dir.run("show", "onw", code=2)
    assert "no session 'one'" in data_dir.run("show", "one", "--owner", "x", code=2)
    data_dir.run("show", "nix", "--json", code=2)
    assert json.loads(data_dir.last.out)["error"]["type"] == "NotFound"


def process_out(data_dir, *arguments):
    env = ENVIRONMENT | {"LMCHAT_HOME": str(data_dir.path)}
    return process("sessions", *arguments, env=env).stdout


def test_control_characters_are_not_printed(data_dir):
    names = ["-x", "a/b\\c", "日本 😀", "'q\" $(x)", "[bold]x[/bold]", "e\u0301"]
    for name in names:
        data_dir.session(name, ("a \x1b[31m b \ud83d", "c \x07 d"), own_title="t \x1b]0;x\x07")
    for name in names:
        text = data_dir.run("show", "--", name)
        assert name in text
        assert "\x1b" not in text
        assert "\x07" not in text
        assert json.loads(data_dir.run("show", "--json", "--", name))["name"] == name
    text = data_dir.run("list")
    assert all(name in text for name in names)
    assert "\x1b" not in text
    found = process_out(data_dir, "list")  # the locale cannot write a lone surrogate
    assert "-x" in found


def test_search_finds_and_highlights(data_dir, trip):
    data_dir.session("other", ("The Golden Gate", "a bridge"), tags=("x",))
    assert data_dir.run("search", "golden").startswith(("trip  ", "other  "))
    found = data_dir.json("search", "gold*", "temple")["sessions"]
    assert [row["name"] for row in found] == ["trip"]
    assert "golden temple" in found[0]["snippet"]
    assert "bytes" not in found[0]
    assert [r["name"] for r in data_dir.json("search", "golden", "--tag", "x")["sessions"]] == [
        "other"
    ]
    assert len(data_dir.json("search", "golden", "--limit", "1")["sessions"]) == 1
    assert data_dir.json("search", "nothing")["sessions"] == []
    assert data_dir.run("search", "nothing") == ""
    marked = views.highlighted("Zoë's golden goldfish", "zoe GOLD*")
    assert [marked.plain[s.start : s.end] for s in marked.spans] == ["Zoë", "golden", "goldfish"]


def test_search_highlights_on_a_terminal_only(data_dir, trip):
    command = [*LMCHAT, "sessions", "search", "golden"]
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(data_dir.path)}
    with Terminal(command, columns=40, rows=20, env=env) as terminal:
        assert terminal.wait_end() == 0
        assert "bold" in terminal.style("golden")
        assert "bold" not in terminal.style("temple")
    assert "\x1b" not in data_dir.run("search", "golden")
