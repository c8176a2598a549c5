"""`Session.stop()` of a reply that another process generates."""

import asyncio
import contextlib

import pytest

import lmchat
from lmchat.store import syncer
from lmchat.store.sqlite.sqlite_store import SqliteStore

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_new_tokens": 1900}


@contextlib.contextmanager
def opened(data_dir, **options):
    """Yields an engine with a store of its own: to the store, a process."""
    store = SqliteStore(data_dir)
    with lmchat.ChatEngine("memo", store=store, threads=1, **options) as engine:
        yield engine


@pytest.fixture(name="writer")
def made_writer(data_dir):
    with opened(data_dir, max_batch_size=1) as engine:
        yield engine


@pytest.fixture(name="other")
def made_other(data_dir):
    with opened(data_dir) as engine:
        yield engine


def test_a_running_reply_stops_with_all_that_was_shown(writer, other):
    theirs = writer.session("trip")
    stream = theirs.stream("Tell me", **ENDLESS)
    shown = next(stream)
    ours = other.session("trip")
    reply = ours.stop()
    assert reply.finish_reason == "cancelled"
    assert reply.turn == ours.turns[-1]
    rest = "".join(stream)
    assert stream.result().token_ids == reply.token_ids
    assert reply.text == shown + rest
    assert 0 < len(reply.token_ids) < 1900
    assert ours.stop() is None
    # The request has stopped one turn, not those after it.
    assert len(theirs.continue_(**GREEDY).token_ids) == len(reply.token_ids) + 8
    assert len(ours.send("More", **GREEDY).token_ids) == 8


def test_without_new_tokens_the_request_is_found_too(writer, other):
    """By a look from time to time."""
    blocker = writer.stream("x", **ENDLESS)
    next(blocker)
    waiting = writer.session("trip").start_send("Two", **GREEDY)
    ours = other.session("trip")
    reply = ours.stop()
    assert (reply.finish_reason, reply.text, reply.turn) == ("cancelled", "", None)
    assert waiting.result().finish_reason == "cancelled"
    assert (ours.unanswered, ours.turns) == ("Two", ())
    blocker.close()


def test_tokens_bring_the_request(writer, other, monkeypatch):
    monkeypatch.setattr(syncer, "STOP_SECONDS", 1e6)
    stream = writer.session("trip").stream("Tell me", **ENDLESS)
    next(stream)
    assert other.session("trip").stop().finish_reason == "cancelled"


def test_only_the_named_reply_is_stopped(writer, other):
    generation = writer.session("trip").start_send("Tell me", **ENDLESS)
    ours = other.session("trip")
    assert ours.stop(generation.turn_id + 1) is None
    assert not generation.cancelled
    reply = ours.stop(generation.turn_id)
    assert reply.turn.id == generation.turn_id
    assert ours.stop(generation.turn_id) is None


def test_a_question_that_is_not_kept_is_no_failure(writer, other):
    blocker = writer.stream("x", **ENDLESS)
    next(blocker)
    waiting = writer.session("trip").start_send("Two", keep_question=False, **GREEDY)
    ours = other.session("trip")
    assert ours.stop().finish_reason == "cancelled"
    assert waiting.result().finish_reason == "cancelled"
    assert not ours.unanswered
    blocker.close()


def test_for_asyncio(writer, other):
    generation = writer.session("trip").start_send("Tell me", **ENDLESS)
    reply = asyncio.run(lmchat.AsyncSession(other.session("trip")).stop())
    assert reply.finish_reason == "cancelled"
    assert generation.done


def test_a_closed_or_deleted_session_has_nothing_to_stop(writer, other):
    writer.session("trip").send("Tell me", **GREEDY)
    ours, deleted = other.session("trip"), other.session("gone")
    deleted.append([{"role": "user", "content": "Hi"}])  # without a lease
    writer.delete("gone")
    assert deleted.stop() is None
    ours.close()
    assert ours.stop() is None
