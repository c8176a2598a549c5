"""Sessions outlive their process: nothing acknowledged or shown is lost, and an interrupted reply
continues as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from assets import ROOT
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation
from command import ENVIRONMENT
from stores import FaultyStore

import lmchat
from lmchat.generation.state import State
from lmchat.store.records import TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}
LONG = {"temperature": 0.0, "max_new_tokens": 500, "logit_bias": NO_END}
SEEDED = {**LONG, "temperature": 1.2, "top_k": 50, "seed": 11, "presence_penalty": 0.3}
OPTIONS = {"threads": 1, "cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def open_chat(folder, device, data_dir):
    """Opens engines on this test's data directory, or on a given store."""
    engines = []

    def open_one(**options):
        engines.append(lmchat.ChatEngine(folder, device=device, **{**OPTIONS, **options}))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def by_hand(chat):
    """Returns the transcript that the turns make."""
    conversation = Conversation(make_tokenizer())
    system = chat.system
    for turn in chat.turns:
        if turn.role == "user":
            conversation.user(turn.text, system)
        elif turn.role == "assistant":
            conversation.reply(list(turn.token_ids))
    return conversation.ids


def same(one, other):
    """Asserts that two sessions have equal conversations and settings."""
    assert one.token_ids == other.token_ids
    assert [(t.role, t.text) for t in one.turns] == [(t.role, t.text) for t in other.turns]
    assert (one.settings, one.title, one.tags, one.pinned, one.overflow, one.history) == (
        other.settings, other.title, other.tags, other.pinned, other.overflow, other.history
    )  # fmt: skip


# --- coming back ---------------------------------------------------------------------------------


def test_the_next_process_finds_every_session_as_it_was(open_chat):
    with open_chat() as engine:
        chat = engine.session("trip", system="Be brief.", settings=GREEDY)
        chat.send("One")
        chat.send("Two")
        chat.edit(1, "Zwei")
        chat.undo()
        chat.switch(1, 0)
        chat.set_tags(["travel", "japan"])
        chat.title = "A trip"
        chat.pin()
        chat.set_overflow("drop")
        chat.set(temperature=0.5)
        chat.set_variables(loud=True)
        chat.fork("other", at=1)
        ids, turns, branches = chat.token_ids, chat.turns, chat.branches(1)
        engine.session("empty")
        engine.session()
    with open_chat() as engine:
        assert {i.name for i in engine.sessions()} == {"trip", "other", "empty"}
        tagged = {found.name: found for found in engine.sessions(tag="travel")}
        assert set(tagged) == {"trip", "other"}  # a fork has the tags too
        info = tagged["trip"]
        assert (info.name, info.title, info.turns, info.tokens) == ("trip", "A trip", 2, len(ids))
        assert (info.state, info.pinned, info.tags) == (State.CLOSED, True, ("travel", "japan"))
        assert [i.name for i in engine.sessions(search="zwei")] == ["trip"]
        chat = engine.session("trip")
        assert chat.turns == turns
        assert (chat.token_ids, chat.branches(1)) == (ids, branches)
        assert (chat.overflow, chat.tags, chat.title) == ("drop", ("travel", "japan"), "A trip")
        assert (chat.settings["temperature"], chat.template_variables) == (0.5, {"loud": True})
        assert [t.text for t in engine.session("other").turns if t.role == "user"] == ["One"]
        chat.title = ""
        assert chat.title == "One"
        chat.send("Three", **GREEDY)
        assert chat.token_ids == by_hand(chat)
        chat.rename("journey")
        engine.delete("other")
    with open_chat() as engine:
        assert {i.name for i in engine.sessions()} == {"journey", "empty"}
        assert [t.text for t in engine.session("journey").turns if t.role == "user"] == [
            "One", "Two", "Three"
        ]  # fmt: skip


def test_replies_after_a_restart_equal_those_without_one(open_chat):
    texts = ["One", "Two", "Three", "Four"]
    with open_chat(store="memory") as engine:
        chat = engine.session(settings=GREEDY)
        wanted = [chat.send(text).token_ids for text in texts]
    for text, ids in zip(texts, wanted, strict=True):
        with open_chat() as engine:
            assert engine.session("trip", settings=GREEDY).send(text).token_ids == ids


def test_bad_store_options_are_refused(folder, tmp_path):
    for bad in (3, None, object()):
        with pytest.raises(lmchat.InvalidRequest, match="store is"):
            lmchat.ChatEngine(folder, store=bad)
    with pytest.raises(lmchat.InvalidRequest, match="persist_pages is 1"):
        lmchat.ChatEngine(folder, store=tmp_path, persist_pages=1)
    with pytest.raises(lmchat.InvalidRequest, match="persist_page"):
        lmchat.ChatEngine(folder, store=tmp_path, persist_page=True)
    (tmp_path / "file").touch()
    with pytest.raises(lmchat.StoreError):
        lmchat.ChatEngine(folder, store=tmp_path / "file")


# --- kill -9 -------------------------------------------------------------------------------------


class Child:
    """The process of `killed_chat.py`."""

    def __init__(self, folder, data_dir, settings, shown, *texts):
        script = ROOT / "tests" / "support" / "killed_chat.py"
        arguments = [folder, data_dir, json.dumps(settings), shown, *texts]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def read(self, count=None):
        """Returns so many lines, or all until the process ends."""
        if count is None:
            lines = self.process.stdout.read().split("\n")[:-1]
            assert self.process.wait(60) == -signal.SIGKILL
            self.process.stdin.close()
            self.process.stdout.close()
        else:
            lines = [self.process.stdout.readline() for _ in range(count)]
        return [json.loads(line) for line in lines]

    def kill(self):
        """Kills the process and returns what was shown and not yet read."""
        self.process.kill()
        return self.read()


@pytest.mark.parametrize(("settings", "shown"), [(LONG, 1), (SEEDED, 70)])
def test_a_kill_in_a_reply_loses_no_token_that_was_shown(
    open_chat, folder, data_dir, settings, shown
):
    sent, *parts = Child(folder, data_dir, settings, shown, "One", "Tell me").read()
    assert (sent, len(parts)) == ("sent", shown)
    with open_chat(store="memory") as engine:
        chat = engine.session()
        chat.send("One", **GREEDY)
        whole = chat.send("Tell me", **settings)
    with open_chat() as engine:
        chat = engine.session("trip")
        assert [t.text for t in chat.turns if t.role == "user"] == ["One", "Tell me"]
        reply = chat.turns[-1]
        assert reply.text.startswith("".join(parts))
        assert list(reply.token_ids) == whole.token_ids[: len(reply.token_ids)]
        assert chat.token_ids == by_hand(chat)
    with open_chat() as engine:  # it was stored as a turn
        chat = engine.session("trip")
        assert chat.turns[-1] == reply
        if chat.interrupted:  # the last token may have been journalled before the first was shown
            longer = chat.continue_()
            assert (longer.token_ids, longer.text) == (whole.token_ids, whole.text)
            assert longer.finish_reason == "length"
        chat.send("Next", **GREEDY)
        assert chat.token_ids == by_hand(chat)


@pytest.mark.parametrize("settings", [LONG, SEEDED])
def test_an_interrupted_reply_goes_on_as_if_it_had_never_stopped(open_chat, data_dir, settings):
    settings = {**settings, "max_new_tokens": 120, "min_new_tokens": 100}
    with open_chat(store="memory") as engine:
        whole = engine.session().send("One", **settings)
    for count in (1, 63, 90, 119):
        name = f"trip {count}"
        with open_chat() as engine:
            engine.session(name)
        leave_unfinished(data_dir, name, whole.token_ids[:count], "One", **whole.turn.settings)
        with open_chat() as engine:
            chat = engine.session(name)
            assert chat.interrupted
            assert list(chat.turns[-1].token_ids) == whole.token_ids[:count]
            longer = chat.continue_()
            assert (longer.token_ids, longer.text) == (whole.token_ids, whole.text)
            assert (longer.finish_reason, chat.interrupted) == ("length", False)
            assert chat.token_ids == by_hand(chat)


def test_a_kill_in_a_continued_reply_loses_neither_part(open_chat, folder, data_dir):
    """The old part stays, and the new part follows it."""
    with open_chat() as engine:
        first = engine.session("trip").send("Tell me", **{**LONG, "max_new_tokens": 5})
    leave_unfinished(data_dir, "trip", [7, 8, 9])
    with open_chat() as engine:
        chat = engine.session("trip")
        [_, reply] = chat.turns
        assert list(reply.token_ids) == [*first.token_ids, 7, 8, 9]
        assert reply.finish_reason == "interrupted"
        assert chat.token_ids == by_hand(chat)


def leave_unfinished(data_dir, name, tokens, text=None, metadata=(), **settings):
    """Leaves a session as a process that died in a reply: a continued one, or one to `text`."""
    store = SqliteStore(data_dir)
    record = store.find("local", name)
    settings = {"temperature": 0.0, "seed": 1, "attempt": 0, **settings}
    if text is None:
        reply = record.tree.get(record.leaf)
        start = TurnStart(reply.id, reply.length, reply.id, settings, extends=reply.id)
    else:
        prefix_length = record.tree.get(record.leaf).length if record.leaf else 0
        conversation = Conversation(make_tokenizer(), begun=prefix_length > 0)
        conversation.user(text)
        ids = tuple(conversation.ids)
        message = {"role": "user", "content": text}
        length = prefix_length + len(ids)
        user = Turn(100, record.leaf, "user", text, message, ids, prefix_length, length)
        start = TurnStart(record.leaf, prefix_length, 101, settings, user=user)
    lease = store.begin(record, replace(start, metadata=dict(metadata)))
    if tokens:
        store.journal([(lease, tokens)])
    store.close()


def test_a_recovered_reply_has_its_metadata(open_chat, data_dir):
    with open_chat() as engine:
        chat = engine.session("trip")
        chat.start_send("One", metadata={"asked": 1}, **GREEDY).wait()
        chat.annotate(chat.turns[-1].id, {"rated": 5})
    leave_unfinished(data_dir, "trip", [40, 41], metadata={"key": [1]}, ignore_eos=True)
    with open_chat() as engine:
        chat = engine.session("trip")
        assert chat.turns[-1].finish_reason == "interrupted"
        assert dict(chat.turns[-1].metadata) == {"rated": 5, "key": [1]}
        chat.start_continue(metadata={"key": 2}, max_new_tokens=2).wait()
        chat.start_retry(metadata={"again": 1}, **GREEDY).wait()
        assert dict(chat.turns[-1].metadata) == {"again": 1}
        chat.start_edit(0, "Two", metadata={"edited": 1}, **GREEDY).wait()
    with open_chat() as engine:
        replies = engine.session("trip").replies
        assert [dict(reply.metadata) for reply in replies] == [
            {"rated": 5, "key": 2},
            {"again": 1},
            {"edited": 1},
        ]


def test_a_recovered_reply_stays_journalled_until_it_is_stored(open_chat, data_dir):
    """The reply is in the session and stays in the journal until the store works again."""
    with open_chat() as engine:
        engine.session("trip").send("One", **GREEDY)
    leave_unfinished(data_dir, "trip", [40, 41, 42], "Two", ignore_eos=True)
    for heal in (False, True):
        store = FaultyStore(SqliteStore(data_dir))
        store.fail("finish")
        with open_chat(store=store) as engine:
            chat = engine.session("trip")
            assert chat.turns[-1].token_ids == (40, 41, 42)
            assert chat.interrupted
            store.fail("change", 1, 10)
            with pytest.raises(lmchat.StoreError):
                chat.send("Three", **GREEDY)
            assert len(chat.turns) == 4
            if heal:
                store.heal()
                chat.send("Three", **GREEDY)
        store.close()
    with open_chat() as engine:
        chat = engine.session("trip")
        assert [t.text for t in chat.turns if t.role == "user"] == ["One", "Two", "Three"]
        assert chat.token_ids == by_hand(chat)
        assert len(chat.branches(1)) == 1


def test_a_death_before_the_first_token_leaves_the_question(open_chat, data_dir):
    with open_chat() as engine:
        engine.session("trip").send("One", **GREEDY)
    leave_unfinished(data_dir, "trip", [], "And two?")
    with open_chat() as engine:
        chat = engine.session("trip")
        assert chat.unanswered == "And two?"
        assert not chat.interrupted
        assert [t.text for t in chat.turns if t.role == "user"] == ["One"]
    with open_chat() as engine:  # the next process reports the same
        chat = engine.session("trip")
        assert chat.unanswered == "And two?"
        assert chat.fork("other").unanswered is None
        chat.set_title("A trip")
        with pytest.raises(lmchat.ContextFull):
            chat.send("And two?", max_new_tokens=1 << 30)
        assert chat.unanswered == "And two?"
    with open_chat() as engine:
        chat = engine.session("trip")
        chat.send(chat.unanswered, **GREEDY)
        assert chat.unanswered is None
        assert chat.token_ids == by_hand(chat)
    with open_chat() as engine:
        assert engine.session("trip").unanswered is None


def test_an_unanswered_question_survives_until_it_is_stored(open_chat, data_dir):
    with open_chat() as engine:
        engine.session("trip").send("One", **GREEDY)
    leave_unfinished(data_dir, "trip", [], "And two?")
    for heal in (False, True):
        store = FaultyStore(SqliteStore(data_dir))
        store.fail("finish")
        with open_chat(store=store) as engine:
            assert engine.session("trip").unanswered == "And two?"
            store.fail("change", 1, 10)
            if heal:
                store.heal()
        store.close()
    with open_chat() as engine:
        assert engine.session("trip").unanswered == "And two?"


# --- a damaged journal ---------------------------------------------------------------------------


def edit(data_dir, statement, *values):
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute(statement, values)
        connection.commit()


def leave_in_pieces(data_dir, name, tokens, text, **settings):
    """Does what `leave_unfinished()` does, with a journal entry for each token."""
    leave_unfinished(data_dir, name, [], text, **settings)
    store = SqliteStore(data_dir)
    lease = store.recover(store.find("local", name))
    for token in tokens:
        store.journal([(lease, [token])])
    store.close()


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        ("DELETE FROM journal_tokens WHERE number = 7", 7),
        ("UPDATE journal_tokens SET token_ids = X'00' WHERE number = 7", 7),
        ("UPDATE journal_tokens SET number = 99 WHERE number = 20", 20),
        (
            "UPDATE journal_tokens SET token_ids = "
            "(SELECT token_ids FROM journal_tokens WHERE number = 3) WHERE number = 5",
            5,
        ),
        ("DELETE FROM journal_tokens WHERE number = 0", 0),
        ("UPDATE journal_starts SET start = X'0102030405'", None),
        ("DELETE FROM journal_starts", None),
    ],
)
def test_a_damaged_journal_gives_its_readable_part_and_a_report(
    open_chat, data_dir, statement, left
):
    """The readable part is used, the rest is reported, and the session continues correctly."""
    settings = {**SEEDED, "max_new_tokens": 40}
    with open_chat(store="memory") as engine:
        chat = engine.session()
        first = chat.send("One", **GREEDY)
        whole = chat.send("Two", **settings)
    with open_chat() as engine:
        assert engine.session("trip").send("One", **GREEDY).token_ids == first.token_ids
        engine.session("beside").send("One", **GREEDY)
    leave_in_pieces(data_dir, "trip", whole.token_ids[:21], "Two", **whole.turn.settings)
    edit(data_dir, statement)
    for _ in range(2):  # the report stays until the next turn
        with open_chat() as engine:
            chat = engine.session("trip")
            [notice] = chat.notices
            asked = [t.text for t in chat.turns if t.role == "user"]
            assert asked == (["One", "Two"] if left else ["One"])
            assert chat.unanswered == ("Two" if left == 0 else None)
            assert ("dropped" in notice) == (not left)
    with open_chat() as engine:
        chat = engine.session("trip")
        if left:
            assert f"after its first {left} tokens" in notice
            assert list(chat.turns[-1].token_ids) == whole.token_ids[:left]
            reply = chat.continue_()
            assert reply.token_ids == whole.token_ids
        else:
            reply = chat.send("Two", **settings)
            assert reply.token_ids == whole.token_ids
        assert (reply.notices, chat.notices) == ((notice,), ())
        assert chat.token_ids == by_hand(chat)
        assert chat.send("Three", **GREEDY).notices == ()
        assert engine.session("beside").notices == ()


def test_a_reply_that_was_complete_survives_journal_damage(open_chat, data_dir):
    with open_chat() as engine:
        engine.session("trip")
    leave_in_pieces(data_dir, "trip", [40, 41, 2, 9, 9], "One")
    edit(data_dir, "DELETE FROM journal_tokens WHERE number = 3")
    leave = {"ignore_eos": True}
    with open_chat() as engine:
        chat = engine.session("trip")
        assert (chat.turns[-1].finish_reason, chat.notices) == ("stop", ())
        engine.session("other")
    leave_in_pieces(data_dir, "other", [40, 41], "One", **leave)
    edit(data_dir, "UPDATE journal_starts SET start = X''")
    store = FaultyStore(SqliteStore(data_dir))
    store.fail("finish")
    with open_chat(store=store) as engine:  # which cannot store it yet
        assert "dropped" in engine.session("other").notices[0]
    store.close()
    with open_chat() as engine:
        chat = engine.session("other")
        assert chat.turns == ()
        assert "dropped" in chat.send("One", **GREEDY).notices[0]


@pytest.mark.parametrize(
    ("settings", "reason", "stopped"),
    [
        ({}, "stop", True),
        ({"ignore_eos": True}, "interrupted", False),
        ({"ignore_eos": True, "stop_token_ids": [2]}, "stop", True),
        ({"eos_token_ids": [9]}, "interrupted", False),
        ({"ignore_eos": True, "max_new_tokens": 3}, "length", False),
    ],
)
def test_a_death_after_the_last_token_leaves_the_reply(
    open_chat, data_dir, settings, reason, stopped
):
    """A complete reply is not taken for an interrupted one."""
    with open_chat() as engine:
        engine.session("trip")
    leave_unfinished(data_dir, "trip", [40, 41, 2], "One", **settings)
    with open_chat() as engine:
        reply = engine.session("trip").turns[-1]
        assert (reply.finish_reason, reply.stopped) == (reason, stopped)
        assert reply.token_ids == (40, 41, 2)


def test_a_stop_string_cuts_a_recovered_reply_where_it_cut_the_live_one(open_chat, data_dir):
    with open_chat(store="memory") as engine:
        whole = engine.session().send("One", **{**LONG, "max_new_tokens": 60})
        stop = whole.text[20:23]
        cut = engine.session().send("One", **{**LONG, "stop_strings": [stop]})
        engine_tokens = whole.token_ids
    assert cut.finish_reason == "stop"
    with open_chat() as engine:
        engine.session("trip")
    leave_unfinished(data_dir, "trip", engine_tokens, "One", stop_strings=[stop])
    with open_chat() as engine:
        reply = engine.session("trip").turns[-1]
        assert (reply.text, list(reply.token_ids)) == (cut.text, cut.token_ids)
        assert reply.finish_reason == "stop"


def test_a_stored_turn_is_not_recovered_again_from_its_journal(open_chat, data_dir):
    with open_chat() as engine:
        chat = engine.session("trip")
        chat.send("One", **GREEDY)
        turns = chat.turns
    store = SqliteStore(data_dir)
    record = store.find("local", "trip")
    user, reply = (record.tree.get(turn.id) for turn in turns)
    start = TurnStart(None, 0, reply.id, reply.settings, user=user)
    store.journal([(store.begin(record, start), reply.token_ids)])
    store.close()
    with open_chat() as engine:
        chat = engine.session("trip")
        assert chat.turns == turns
        assert chat.unanswered is None
        assert len(chat.branches(0)) == 1


# --- two processes on one store ------------------------------------------------------------------


def test_a_session_is_busy_while_another_process_writes_it(open_chat, folder, data_dir):
    with open_chat() as engine:
        engine.session("trip").send("Zero", **GREEDY)
    child = Child(folder, data_dir, {**LONG, "max_new_tokens": 3900}, -1, "One", "Tell me")
    _, first = child.read(2)
    engine = open_chat()
    chat = engine.session("trip")
    assert [t.text for t in chat.turns if t.role == "user"] == ["Zero", "One"]
    for verb in (
        lambda: chat.send("Two", **GREEDY),
        chat.undo,
        lambda: chat.set_system("x"),
        chat.delete,
    ):
        with pytest.raises(lmchat.SessionBusy, match=f"process {child.process.pid}"):
            verb()
    assert (chat.state, chat.system) == (State.IDLE, None)
    [info] = engine.sessions()
    assert f"process {child.process.pid}" in info.busy
    shown = "".join([first, *child.kill()])
    # The dead process's lease ended with it, so the next verb recovers what it left.
    reply = chat.continue_(max_new_tokens=4)
    assert reply.text.startswith(shown)
    assert chat.token_ids == by_hand(chat)


def test_two_engines_see_each_others_turns(open_chat, data_dir):
    one, two = open_chat(), open_chat()
    chats = [one.session("trip", settings=GREEDY), two.session("trip")]
    for number in range(6):
        chat = chats[number % 2]
        patiently(lambda chat=chat, number=number: chat.send(f"Turn {number}"))
    chats[0].refresh()
    same(*chats)
    assert chats[0].token_ids == by_hand(chats[0])
    assert len([t for t in chats[0].turns if t.role == "user"]) == 6
    patiently(lambda: chats[0].retry())
    patiently(lambda: chats[1].edit(1, "Other"))
    assert patiently(chats[0].undo) == "Other"
    patiently(lambda: chats[1].set_system("Be brief."))
    patiently(lambda: chats[0].set(max_new_tokens=3))
    patiently(lambda: chats[1].set(top_k=5))
    chats[0].rename("journey")
    patiently(lambda: chats[1].send("Last"))
    assert chats[1].name == "journey"
    chats[0].refresh()
    same(*chats)
    assert chats[0].settings["top_k"] == 5
    assert two.session("journey") is chats[1]
    patiently(chats[1].delete)
    for verb in (chats[0].undo, lambda: chats[0].send("x")):
        with pytest.raises(lmchat.NotFound, match="no session 'journey'"):
            verb()
    assert one.session("journey").turns == ()


def patiently(verb):
    """Retries: the lease of a turn is released a moment after the turn."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return verb()
        except lmchat.SessionBusy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
