"""`Session.follow()`: any number of readers of a reply, of this process or of another one."""

import asyncio
import contextlib
import gc
import random
import threading
import weakref

import pytest

import lmchat
from lmchat.aio.stream import AsyncFollower
from lmchat.generation.state import State
from lmchat.store.sqlite.sqlite_store import SqliteStore

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
ENDLESS = {**LONG, "max_new_tokens": 1900}


@contextlib.contextmanager
def opened(store, **options):
    with lmchat.ChatEngine("memo", store=store, threads=1, **options) as engine:
        yield engine


@pytest.fixture(name="engine")
def made_engine(store_kind):
    with opened(store_kind) as engine:
        yield engine


@pytest.fixture(name="other")
def made_other(data_dir):
    """An engine with a store of its own in the same data directory: to the store, a process."""
    with opened(SqliteStore(data_dir)) as engine:
        yield engine


def joined(parts):
    texts = {"text": "", "reasoning": ""}
    for part in parts:
        if isinstance(part, lmchat.Delta):
            texts[part.kind] += part.text
    return texts["text"], [
        i for part in parts if isinstance(part, lmchat.Delta) for i in part.token_ids
    ]


def check(follower):
    """Reads the rest of a reply; its parts are the reply."""
    parts = list(follower.events())
    reply = follower.result()
    assert joined(parts) == (reply.text, reply.token_ids)
    return reply


def test_a_follower_has_the_question_of_a_running_reply(data_dir):
    """Also of one that another process generates, which no session has before its end."""
    with opened(SqliteStore(data_dir)) as engine, opened(SqliteStore(data_dir)) as other:
        chat = engine.session("a", system="Be brief.")
        chat.send("first", **GREEDY)
        elsewhere = other.session_by_name("a")
        for start, texts in (
            (lambda: chat.start_send("second", **ENDLESS), ["first", "second"]),
            (lambda: chat.start_edit(0, "instead", **ENDLESS), ["instead"]),
            (lambda: chat.start_retry(**ENDLESS), ["instead"]),
        ):
            generation = start()
            for session in (chat, elsewhere):
                with session.follow() as follower:
                    next(iter(follower))
                    turns = follower.preceding
                    assert [turn.text for turn in turns if turn.role == "user"] == texts
                    assert turns[0].text == "Be brief."
            with chat.follow() as follower:
                chat.stop()
                assert follower.preceding == ()
            assert generation.done


def test_every_reader_of_a_running_reply_gets_all_of_it(engine):
    chat = engine.session()
    with pytest.raises(lmchat.NotFound, match="has no reply to follow"):
        chat.follow()
    generation = chat.start_send("Tell me", **LONG)
    readers = [chat.follow(), generation.follow(), chat.follow()]
    next(readers[0].events())
    readers[2].close()
    replies = [check(chat.follow()), check(generation.follow())]
    assert "".join(readers[1]) == replies[0].text
    assert len(replies[0].token_ids) == 400  # the closed reader stopped nothing
    assert {id(reply) for reply in replies} == {id(generation.result())}
    last = check(chat.follow())  # nothing runs: the last reply
    assert (last.turn, last.text, last.token_ids) == (
        chat.turns[-1], replies[0].text, replies[0].token_ids
    )  # fmt: skip
    chat.undo()
    with pytest.raises(lmchat.NotFound, match="has no reply to follow"):
        chat.follow()
    chat.close()
    with pytest.raises(lmchat.NotFound, match="closed"):
        chat.follow()


def test_a_continued_reply_is_followed_from_its_start(engine):
    chat = engine.session()
    first = chat.send("Tell me", **GREEDY)
    stream = chat.stream_continue(**LONG)
    follower = chat.follow()
    shown = "".join(stream)
    reply = check(follower)
    assert reply.text == first.text + shown
    assert reply.token_ids == [*first.token_ids, *reply.token_ids[8:]]
    assert check(chat.follow()).token_ids == reply.token_ids


def test_a_follower_keeps_no_generation_alive(engine):
    chat = engine.session()
    generation = chat.start_send("Tell me", **GREEDY)
    follower = generation.follow()
    generation.wait()
    engine._runtime.reader.call(lambda: None)
    gone = weakref.ref(generation)
    del generation
    gc.collect()
    assert gone() is None
    assert len(follower.result().token_ids) == 8


def test_readers_that_come_and_go_500_times_leave_nothing(engine):
    """Two readers of one reply, cut and reattached, end with equal texts."""
    chat = engine.session()
    generation = chat.start_send("Tell me", **ENDLESS)
    log, texts = generation.log, []

    def read():
        rng = random.Random(4)
        for _ in range(500):
            with chat.follow() as follower:
                for _ in range(rng.randrange(3)):
                    next(follower, None)
        texts.append("".join(chat.follow()))

    async def read_async():
        rng = random.Random(5)
        for _ in range(500):
            follower = AsyncFollower(generation.follow())
            for _ in range(rng.randrange(3)):
                await anext(follower, None)
            if rng.random() < 0.5:
                follower.close()
        texts.append("".join([text async for text in AsyncFollower(generation.follow())]))

    thread = threading.Thread(target=read)
    thread.start()
    asyncio.run(read_async())
    thread.join()
    gc.collect()
    assert texts == [chat.turns[-1].text] * 2
    assert not log._listeners


# --- of another process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"stop_strings": ["never said"]}, {"stop_strings": ["e"]}]
)
def test_the_reply_of_another_process(other, settings, data_dir):
    with opened(SqliteStore(data_dir)) as writer:
        theirs = writer.session("trip")
        ours = other.session("trip")
        for verb in ("send", "retry", "continue"):
            stream = {
                "send": lambda: theirs.stream("Tell me", **LONG, **settings),
                "retry": lambda: theirs.stream_retry(temperature=1.0, **settings),
                "continue": lambda: theirs.stream_continue(max_new_tokens=200),
            }[verb]()
            next(stream.events())
            readers = [ours.follow(), ours.follow()]
            assert ours.state is State.IDLE
            replies = [check(reader) for reader in readers]
            reply = stream.result()
            assert [r.token_ids for r in replies] == [reply.token_ids] * 2
            assert (replies[0].turn, replies[0].text) == (theirs.turns[-1], reply.text)
            assert ours.token_ids == theirs.token_ids
        assert not [t for t in threading.enumerate() if t.name == "lmchat-follow"]


def test_readers_of_another_process_share_a_thread_and_end_it(other, data_dir):
    with opened(SqliteStore(data_dir)) as writer:
        theirs, ours = writer.session("trip"), other.session("trip")
        stream = theirs.stream("Tell me", **ENDLESS)
        next(stream.events())
        readers = [ours.follow() for _ in range(20)]
        assert following() == 1
        for reader in readers[:10]:
            reader.close()
        del reader, readers
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "lmchat-follow":
                thread.join(20)
        assert following() == 0
        again = ours.follow()
        assert next(again)
        stream.close()
        assert check_rest(again).finish_reason == stream.reply.finish_reason
        late = theirs.stream("More", **GREEDY)
        last = ours.follow()
        late.result()
        assert last.result().turn == theirs.turns[-1] or last.result().turn == theirs.turns[-3]


def following():
    return sum(thread.name == "lmchat-follow" for thread in threading.enumerate())


def check_rest(follower):
    list(follower.events())
    return follower.result()


def test_closing_the_session_ends_the_followers_of_another_process(other, data_dir):
    with opened(SqliteStore(data_dir)) as writer:
        stream = writer.session("trip").stream("Tell me", **ENDLESS)
        next(stream.events())
        ours = other.session("trip")
        follower = ours.follow()
        ours.close()
        assert following() == 0
        with pytest.raises(lmchat.NotFound, match="is closed"):
            follower.result()
        again = other.session("trip").follow()
        stream.close()
        writer.delete("trip")
        with contextlib.suppress(lmchat.NotFound):  # its end came first, or its deletion
            assert again.result().finish_reason == "cancelled"


def test_the_reply_of_another_process_for_asyncio(other, data_dir):
    async def read(session):
        async with await session.follow() as follower:
            return "".join([text async for text in follower]), await follower.result()

    async def run(ours, stream):
        found = await asyncio.gather(*(read(ours) for _ in range(3)))
        reply = stream.result()
        assert [text for text, _ in found] == [reply.text] * 3
        assert found[0][1].turn.token_ids == tuple(reply.token_ids)

    with opened(SqliteStore(data_dir)) as writer:
        stream = writer.session("trip").stream("Tell me", **LONG)
        next(stream.events())
        asyncio.run(run(lmchat.AsyncSession(other.session("trip")), stream))


def test_another_process_stops_before_the_first_token(other, data_dir):
    """The reply that was followed is empty, and has no turn."""
    with opened(SqliteStore(data_dir), max_batch_size=1) as writer:
        blocker = writer.stream("x", **ENDLESS)
        next(blocker)
        theirs, ours = writer.session("trip"), other.session("trip")
        waiting = theirs.start_send("Two", **GREEDY)
        follower = ours.follow()
        waiting.cancel()
        reply = follower.result()
        assert (reply.finish_reason, reply.text, reply.turn) == ("cancelled", "", None)
        assert (ours.unanswered, ours.turns) == ("Two", ())
        blocker.close()
