"""The log of a reply's parts: each reader gets all of them, whenever it comes and goes."""

import asyncio
import gc
import random
import threading
import time
import weakref

import pytest

from lmchat.aio.stream import AsyncFollower
from lmchat.errors import InternalError, InvalidRequest
from lmchat.generation.parts import MERGE, Cursor, Delta, PartsLog, Progress, merged
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.store.turns import Timings, Usage
from turbomind import TokenLogprobs


def some_parts(rng, count, choices=1):
    """Returns reports of progress and then deltas, some of them without text."""
    parts = [Progress(done, 40) for done in range(10, 50, 10)]
    for number in range(count):
        kind = "reasoning" if rng.random() < 0.2 else "text"
        text = rng.choice(["", "a", "bc ", "é"])
        ids = tuple(range(number, number + rng.randint(0, 2)))
        logprobs = tuple(TokenLogprobs(-float(token)) for token in ids)
        parts.append(Delta(kind, text, ids, logprobs, rng.randrange(choices), float(number)))
    return parts


def sums(parts):
    """Returns what the deltas of each choice are, joined."""
    found = {}
    for part in parts:
        if isinstance(part, Delta):
            texts = found.setdefault(part.choice, {"text": "", "reasoning": "", "ids": [], "l": []})
            texts[part.kind] += part.text
            texts["ids"] += part.token_ids
            texts["l"] += part.logprobs
    return found


def reply(text=""):
    return Reply(text, "", [], "stop", Usage(), Timings())


@pytest.mark.parametrize("seed", range(20))
def test_readers_that_come_at_any_time_get_equal_parts(seed):
    rng = random.Random(seed)
    log, parts = PartsLog(), some_parts(rng, rng.randint(0, 5 * MERGE), rng.randint(1, 4))
    readers = []
    at = 0
    while at < len(parts):
        if rng.random() < 0.3:
            readers.append((Cursor(log), []))
        for cursor, got in readers:
            if rng.random() < 0.5:
                got += cursor.take()
        more = rng.choice([1, 1, 2, 7, MERGE, 3 * MERGE])
        log.append(parts[at : at + more])
        at += more
    log.end(reply(), None)
    readers.append((Cursor(log), []))
    for cursor, got in readers:
        has_parts, rest = cursor.has_parts, cursor.take()
        assert has_parts == bool(rest)
        got += rest
        assert sums(got) == sums(parts)
        assert (cursor.has_parts, cursor.take()) == (False, [])
        assert [p for p in got if isinstance(p, Progress)][-1:] == parts[3:4]


def test_a_late_reader_gets_few_large_parts():
    log = PartsLog()
    for number in range(100 * MERGE):
        log.append([Delta("text", "x", (number,))])
    got = Cursor(log).take()
    assert len(got) <= MERGE + 1
    assert got[0].token_ids == tuple(range(len(got[0].token_ids)))
    assert sums(got)[0]["text"] == "x" * 100 * MERGE
    assert len(log._merged) == 100


def test_choices_and_kinds_are_merged_apart():
    parts = [Progress(1, 9), Delta("reasoning", "r", (1,), (), 0, 1.0),
             Delta("text", "b", (7,), (), 1), Progress(9, 9),
             Delta("reasoning", "s", (2,), (), 0, 2.0), Delta("text", "", (3,)),
             Delta("text", "t", (4,), (), 0, 4.0)]  # fmt: skip
    assert merged(parts) == [
        Progress(9, 9),
        Delta("reasoning", "rs", (1, 2), (), 0, 2.0),
        Delta("text", "b", (7,), (), 1),
        Delta("text", "t", (3, 4), (), 0, 4.0),
    ]
    assert merged([]) == []


def test_a_follower_has_what_a_continued_reply_had_before():
    log = PartsLog()
    early, stream = Follower(log), Cursor(log, whole=False)
    assert not early.is_ready
    log.before = (Delta("text", "Once ", (1, 2)),)
    assert early.is_ready
    log.append([Delta("text", "upon", (3,))])
    late = Follower(log)
    log.end(reply("Once upon"), None)
    assert [list(early), list(late)] == [["Once ", "upon"]] * 2
    assert stream.take() == [Delta("text", "upon", (3,))]
    assert early.result() is late.reply


def test_an_error_before_the_first_token_is_raised_to_every_reader():
    log = PartsLog()
    readers = [Follower(log), Follower(log)]
    log.append([Progress(1, 2)])
    log.end(None, InternalError("out of memory"))
    for reader in (*readers, Follower(log)):
        with pytest.raises(InternalError, match="out of memory"):
            list(reader.events())
        with pytest.raises(InternalError, match="out of memory"):
            reader.result()


def test_any_thread_closes_a_follower():
    log, ended = PartsLog(), []
    follower = Follower(log, lambda: ended.append(True))
    threads = [
        threading.Thread(target=lambda: ended.append(list(follower))),
        threading.Thread(target=lambda: ended.append(closed_early(follower))),
    ]
    for thread in threads:
        thread.start()
    follower.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(map(str, ended)) == ["True", "True", "[]"]
    follower.close()
    assert len(ended) == 3
    log.append([Delta("text", "x")])
    assert (list(follower), follower.take(), follower.closed) == ([], [], True)
    with Follower(log) as other:
        assert next(other) == "x"


def closed_early(follower):
    with pytest.raises(InvalidRequest, match="closed before the reply ended"):
        follower.result()
    return True


def test_two_readers_cut_and_reattached_get_equal_texts():
    """One reads in threads, one in tasks; each gives up and begins again 500 times."""
    rng = random.Random(3)
    log, parts = PartsLog(), [Delta("text", f"{n} ", (n,)) for n in range(2000)]
    texts, cuts = [], [0, 0]

    def write():
        for number, part in enumerate(parts):
            while 2 * sum(cuts) < number:
                time.sleep(0)
            log.append([part])
        log.end(reply("".join(part.text for part in parts)), None)

    def read():
        mine = random.Random(1)
        while cuts[0] < 500:
            with Follower(log) as follower:
                for _ in range(mine.randrange(4)):
                    if follower.is_ready:
                        next(follower)
            cuts[0] += 1
        with Follower(log) as follower:
            texts.append("".join(follower))

    async def read_async():
        while cuts[1] < 500:
            follower = AsyncFollower(Follower(log))
            task = asyncio.create_task(take_some(follower, rng.randrange(4)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if rng.random() < 0.5:
                follower.close()
            cuts[1] += 1
        async with AsyncFollower(Follower(log)) as follower:
            texts.append("".join([text async for text in follower]))
            assert (await follower.result()).text == texts[-1]

    async def take_some(follower, count):
        for _ in range(count):
            await follower.take()

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    asyncio.run(read_async())
    for thread in threads:
        thread.join()
    assert texts == ["".join(part.text for part in parts)] * 2
    gc.collect()
    assert not log._listeners


def test_a_reader_that_comes_and_goes_leaves_no_listener():
    log = PartsLog()

    async def run():
        for number in range(500):
            follower = AsyncFollower(Follower(log))
            if number % 2:
                follower.close()
        del follower
        gc.collect()
        assert not log._listeners
        waiting = AsyncFollower(Follower(log))
        task = asyncio.create_task(waiting.take())
        await asyncio.sleep(0)
        threading.Thread(target=waiting.close).start()
        assert await task == []
        ended = AsyncFollower(Follower(log))
        log.end(reply("x"), None)
        assert not log._listeners
        assert (await ended.result()).text == "x"
        log.listen(lambda: None)
        assert not log._listeners

    asyncio.run(run())


def test_read_parts_are_freed():
    """A log holds what late readers need, not the parts themselves; a reader holds the rest."""

    class Text(str):
        pass

    log = PartsLog()
    reader = Cursor(log)
    texts = [Text(number) for number in range(4 * MERGE)]
    alive = [weakref.ref(text) for text in texts]
    for text in texts:
        log.append([Delta("text", text)])
    del texts, text
    assert all(ref() is not None for ref in alive)  # the reader has read nothing
    reader.take()
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1
