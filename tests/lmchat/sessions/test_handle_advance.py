"""Turns posted in one message, handles made and closed without waiting, and one reader for many."""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
from checkpoints import TINY, prompt

import turbomind
from turbomind.engine.stream import Event

Open = Callable[..., turbomind.Engine]
VOCAB = TINY["vocab_size"]
IDS = prompt(90, VOCAB)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}
SAMPLED: dict[str, Any] = {
    "ignore_eos": True, "temperature": 1.2, "top_p": 0.95, "seed": 3,
    "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json alone: weights are dummies."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def engine(config: Path, open_engine: Open) -> turbomind.Engine:
    return open_engine(config, load_format="dummy")


@pytest.fixture
def slow(tmp_path: Path, open_engine: Open) -> turbomind.Engine:
    """An engine with enough to do that a request is still running when we look."""
    big = {
        **TINY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(big))
    return open_engine(path, load_format="dummy", cache_memory="256MiB")


def error_of(stream: turbomind.Stream) -> turbomind.Error:
    """The error of a request that failed before it produced anything."""
    events = list(stream)
    assert [e.terminal for e in events] == [True]
    assert events[0].finish_reason == "error"
    assert events[0].error is not None
    return events[0].error


def test_a_turn_equals_a_fresh_request_and_computes_only_new_tokens(
    engine: turbomind.Engine, config: Path, open_engine: Open
) -> None:
    """Any turn equals a fresh request with the same tokens and computes only what is new."""
    fresh = open_engine(config, load_format="dummy", prefix_reuse=False)
    chance = random.Random(1)
    handle = engine.open()
    tokens: list[int] = []
    written = 0
    for turn in range(25):
        prefix_length = chance.choice([len(tokens), chance.randint(0, len(tokens))])
        more = prompt(chance.randint(0 if prefix_length else 1, 30), VOCAB, seed=turn)
        if prefix_length + len(more) > 200:
            prefix_length, more = 0, IDS
        params = {**SAMPLED, "max_new_tokens": chance.randint(1, 20), "seed": turn}
        result = handle.advance(
            prefix_length, more, retention_priority=float(turn), **params
        ).result()
        tokens = tokens[:prefix_length] + more
        assert result.token_ids == fresh.generate(tokens, **params).token_ids
        assert result.prompt_tokens == len(tokens)
        # The last token of a turn is not computed before the next one needs it.
        assert result.reused_tokens >= min(prefix_length, written, len(tokens) - 1)
        tokens += result.token_ids
        written = len(tokens) - 1
        assert handle.token_ids == tokens


@pytest.mark.parametrize("stopped_after", [1, 15, 39])
def test_stopped_and_continued_equals_not_stopped(
    engine: turbomind.Engine, stopped_after: int
) -> None:
    """A stopped and continued request equals an unstopped one, penalties included."""
    whole = engine.generate(IDS, max_new_tokens=40, **SAMPLED).token_ids
    left = 40 - stopped_after
    handle = engine.open()
    first = handle.advance(0, IDS, max_new_tokens=stopped_after, **SAMPLED).result().token_ids
    options = {**SAMPLED, "max_new_tokens": left, "continued": stopped_after}
    second = handle.advance(handle.length, [], **options).result().token_ids
    assert first + second == whole
    assert engine.generate(IDS + first, **options).token_ids == second
    handle.truncate(len(IDS) + stopped_after)
    assert handle.generate(**options).result().token_ids == second
    if stopped_after == 15:  # the test can fail
        forgotten = engine.generate(IDS + first, **{**options, "continued": 0}).token_ids
        assert forgotten != second


def test_advance_does_all_or_nothing(slow: turbomind.Engine) -> None:
    with slow.open() as handle:
        tokens = IDS + handle.advance(0, IDS, **GREEDY).result().token_ids
        length = len(tokens)
        for prefix_length, append, params, error, match in (
            (
                length + 1,
                [3],
                {},
                turbomind.InvalidRequest,
                f"^prefix_length is {length + 1}, .* {length}",
            ),
            (0, [], {}, turbomind.InvalidRequest, "the prompt is empty"),
            (5, [3], {"continued": 7}, turbomind.InvalidRequest, "^continued is 7, .*0 to 6"),
            (5, [3] * 9000, {}, turbomind.ContextFull, "9005 tokens"),
            (5, [3], {"max_new_tokens": 9000}, turbomind.ContextFull, "9000 new ones"),
        ):
            failed = error_of(
                handle.advance(prefix_length, append, retention_priority=2.0, **params)
            )
            assert type(failed) is error
            with pytest.raises(error, match=match):
                raise failed
            assert handle.token_ids == tokens
        for prefix_length, append, params, match in (
            (-1, [3], {}, "prefix_length is -1"),
            (1.0, [3], {}, "prefix_length is 1.0"),
            (0, "ab", {}, "append is a str"),
            (0, [3, VOCAB], {}, rf"append\[1\] is {VOCAB}"),
            (0, [3], {"retention_priority": "much"}, "retention_priority is 'much'"),
            (0, [3], {"retention_priority": float("nan")}, "retention_priority is nan"),
            (0, [3], {"n": 2}, "n is 2, expected 1"),
            (0, [3], {"salt": "x"}, "unknown parameter 'salt'"),
            (0, [3], {"top_p": 2.0}, "top_p"),
            (0, [3], {"continued": -1}, "continued"),
            (0, [3], {"inbox": 5}, "inbox is 5, expected an Inbox"),
        ):
            with pytest.raises(turbomind.InvalidRequest, match=match):
                handle.advance(prefix_length, append, **params)  # type: ignore[arg-type]
        result = handle.advance(length, [3, 4], **GREEDY).result()
        assert result.reused_tokens == length - 1
        busy = handle.advance(handle.length, [3], max_new_tokens=6000, ignore_eos=True)
        assert isinstance(error_of(handle.advance(0, [5])), turbomind.Busy)
        assert handle.length > length
        busy.close()
    assert isinstance(error_of(handle.advance(0, [5])), turbomind.NotFound)


def test_a_fork_without_waiting_has_the_tokens_of_its_source(engine: turbomind.Engine) -> None:
    with engine.open() as handle:
        tokens = IDS + handle.advance(0, IDS, **GREEDY).result().token_ids
        copies = [
            handle.fork(wait=False),
            handle.fork(retention_priority=3.0, wait=False),
            handle.fork(2),
        ]
        handle.truncate(1)
        for fork in copies:
            result = fork.advance(len(tokens), [5], **GREEDY).result()
            assert result.token_ids == engine.generate([*tokens, 5], **GREEDY).token_ids
            assert result.reused_tokens == len(tokens) - 1
            fork.close()
    orphan = handle.fork(wait=False)
    for call in (lambda: orphan.length, lambda: orphan.append([3]), handle.fork):
        with pytest.raises(turbomind.NotFound):
            call()
    orphan.close()
    for wrong in ("much", float("inf")):
        with pytest.raises(turbomind.InvalidRequest, match="retention_priority"):
            handle.fork(retention_priority=wrong, wait=False)  # type: ignore[arg-type]
    assert engine.stats().handles == 0


@pytest.mark.parametrize("retained", [0, 1])
def test_retention_priority_of_a_turn(config: Path, open_engine: Open, retained: int) -> None:
    """Under memory pressure the handle of lower retention priority loses its pages."""
    engine = open_engine(config, load_format="dummy", cache_pages=8, max_context_tokens=256)
    handles = [engine.open(), engine.open()]
    for i, handle in enumerate(handles):
        tokens = prompt(140, VOCAB, seed=i)
        handle.advance(0, tokens, retention_priority=float(i == retained), **GREEDY).result()
    engine.generate(prompt(235, VOCAB, seed=9), **GREEDY)
    lengths = [h.length for h in handles]
    reused = [
        handles[i].advance(lengths[i], [3], **GREEDY).result().reused_tokens
        for i in (retained, 1 - retained)
    ]
    assert reused[0] == lengths[retained] - 1
    assert reused[1] < lengths[1 - retained] - 1


def test_one_thread_reads_the_requests_of_many(engine: turbomind.Engine) -> None:
    """One thread reads what many others have asked for."""
    prompts = [prompt(5 + 7 * i, VOCAB, seed=i) for i in range(12)]
    expected = [engine.generate(p, **GREEDY).token_ids for p in prompts]
    inbox = turbomind.Inbox()
    lock = threading.Lock()
    streams: dict[int, tuple[turbomind.Stream, list[Event]]] = {}
    finished: dict[int, list[Event]] = {}
    handles = [engine.open() for _ in prompts]

    def read() -> None:
        while len(finished) < len(prompts):
            for request_id in inbox.wait(None):
                with lock:
                    stream, events = streams[request_id]
                events += stream.poll()
                if stream.done:
                    finished[request_id] = events

    def ask(i: int) -> int:
        handle = handles[i]
        with lock:
            if i % 3 == 0:
                stream = engine.stream(prompts[i], inbox=inbox, **GREEDY)
            elif i % 3 == 1:
                stream = handle.advance(0, prompts[i], inbox=inbox, **GREEDY)
            else:
                handle.append(prompts[i])
                stream = handle.generate(inbox=inbox, **GREEDY)
            streams[stream.id] = (stream, [])
        return stream.id

    reader = threading.Thread(target=read)
    reader.start()
    ids = [ask(i) for i in range(len(prompts))]
    reader.join(120)
    assert len(set(ids)) == len(prompts)
    for request_id, tokens in zip(ids, expected, strict=True):
        events = finished[request_id]
        assert [t for e in events for t in e.token_ids] == tokens
        assert [e.terminal for e in events] == [False] * (len(events) - 1) + [True]


def test_inbox_queues_events_until_they_are_read(engine: turbomind.Engine) -> None:
    inbox = turbomind.Inbox()
    stream = engine.stream(IDS, inbox=inbox, **GREEDY)
    engine.generate(prompt(20, VOCAB), **{**GREEDY, "max_new_tokens": 100})  # takes longer
    assert not stream.done
    assert inbox.wait(60) == [stream.id]
    assert inbox.wait(0) == []
    events = stream.poll()
    assert sum(len(e.token_ids) for e in events) == 12
    assert events[-1].terminal
    assert stream.done
    assert stream.poll() == []
    assert list(stream) == []


def test_a_wake_up_ends_the_wait_for_an_inbox(engine: turbomind.Engine) -> None:
    inbox = turbomind.Inbox()
    assert inbox.wait(0) == []
    assert inbox.wait(0.001) == []
    inbox.wake()
    inbox.wake()
    assert inbox.wait() == []
    waker = threading.Timer(0.05, inbox.wake)
    waker.start()
    assert inbox.wait(None) == []
    waker.join()
    with engine.stream([3], inbox=inbox, **GREEDY) as stream:
        inbox.wake()
        while not stream.done:
            assert set(inbox.wait(60)) <= {stream.id}
            stream.poll()
    for wrong in (-1, float("nan"), "1"):
        with pytest.raises(turbomind.InvalidRequest, match="seconds is .*, expected a number"):
            inbox.wait(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(inbox)


def test_advance_after_the_engine_has_closed_raises_closed(slow: turbomind.Engine) -> None:
    """A request that was posted before ends once; later calls raise."""
    handle = slow.open()
    inbox = turbomind.Inbox()
    streams = [slow.open().advance(0, [3, 4 + i], max_new_tokens=5000, inbox=inbox) for i in (0, 1)]
    running = handle.advance(0, IDS, max_new_tokens=5000, ignore_eos=True, inbox=inbox)
    slow.close()
    for call in (slow.open, lambda: handle.advance(0, [3]), lambda: handle.fork(wait=False)):
        with pytest.raises(turbomind.EngineClosed):
            call()
    handle.close()
    open_streams = {s.id: s for s in [running, *streams]}
    while open_streams:
        for request_id in inbox.wait(60):
            events = open_streams[request_id].poll()
            if events and events[-1].terminal:
                assert [e.terminal for e in events].count(True) == 1
                assert open_streams.pop(request_id).poll() == []


@devices.WATCHED_STEPS
@pytest.mark.parametrize("decoding", [0, 4])
def test_a_live_turn_beside_a_long_prefill(slow: turbomind.Engine, decoding: int) -> None:
    """Its first token comes within three steps of the engine."""
    handle = slow.open()
    handle.advance(0, prompt(700, VOCAB), **GREEDY).result()
    others = [
        slow.stream(prompt(20, VOCAB, seed=i), max_new_tokens=7000, ignore_eos=True, priority=1)
        for i in range(decoding)
    ]
    stranger = slow.stream(prompt(6000, VOCAB, seed=77), max_new_tokens=1, priority=1)
    first = next(stranger)
    assert first.progress is not None
    assert first.progress[0] < 4000
    before = slow.stats().steps
    turn = handle.advance(handle.length, prompt(40, VOCAB, seed=5), **GREEDY)
    while not any(event.token_ids for event in [next(turn)]):
        pass
    # stats() waits for the step that has begun since.
    assert slow.stats().steps - 1 - before <= 3
    assert not any(e.terminal for e in stranger.poll()), "the stranger's prompt was done too soon"
    for stream in (turn, stranger, *others):
        stream.close()
    handle.close()


def test_many_live_turns_leave_a_stranger_its_share(slow: turbomind.Engine) -> None:
    """A prompt of lower priority gets on, 16 tokens a step or more, whatever comes before it."""
    stop = threading.Event()

    def live(seed: int) -> None:
        while not stop.is_set():
            slow.generate(prompt(600, VOCAB, seed=seed), max_new_tokens=1, salt=str(time.time_ns()))

    threads = [threading.Thread(target=live, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        before = slow.stats().steps
        slow.generate(prompt(320, VOCAB, seed=99), max_new_tokens=1, priority=1)
        # The live prompts that came before it had waited longer.
        assert slow.stats().steps - before <= 320 / 16 + 12
    finally:
        stop.set()
        for thread in threads:
            thread.join()
