"""The Python API: handles, streams (blocking and asyncio), generations, stats, threads, Ctrl-C."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import devices
import pytest
from checkpoints import TINY, prompt

import turbomind
from turbomind.engine.stream import Event
from turbomind.machine import parse_bytes, physical_cores

Open = Callable[..., turbomind.Engine]
IDS = prompt(90, TINY["vocab_size"])
FOREVER = {"max_new_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": 1}
GREEDY = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json alone; the weights are dummies."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def engine(config: Path, open_engine: Open) -> turbomind.Engine:
    return open_engine(config, load_format="dummy")


@pytest.fixture
def slow_config(tmp_path: Path) -> Path:
    """A config.json of a model that is slow enough to be watched."""
    big = {
        **TINY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(big))
    return path


@pytest.fixture
def slow(slow_config: Path, open_engine: Open) -> turbomind.Engine:
    """An engine slow enough that a request still runs when a test checks."""
    return open_engine(slow_config, load_format="dummy", cache_memory="256MiB")


LONG = {"max_new_tokens": 6000, "ignore_eos": True, "temperature": 0}


def finishes(events: list[Event]) -> list[str]:
    return [e.finish_reason for e in events if e.finish_reason]


def idle(engine: turbomind.Engine) -> turbomind.Stats:
    """Waits until no request runs, checks the invariants and returns the stats."""
    for _ in range(30000):
        stats = engine.stats()
        if stats.slots == 0 and stats.waiting == 0:
            engine.check_invariants()
            return stats
        time.sleep(0.001)
    raise AssertionError(f"still busy: {stats}")


def test_generate_returns_tokens_and_counts(engine: turbomind.Engine) -> None:
    result = engine.generate(IDS, **GREEDY)
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len(IDS)
    assert result.reused_tokens == 0
    assert result.logprobs == []
    again = engine.generate(iter(IDS), **GREEDY)
    assert again.token_ids == result.token_ids
    assert again.reused_tokens == 64
    assert len(again.choices) == 1


def test_a_stream_reports_progress_tokens_and_one_finish(engine: turbomind.Engine) -> None:
    events = list(engine.stream(IDS, **GREEDY, logprobs=2))
    expected = engine.generate(IDS, **GREEDY)
    assert [t for e in events for t in e.token_ids] == expected.token_ids
    assert all(len(e.logprobs) == len(e.token_ids) for e in events)
    assert all(len(entry.top) == 2 for e in events for entry in e.logprobs)
    assert finishes(events) == ["length"]
    assert [e.terminal for e in events] == [False] * (len(events) - 1) + [True]
    done = [e.progress for e in events if e.progress]
    assert done == sorted(done)
    assert all(0 <= d <= total == len(IDS) for d, total in done)


def test_every_choice_ends_with_its_own_finish(engine: turbomind.Engine) -> None:
    result = engine.generate(IDS, n=3, temperature=1.0, seed=5, max_new_tokens=8, ignore_eos=True)
    assert [len(c.token_ids) for c in result.choices] == [8, 8, 8]
    assert result.token_ids == result.choices[0].token_ids
    assert len({tuple(c.token_ids) for c in result.choices}) > 1
    events = list(engine.stream(IDS, n=3, seed=5, max_new_tokens=8, ignore_eos=True))
    assert finishes(events) == ["length"] * 3
    assert sum(e.terminal for e in events) == 1


def test_a_seed_repeats_the_tokens(engine: turbomind.Engine) -> None:
    options = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    first = engine.generate(IDS, **options)
    assert engine.generate(IDS, **options, seed=first.seed).token_ids == first.token_ids
    others = [engine.generate(IDS, **options) for _ in range(3)]
    assert len({r.seed for r in others}) == 3
    retried = engine.generate(IDS, **options, seed=first.seed, attempt=1)
    assert retried.token_ids != first.token_ids


def test_a_stop_token_ends_the_generation_and_is_part_of_it(
    tmp_path: Path, open_engine: Open
) -> None:
    plain = tmp_path / "config.json"
    plain.write_text(json.dumps(TINY))
    engine = open_engine(plain, load_format="dummy")
    tokens = engine.generate(IDS, **GREEDY).token_ids
    stop = tokens[5]
    expected = tokens[: tokens.index(stop) + 1]
    options = {"max_new_tokens": 12, "temperature": 0}
    by_request = engine.generate(IDS, **options, stop_token_ids=[stop], ignore_eos=True)
    assert (by_request.token_ids, by_request.finish_reason) == (expected, "stop")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [69, stop]}))
    stopped = open_engine(plain, load_format="dummy")
    assert stopped.eos_token_ids == (69, stop, 2)  # the last one is of config.json
    by_model = stopped.generate(IDS, **options)
    assert (by_model.token_ids, by_model.finish_reason) == (expected, "stop")
    assert stopped.generate(IDS, **GREEDY).token_ids == tokens
    assert stopped.generate(IDS, **options, eos_token_ids=[]).token_ids == tokens


def test_without_a_limit_generation_ends_with_the_context(engine: turbomind.Engine) -> None:
    assert engine.max_context == TINY["max_position_embeddings"]
    result = engine.generate(IDS, temperature=0, ignore_eos=True)
    assert result.finish_reason == "length"
    assert len(IDS) + len(result.token_ids) in (engine.max_context, engine.max_context + 1)


def test_a_handle_keeps_its_tokens_between_requests(engine: turbomind.Engine) -> None:
    with engine.open() as handle:
        assert handle.length == 0
        handle.append(IDS)
        assert handle.length == len(IDS)
        reply = handle.generate(**GREEDY).result()
        assert handle.token_ids == IDS + reply.token_ids
        fork = handle.fork()
        handle.truncate(len(IDS))
        assert (handle.length, fork.length) == (len(IDS), len(IDS) + 12)
        assert handle.generate(**GREEDY).result().token_ids == reply.token_ids
        handle.park()
        handle.set_retention_priority(2.0)
        with pytest.raises(
            turbomind.InvalidRequest, match="unknown parameter 'retention_priority'"
        ):
            handle.generate(retention_priority=1.0)
        fork.append([3, 4])
        more = fork.generate(**GREEDY).result()
        assert more.token_ids == engine.generate(IDS + reply.token_ids + [3, 4], **GREEDY).token_ids
        fork.close()
        fork.close()
        with pytest.raises(turbomind.NotFound):
            fork.append([3])
    assert engine.stats().handles == 0
    with pytest.raises(turbomind.NotFound):
        handle.generate()


def test_a_dropped_handle_is_closed(engine: turbomind.Engine) -> None:
    handle = engine.open()
    handle.append(IDS)
    stream = handle.fork().generate(**GREEDY)  # a stream references its handle
    assert stream.result().finish_reason == "length"
    del handle, stream
    gc.collect()
    assert idle(engine).handles == 0


def test_a_generating_handle_refuses_changes(slow: turbomind.Engine) -> None:
    handle = slow.open()
    handle.append(IDS[:10])
    with handle.generate(**LONG) as stream:
        next(stream)
        for call in (lambda: handle.append([3]), lambda: handle.truncate(1), handle.generate):
            with pytest.raises(turbomind.Busy):
                call()
        assert handle.fork().length >= 10
        assert handle.length >= 10
    handle.append([3])  # closing the stream waited for the end


def test_a_cancelled_request_ends_with_cancelled(slow: turbomind.Engine) -> None:
    stream = slow.stream(IDS[:10], **LONG)
    got = []
    for event in stream:
        got.append(event)
        if sum(len(e.token_ids) for e in got) >= 3:
            stream.cancel()
    assert finishes(got) == ["cancelled"]
    assert got[-1].terminal
    result = slow.stream(IDS[:10], **LONG)
    result.cancel()
    assert result.result().finish_reason == "cancelled"
    idle(slow)


def test_a_cancelled_choice_leaves_the_others(slow: turbomind.Engine) -> None:
    stream = slow.stream(IDS[:10], n=3, **LONG)
    tokens, ends = [0, 0, 0], {}
    for event in stream:
        tokens[event.choice] += len(event.token_ids)
        if event.finish_reason:
            ends[event.choice] = event.finish_reason
        if tokens[1] == 2:
            stream.cancel(1)
        if len(ends) == 1 and min(tokens[0], tokens[2]) >= tokens[1] + 3:
            assert ends == {1: "cancelled"}
            stream.cancel()
    assert set(ends.values()) == {"cancelled"}
    for wrong in (-1, 256, True, "1", 1.0):
        with pytest.raises(turbomind.InvalidRequest, match="^choice is .*, expected an integer"):
            stream.cancel(wrong)  # type: ignore[arg-type]
    idle(slow)


@devices.WATCHED_STEPS
@pytest.mark.parametrize("how", ["generate", "advance"])
def test_closing_a_handle_abandons_the_step_in_flight(
    how: str, slow_config: Path, open_engine: Open
) -> None:
    """The whole prompt is one step, of which close() does not wait for the end."""
    one_step = {"prefill_chunk": 8000, "step_ms": 1e6}
    engine = open_engine(slow_config, load_format="dummy", cache_memory="256MiB", **one_step)
    # The first prompt comes in steps of growing sizes, until the engine knows how long they take.
    engine.generate(prompt(6000, engine.vocab_size, seed=2), **{**GREEDY, "max_new_tokens": 1})
    before = idle(engine).tokens_prefilled
    tokens, handle = prompt(6000, engine.vocab_size), engine.open()
    if how == "generate":
        handle.append(tokens)
        stream = handle.generate(**GREEDY)
    else:
        stream = handle.advance(0, tokens, **GREEDY)
    time.sleep(0.1)  # into the step
    handle.close()
    assert stream.result().finish_reason == "cancelled"
    assert idle(engine).tokens_prefilled == before


def test_the_first_prompt_takes_no_more_steps_than_later_ones(
    config: Path, tmp_path: Path, open_engine: Open
) -> None:
    """Steps measured while the engine opens decide how the first prompt is cut."""
    options = {"load_format": "dummy", "cache_memory": "16MiB", "prefix_reuse": False}

    def steps(engine: turbomind.Engine, seed: int) -> int:
        before = engine.stats().steps
        engine.generate(
            prompt(250, engine.vocab_size, seed=seed), **{**GREEDY, "max_new_tokens": 1}
        )
        return idle(engine).steps - before

    engine = open_engine(config, **options)
    assert engine.stats().steps == 0, "measured steps are not requests"
    assert [steps(engine, seed) for seed in range(3)] == [1, 1, 1]
    unknown = open_engine(config, **options, warm_up=False)
    assert steps(unknown, 0) > 1


def test_closing_and_dropping_a_stream_cancels(slow: turbomind.Engine) -> None:
    with slow.stream(IDS[:10], **LONG) as stream:
        next(stream)
    assert list(stream) == []
    assert slow.stats().slots == 0
    dropped = slow.stream(IDS[:10], **LONG)
    next(dropped)
    del dropped
    gc.collect()
    idle(slow)


def test_asyncio_reads_the_same_events(engine: turbomind.Engine) -> None:
    prompts = [prompt(20 + i, TINY["vocab_size"], seed=i) for i in range(12)]
    expected = [engine.generate(p, **GREEDY).token_ids for p in prompts]

    async def one(ids: list[int]) -> list[int]:
        events = [event async for event in engine.stream(ids, **GREEDY)]
        assert finishes(events) == ["length"]
        return [t for e in events for t in e.token_ids]

    async def everything() -> list[list[int]]:
        first = await asyncio.gather(*map(one, prompts))
        results = await asyncio.gather(*(engine.stream(p, **GREEDY).aresult() for p in prompts))
        assert [r.token_ids for r in results] == first
        return first

    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    for _ in range(3):  # each loop gets its own waker and releases it
        assert asyncio.run(everything()) == expected
    gc.collect()
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_asyncio_reads_tokens_as_they_are_generated(slow: turbomind.Engine) -> None:
    async def run() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        options = {**LONG, "max_new_tokens": 30}
        events = [event async for event in slow.stream(IDS[:10], **options)]
        ticker.cancel()
        assert ticks > 5, "the loop was blocked"
        assert len([e for e in events if e.token_ids]) > 5

    asyncio.run(run())


def test_cancelling_a_task_cancels_its_request(slow: turbomind.Engine) -> None:
    async def run() -> None:
        held = slow.stream(IDS[:10], **LONG)  # referenced: dropping the stream would cancel it too

        async def read() -> None:
            async for _ in held:
                pass

        task = asyncio.create_task(read())
        await held.__anext__()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert finishes([event async for event in held]) == ["cancelled"]
        async with slow.stream(IDS[:10], **LONG) as stream:
            async for event in stream:
                if event.token_ids:
                    break
        assert slow.stats().slots == 0

    asyncio.run(run())
    idle(slow)


def test_asyncio_reads_streams_of_handles(engine: turbomind.Engine) -> None:
    async def run() -> list[int]:
        with engine.open() as handle:
            handle.append(IDS)
            stream = handle.generate(**GREEDY)
            result = await asyncio.wait_for(stream.aresult(), 60)
            assert handle.token_ids == IDS + result.token_ids
        return result.token_ids

    assert asyncio.run(run()) == engine.generate(IDS, **GREEDY).token_ids


def test_a_loop_reads_a_stream_opened_outside_it(engine: turbomind.Engine) -> None:
    stream = engine.stream(IDS, **GREEDY)

    async def read() -> list[Event]:
        return [event async for event in stream]

    assert finishes(asyncio.run(read())) == ["length"]


def test_blocking_calls_work_inside_a_loop(engine: turbomind.Engine) -> None:
    """Blocking calls inside a running loop, as in a notebook."""
    expected = engine.generate(IDS, **GREEDY).token_ids

    async def run() -> list[int]:
        return engine.generate(IDS, **GREEDY).token_ids

    assert asyncio.run(run()) == expected


def test_many_threads_get_the_results_of_one(engine: turbomind.Engine) -> None:
    prompts = [prompt(5 + 3 * i, TINY["vocab_size"], seed=i) for i in range(24)]
    expected = [engine.generate(p, **GREEDY).token_ids for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda p: engine.generate(p, **GREEDY).token_ids, prompts))
    assert got == expected
    stats = idle(engine)
    assert stats.pages_referenced == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_stats_count_pages_and_evict_frees_them(engine: turbomind.Engine) -> None:
    before = engine.stats()
    assert before.pages_free == before.pages_total > 0
    engine.generate(IDS, **GREEDY)
    handle = engine.open()
    handle.append(IDS)
    handle.generate(**GREEDY).result()
    stats = idle(engine)
    assert stats.pages_free + stats.pages_referenced + stats.pages_cached == stats.pages_total
    assert stats.pages_referenced > 0
    assert stats.tokens_decoded >= 24
    assert stats.tokens_prefilled >= len(IDS)
    assert stats.tokens_reused == 64
    assert (stats.handles, stats.slots, stats.waiting) == (1, 0, 0)
    handle.close()
    assert engine.stats().pages_cached > 0
    engine.evict()
    assert engine.stats().pages_free == stats.pages_total


def test_requests_of_different_salts_share_no_pages(engine: turbomind.Engine) -> None:
    engine.generate(IDS, **GREEDY, salt="a")
    assert engine.generate(IDS, **GREEDY, salt="b").reused_tokens == 0
    assert engine.generate(IDS, **GREEDY, salt="a").reused_tokens == 64
    with engine.open(salt="b") as handle:
        handle.append(IDS)
        assert handle.generate(**GREEDY).result().reused_tokens == 64


def test_the_profiler_starts_empty_and_stops(engine: turbomind.Engine) -> None:
    engine.profile()
    engine.generate(IDS, **GREEDY)
    table = engine.stats().ops
    assert table["attention"]["calls"] > 0
    assert table["gate_up"]["flops"] > 0
    engine.profile(False)


def test_a_closed_engine_refuses_every_call(slow: turbomind.Engine) -> None:
    stream = slow.stream(IDS[:10], **LONG)
    handle = slow.open()
    next(stream)
    slow.close()
    slow.close()
    assert len(finishes(list(stream))) == 1
    for call in (slow.stats, slow.open, lambda: slow.generate([3]), handle.fork):
        with pytest.raises(turbomind.EngineClosed):
            call()


def test_close_ends_the_requests_of_other_threads(slow: turbomind.Engine) -> None:
    """Streams of other threads and loops end; incomplete logits are not returned."""

    async def asynchronous() -> list[str]:
        return finishes([event async for event in slow.stream(IDS[:12], **LONG)])

    def long_logits() -> str:
        with pytest.raises(turbomind.EngineClosed, match="during a request of kind 'logits'"):
            slow.logits([3] * 8000)
        return "raised"

    def handle_that_outlives_the_engine() -> str:
        with slow.open() as handle:
            handle.append(IDS[:9])
            handle.generate(**LONG).result()
        return "closed without an error"

    with ThreadPoolExecutor(5) as pool:
        waiting = [
            pool.submit(long_logits),
            pool.submit(lambda: finishes(list(slow.stream(IDS[:10], **LONG)))),
            pool.submit(lambda: slow.generate(IDS[:11], **LONG).finish_reason),
            pool.submit(lambda: asyncio.run(asynchronous())),
            pool.submit(handle_that_outlives_the_engine),
        ]
        while slow.stats().slots < 5:
            time.sleep(0.001)
        slow.close()
        results = [future.result() for future in waiting]
    assert results[:4] == ["raised", ["cancelled"], "cancelled", ["cancelled"]]
    assert results[4] == "closed without an error"


def test_nothing_is_copied_or_pickled(engine: turbomind.Engine) -> None:
    """Dropping a copied handle would close the sequence of the original."""
    handle = engine.open()
    handle.append([3, 4])
    with engine.stream([3], **GREEDY) as stream:
        for thing in (engine, handle, stream):
            for call in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot be copied or pickled"):
                    call(thing)
    assert handle.token_ids == [3, 4]
    assert pickle.loads(pickle.dumps(engine.info)) == engine.info


def test_info_describes_the_model(engine: turbomind.Engine) -> None:
    assert engine.vocab_size == TINY["vocab_size"]
    assert engine.weight_bytes >= engine.info.weight_bytes
    assert engine.isa in turbomind.available_isas()
    assert engine.info.generation_defaults == {}


def test_sizes_are_parsed_and_cores_counted() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    assert parse_bytes("x", 12) == 12
    assert parse_bytes("x", "2GiB") == 2 << 30
    assert parse_bytes("x", " 1.5 MB ") == 1_500_000
    assert parse_bytes("x", "64m") == 64 << 20
    for wrong in (0, -1, True, "", "2 apples", "-1GiB", "1e3", None, 1.5, "9999999999TiB"):
        with pytest.raises(turbomind.InvalidRequest, match="x is .*expected bytes"):
            parse_bytes("x", wrong)


INTERRUPT = """
import sys, threading, time, turbomind
engine = turbomind.Engine(sys.argv[1], load_format="dummy", threads=1, cache_memory="512MiB")
LONG = {"max_new_tokens": 190000, "ignore_eos": True, "temperature": 0}
def watch():
    before = engine.stats().tokens_decoded
    while engine.stats().tokens_decoded < before + 50:
        time.sleep(0.001)
    print("ready", flush=True)
try:
    stream = engine.stream([3, 4, 5], **LONG)
    threading.Thread(target=watch).start()
    stream.result()
    print("finished")
except KeyboardInterrupt:
    print([event.finish_reason for event in stream if event.terminal], end=" ", flush=True)
try:
    threading.Thread(target=watch).start()
    engine.generate([3, 4, 5], **LONG)
    print("finished")
except KeyboardInterrupt:
    while engine.stats().slots:  # the cancelled request leaves with the engine's next turn
        time.sleep(0.001)
    print("interrupted", len(engine.generate([3], max_new_tokens=2, ignore_eos=True).token_ids))
"""


def test_ctrl_c_ends_a_blocking_call_and_the_engine_continues(tmp_path: Path) -> None:
    """Ctrl-C ends a blocking call and cancels its request; the engine continues."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "max_position_embeddings": 200_000, "hidden_size": 512}))
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPT, str(path)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "['cancelled'] ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "interrupted 2\n"


def test_a_closed_engine_leaves_no_thread(config: Path) -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        engine = turbomind.Engine(config, load_format="dummy", threads=2, cache_memory="8MiB")
        engine.generate([3, 4], **GREEDY)
        engine.close()
        del engine
        gc.collect()
    while len(os.listdir("/proc/self/task")) > before:  # a joined thread is listed a little longer
        time.sleep(0.001)
    assert threading.active_count() >= 1
