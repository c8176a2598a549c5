"""A store that fails, at every call: nothing is lost, and the session continues."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation
from stores import FaultyStore

import lmchat
from lmchat.generation.state import State
from lmchat.store import syncer
from lmchat.store.memory_store import MemoryStore
from lmchat.store.protocol import Stale
from lmchat.store.sqlite.sqlite_store import SqliteStore

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "logit_bias": NO_END}
LONG = {"temperature": 0.0, "max_new_tokens": 3000, "logit_bias": NO_END}
OPTIONS = {"threads": 1, "cache_memory": "32MiB", "persist_pages": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["memory", "disk"])
def store(request, data_dir):
    store = FaultyStore(MemoryStore() if request.param == "memory" else SqliteStore(data_dir))
    yield store
    store.close()


@pytest.fixture
def engine(folder, device, store):
    with lmchat.ChatEngine(folder, device=device, store=store, **OPTIONS) as engine:
        yield engine


def users(chat):
    return [turn.text for turn in chat.turns if turn.role == "user"]


def check(engine, chat, store):
    """The session answers, its transcript is its turns', and the store has them all."""
    store.heal()
    assert chat.state is State.IDLE
    chat.send("Next", **GREEDY)
    conversation = Conversation(make_tokenizer())
    system = chat.system
    for turn in chat.turns:
        if turn.role == "user":
            conversation.user(turn.text, system)
        elif turn.role == "assistant":
            conversation.reply(list(turn.token_ids))
    assert chat.token_ids == conversation.ids
    stored = store.find(chat.owner, chat.name)
    assert stored.tree.token_ids(stored.leaf) == chat.token_ids
    assert {t.id: t.text for t in stored.tree} == {t.id: t.text for t in chat._record.tree}
    assert (stored.settings, stored.title, stored.tags) == (chat.settings, chat.title, chat.tags)


def state_of(chat):
    record = chat._record
    fields = {k: v for k, v in vars(record).items() if k not in ("tree", "revision")}
    return fields, {turn.id: turn for turn in record.tree}, chat.name


def attempt(verb, chat):
    """Returns the result of the call and its StoreError."""
    try:
        return verb(chat), None
    except lmchat.StoreError as error:
        return None, error


VERBS = {
    "send": lambda chat: chat.send("Two", **GREEDY),
    "continue": lambda chat: chat.continue_(**GREEDY),
    "retry": lambda chat: chat.retry(**GREEDY),
    "edit": lambda chat: chat.edit(0, "Uno", **GREEDY),
    "undo": lambda chat: chat.undo(),
    "switch": lambda chat: chat.switch(0, 0),
    "set_system": lambda chat: chat.set_system("Be brief."),
    "set": lambda chat: chat.set(top_k=3),
    "title": lambda chat: chat.set_title("A title"),
    "tags": lambda chat: chat.set_tags(["a"]),
    "pin": lambda chat: chat.pin(),
    "rename": lambda chat: chat.rename("renamed"),
    "fork": lambda chat: chat.fork("forked"),
    "delete": lambda chat: chat.delete(),
}
GENERATING = ("send", "continue", "retry", "edit")


@pytest.mark.parametrize("name", VERBS)
def test_every_call_of_a_verb(engine, store, name):
    """A fault before a reply leaves the session as it was. A fault in it or after it leaves the
    reply, with the error."""
    verb = VERBS[name]
    seen = 0
    for method in ("refresh", "unfinished", "begin", "journal", "finish", "change", "add", "rename",
                   "remove", "sync", "release"):  # fmt: skip
        for at in itertools.count(1):
            chat = engine.session(f"{name} {method} {at}")
            chat.send("One", **GREEDY)
            before = state_of(chat)
            store.fail(method, at)
            reply, error = attempt(verb, chat)
            if error is not None:
                assert "as the test asked" in str(error)
                assert state_of(chat) == before
            called = store.calls[method]
            store.heal()
            for other in ("forked", "renamed"):
                if name in ("fork", "rename") and any(i.name == other for i in engine.sessions()):
                    engine.delete(other)
            if called < at:
                break
            seen += 1
            if reply is not None and method in ("finish", "journal"):
                assert (reply.finish_reason, chat.turns[-1].finish_reason) == ("error", "error")
                assert isinstance(reply.error, lmchat.StoreError)
            if chat.state is not State.CLOSED:
                check(engine, chat, store)
                chat.delete()
    assert seen >= (4 if name in GENERATING else 1)


def test_a_reply_that_could_not_be_kept_says_what_it_used(engine, store):
    chat = engine.session("trip")
    chat.send("One", **GREEDY)
    cached = chat.length - 1  # the last token was sampled and not computed
    store.fail("journal", 3)
    reply = chat.send("Two", **LONG)
    assert isinstance(reply.error, lmchat.StoreError)
    prompt = chat.length - len(reply.token_ids)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (prompt, cached)
    assert usage.completion_tokens == len(reply.token_ids)
    assert chat.turns[-1].usage == usage


def test_a_journal_that_fails_ends_that_reply_and_no_other(engine, store):
    chats = [engine.session(f"chat {n}") for n in range(3)]
    journal, calls = store.store.journal, []

    def failing(tokens):
        tokens = list(tokens)
        calls.extend(lease for lease, _ in tokens if lease.session == chats[1]._record.id)
        if len(calls) > 1 and any(lease in calls for lease, _ in tokens):
            raise lmchat.StoreError("the disk is full")
        return journal(tokens)

    store.store.journal = failing
    streams = [chat.stream(f"Tell {n}", **LONG) for n, chat in enumerate(chats)]
    shown = [[] for _ in streams]
    try:
        for text, stream in zip(shown, streams, strict=True):
            text += stream
    finally:
        store.store.journal = journal
    reply = streams[1].reply
    assert (reply.finish_reason, str(reply.error)) == ("error", "the disk is full")
    assert reply.text == "".join(shown[1])
    assert 0 < len(reply.token_ids) < 3000
    longer = chats[1].continue_(max_new_tokens=5)
    whole = engine.session().send("Tell 1", **{**LONG, "max_new_tokens": len(longer.token_ids)})
    assert longer.token_ids == whole.token_ids
    for chat in chats:
        check(engine, chat, store)


def test_a_store_that_fails_for_long(engine, store):
    """A turn that cannot be persisted stays in memory until the store works again."""
    chat = engine.session("trip")
    chat.send("One", **GREEDY)
    store.fail("finish")
    assert chat.send("Two", **GREEDY).finish_reason == "error"
    ids = chat.token_ids
    store.fail("change", 1, 20)
    assert engine.session("trip").token_ids == ids  # reading needs not write
    assert engine.session_by_id(chat.id).turns[-1].text == chat.turns[-1].text
    for verb in (lambda: chat.send("Three", **GREEDY), chat.undo, lambda: chat.set(top_k=2)):
        with pytest.raises(lmchat.StoreError):
            verb()
        assert chat.token_ids == ids
    assert users(chat) == ["One", "Two"]
    check(engine, chat, store)


def test_what_was_not_kept_is_kept_at_the_close(engine, store):
    chat = engine.session("trip")
    store.fail("finish")
    assert chat.send("One", **GREEDY).finish_reason == "error"
    ids = chat.token_ids
    store.heal()
    chat.close()
    stored = store.find("local", "trip")
    assert stored.tree.token_ids(stored.leaf) == ids


def test_a_sync_that_fails_ends_the_replies(engine, store, monkeypatch):
    monkeypatch.setattr(syncer, "SYNC_TOKENS", 8)
    chat = engine.session("trip")
    store.fail("sync")
    reply = chat.send("One", **{**LONG, "max_new_tokens": 3000})
    assert reply.finish_reason == "error"
    assert "sync fails" in str(reply.error)
    check(engine, chat, store)


def test_journals_are_synced_after_some_tokens_and_some_time(engine, store, monkeypatch):
    """And never by the reader."""
    threads, synced = [], threading.Event()
    sync = store.store.sync

    def watched():
        threads.append(threading.current_thread().name)
        synced.set()
        return sync()

    store.store.sync = watched
    monkeypatch.setattr(syncer, "SYNC_SECONDS", 1000.0)
    chat = engine.session("trip")
    chat.send("One", **{**LONG, "max_new_tokens": 300})
    assert synced.wait(10)
    chat.send("One", **GREEDY)  # the counts of the last turn do not matter
    monkeypatch.setattr(syncer, "SYNC_SECONDS", 0.01)
    engine._runtime.durability._sync()
    synced.clear()
    chat.send("Two", **GREEDY)
    assert synced.wait(10)
    store.store.sync = sync
    assert "lmchat-reader" not in threads


def test_all_that_comes_together_is_one_transaction(engine, store):
    chats = [engine.session(f"chat {n}") for n in range(8)]
    batches = []
    journal = store.store.journal

    def watched(tokens):
        tokens = list(tokens)
        batches.append([(lease.session, list(ids)) for lease, ids in tokens])
        for chat in chats:  # before a caller sees them
            running = chat.running
            new = [ids for lease, ids in batches[-1] if lease == chat._record.id]
            if running is not None and new:
                shown = journalled(batches[:-1], chat)
                assert [i for choice in running._choices for i in choice.token_ids] == shown
        return journal(tokens)

    store.store.journal = watched
    streams = [chat.stream("Tell me", **{**LONG, "max_new_tokens": 2000}) for chat in chats]
    deadline = time.monotonic() + 60
    while max(map(len, batches), default=0) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    for stream in streams:
        stream.close()
    store.store.journal = journal
    assert max(map(len, batches)) > 1
    for chat in chats:
        stored = [i for turn in chat.turns[1:] for i in turn.token_ids]  # no turn without a token
        assert journalled(batches, chat) == stored


def journalled(batches, chat):
    return [i for batch in batches for session, ids in batch if session == chat._record.id
            for i in ids]  # fmt: skip


def test_a_lease_that_was_taken_over(engine, store):
    """A process that takes this one for dead takes a lease over while several turns journal."""
    chats = [engine.session(f"chat {n}") for n in range(2)]
    journal, lost = store.store.journal, chats[0]._record.id

    def stale(tokens):
        tokens = list(tokens)
        stops = journal([(lease, ids) for lease, ids in tokens if lease.session != lost])
        if any(lease.session == lost for lease, _ in tokens):
            raise Stale("taken over")
        return stops

    store.store.journal = stale
    streams = [chat.stream("Tell me", **{**LONG, "max_new_tokens": 50}) for chat in chats]
    with pytest.raises(lmchat.StoreError, match="taken the session over"):
        streams[0].result()  # nothing of it was ever shown
    streams[1].result()
    store.store.journal = journal
    assert chats[0].turns == ()
    assert streams[1].reply.finish_reason == "length"
    for chat in chats:
        check(engine, chat, store)
