"""Phases `end_to_end:MODEL`: the engine with dummy weights on a real model's shape.

One process per model: a GPU's error or a full memory ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import turbomind
from benchmarks.shapes import Shape
from turbomind import _C

from .machine import free_gpu_bytes
from .settings import Settings, write_json
from .shapes import MODELS, write_config

Figures = Iterator[dict[str, Any]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NO_MOMENT = "no moment at which all rows decode, in {} steps"
LEFT_FREE = 6 << 30  # bytes for workspaces, graphs and other users of the GPU
DETERMINISTIC_SECONDS = 15.0  # reserved for the second engine, beside loading it


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements, in tokens and slots of the batch. `turn` is (history, new)."""

    prefill: tuple[int, ...] = (128, 2048, 8192)
    contexts: tuple[int, ...] = (512, 8192)
    batches: tuple[int, ...] = (1, 8, 64)
    steps: int = 48
    turn: tuple[int, int] = (8192, 64)
    together: tuple[int, int, int] = (256, 128, 128)  # requests, prompt, reply
    host_memory: int = 4 << 30


TINY = Plan((5, 70), (12,), (1, 2), 3, (70, 5), (3, 5, 3), 1 << 20)


class Lab:
    """One engine and random prompts without common prefixes.

    `end` is the time limit by time.monotonic(); measurements that would take longer are left out.
    """

    def __init__(
        self, settings: Settings, shape: Shape, plan: Plan, deterministic: bool, end: float
    ) -> None:
        self.shape = shape
        self.plan = plan
        self.settings = settings
        self.end = end
        self.prefill_rate = 0.0  # tokens per second of the last measured prompts
        self.host_memory: int | None = plan.host_memory
        self.no_host_tier = ""  # why there is none
        self._random = random.Random(1)
        free = None if settings.emulated else free_gpu_bytes()
        start = time.perf_counter()
        self.engine = self._open(cache_bytes(settings, shape, plan), deterministic)
        self.load_seconds = time.perf_counter() - start
        self.memory = memory_facts(self.engine, free, None if free is None else free_gpu_bytes())

    def _open(self, cache: int, deterministic: bool) -> turbomind.Engine:
        """Opens the engine, with half of the KV cache if the memory is too small.

        A machine that reports less memory than the host's tier asks for is measured without it.
        """
        try:
            return self._fitting(cache, deterministic)
        except turbomind.InvalidRequest as error:
            if "host_memory" not in str(error):
                raise
            self.host_memory, self.no_host_tier = None, str(error)
        return self._fitting(cache, deterministic)

    def _fitting(self, cache: int, deterministic: bool) -> turbomind.Engine:
        for part in (1, 2):
            try:
                return self._engine(cache // part, deterministic)
            except turbomind.Error as error:
                if "memory" not in str(error) or "host_memory" in str(error):
                    raise
            gc.collect()
        return self._engine(cache // 4, deterministic)

    def _engine(self, cache: int, deterministic: bool) -> turbomind.Engine:
        return turbomind.Engine(
            write_config(self.shape, Path(self.settings.work)),
            device=self.settings.device,
            dtype="bfloat16",
            load_format="dummy",
            max_batch_size=self.plan.together[0],
            cache_memory=cache,
            host_memory=self.host_memory,
            deterministic=deterministic,
            threads=1 if self.settings.tiny else None,
        )

    def prompt(self, tokens: int) -> list[int]:
        """Returns random token ids."""
        return [self._random.randrange(3, self.shape.vocab) for _ in range(tokens)]

    def room(self) -> int:
        """Number of tokens that the cache holds."""
        return 64 * max(group.total for group in self.engine.stats().groups)

    def too_long(self, tokens: int) -> str:
        """Returns why there is no time for prompts of so many tokens in all, or ""."""
        left = self.end - time.monotonic()
        needs = tokens / self.prefill_rate if self.prefill_rate else 0.0
        return "" if needs < left else f"{needs:.0f} s for the prompts, {max(left, 0):.0f} s left"


def memory_facts(engine: turbomind.Engine, before: int | None, after: int | None) -> dict[str, int]:
    """Returns the device memory that an engine took, by the free bytes before and after opening it.

    `other` is what workspaces, graphs, kernels and the context took.
    """
    facts = {"weights": engine.weight_bytes, "cache": engine.stats().cache_bytes}
    if before is None or after is None:
        return facts
    taken = before - after
    return facts | {"free_after": after, "other": taken - sum(facts.values())}


def cache_bytes(settings: Settings, shape: Shape, plan: Plan) -> int:
    """Returns the bytes of the largest batch, at most those free beside weights and workspaces."""
    rows, context = max(plan.batches), max(plan.contexts)
    tokens = rows * (context + 2 * plan.steps + 192) + 2 * sum(plan.turn) + 64
    wanted = max(tokens, plan.together[0] * 320) * shape.kv_bytes_per_token()
    if settings.emulated:
        return wanted
    free = free_gpu_bytes() or max(d.total_bytes for d in _C.gpu_devices() if d.kind == "cuda")
    weights = 2 * (shape.layer_weights() + 2 * shape.vocab * shape.hidden)
    return max(1 << 30, min(wanted, free - weights - LEFT_FREE))


def run_phase(settings: Settings, model: str) -> dict[str, Any]:
    """Measures every figure, also after one has failed, and writes each at once."""
    shape = MODELS[model]
    plan = TINY if settings.tiny else Plan()
    result: dict[str, Any] = {"model": model, "figures": [], "error": ""}
    path = settings.result_path(f"end_to_end:{model}")

    def close(name: str, lab: Lab) -> None:
        """Records what the engine reports of itself, which explains slow figures."""
        facts, error = engine_facts(lab.engine, settings, name == "deterministic")
        facts |= {"memory": lab.memory}
        if lab.no_host_tier:
            facts["no_host_tier"] = lab.no_host_tier
        result.setdefault("engines", {})[name] = facts
        result["error"] += f"{name}: {error}; " if error else ""
        write_json(path, result)

    def attempt(name: str, measure: Callable[[], Figures]) -> None:
        start = time.perf_counter()
        try:
            for figure in measure():
                result["figures"].append(figure)
                write_json(path, result)
        except (turbomind.Error, RuntimeError, MemoryError) as error:
            result["error"] += f"{name}: {type(error).__name__}: {str(error)[:500]}; "
        result["seconds"] = result.get("seconds", {}) | {
            name: round(time.perf_counter() - start, 2)
        }
        write_json(path, result)

    end = time.monotonic() + settings.seconds
    with opened(settings, shape, plan, False, result, end) as lab:
        lab.end -= lab.load_seconds + DETERMINISTIC_SECONDS
        result["cache_tokens"] = lab.room()
        result["weight_bytes"] = lab.engine.weight_bytes
        attempt("warm up", partial(warm_up, lab))
        attempt("decode", partial(decode, lab, plan.contexts[0]))
        attempt("prefill", partial(prefill, lab))
        attempt("turn", partial(turns, lab))
        attempt("together", partial(together, lab))
        for context in plan.contexts[1:]:
            attempt(f"decode at {context}", partial(decode, lab, context))
        close("default", lab)
    with opened(settings, shape, plan, True, result, end) as lab:
        attempt("warm up, deterministic", partial(warm_up, lab))
        attempt("decode, deterministic", partial(decode, lab, plan.contexts[0], deterministic=True))
        close("deterministic", lab)
    return result


def engine_facts(
    engine: turbomind.Engine,
    settings: Settings,
    deterministic: bool,
    off: tuple[str, ...] = (),
) -> tuple[dict[str, Any], str]:
    """Returns what an engine reports of itself, and what makes its figures or tokens suspect.

    `off` names parts that were switched off: "overlap", "graphs". The error is "" if all of the
    others were in use: captured steps, overlapped steps and, by default on a GPU, cuBLASLt.
    """
    note = engine.library_note or ""
    stats = engine.stats()
    done, kinds, seconds = engine.warmed_up
    facts = {
        "library_note": re.sub(r"/\S*/(?=site-packages/)", "", note),  # no path of one machine
        "warmed_up": {"done": done, "of": kinds, "seconds": round(seconds, 2)},
        "steps": stats.steps,
        "steps_overlapped": stats.steps_overlapped,
    }
    wrong = []
    if "are not captured" in note:
        wrong.append("steps were not captured")
    if not (deterministic or settings.emulated):
        if note.startswith("no cuBLASLt") or "not used any more" in note:
            wrong.append("cuBLASLt was not used")
        elif "does not compute" in note:
            wrong.append("cuBLASLt was not used for a product")
    if "overlap" not in off and stats.tokens_decoded > 2 and stats.steps_overlapped == 0:
        wrong.append("no step overlapped another one")
    for part, variable in (("overlap", "TM_CUDA_OVERLAP"), ("graphs", "TM_CUDA_GRAPHS")):
        if (part in off) != (f"{variable} is 0" in note):
            wrong.append(f"{part} is {'on' if part in off else 'off'}")
    return facts, f"{', '.join(wrong)} ({note})" if wrong else ""


@contextlib.contextmanager
def opened(
    settings: Settings,
    shape: Shape,
    plan: Plan,
    deterministic: bool,
    result: dict[str, Any],
    end: float,
) -> Iterator[Lab]:
    """Opens an engine and records its time to load."""
    lab = Lab(settings, shape, plan, deterministic, end)
    result.setdefault("load_seconds", []).append(round(lab.load_seconds, 2))
    try:
        yield lab
    finally:
        lab.engine.close()
        del lab.engine  # the next one needs its memory
        gc.collect()


def warm_up(lab: Lab) -> Figures:
    """Runs requests that load modules, open libraries and grow memory."""
    lab.engine.generate(lab.prompt(min(lab.plan.prefill)), max_new_tokens=4, **GREEDY)
    lab.engine.generate(lab.prompt(max(lab.plan.prefill)), max_new_tokens=2, **GREEDY)
    yield from ()


def prefill(lab: Lab) -> Figures:
    """Measures one prompt at a time to its first token; the median of three."""
    for tokens in lab.plan.prefill:
        times = []
        for _ in range(3):
            ids = lab.prompt(tokens)
            start = time.perf_counter()
            times.append(first_token_ms(lab.engine.stream(ids, max_new_tokens=1, **GREEDY), start))
        ms = sorted(times)[1]
        lab.prefill_rate = tokens / ms * 1e3
        yield {
            "figure": "prefill",
            "tokens": tokens,
            "ms": ms,
            "tokens_per_s": tokens / ms * 1e3,
            "flops": lab.shape.prefill_flops(tokens),
        }


def decode(lab: Lab, context: int, *, deterministic: bool = False) -> Figures:
    """Measures batches of growing size; each sequence follows its own `context` tokens."""
    fit = lab.room() // (context + 2 * lab.plan.steps * len(lab.plan.batches) + 128)
    handles: list[turbomind.Handle] = []
    try:
        for batch in lab.plan.batches:
            about: dict[str, Any] = {"figure": "decode", "batch": batch, "context": context}
            about["deterministic"] = deterministic
            new = batch - len(handles)
            why = f"{fit} rows fit this GPU" if batch > fit else lab.too_long(new * context)
            if why:
                yield about | {"skipped": why}
                continue
            handles += [lab.engine.open() for _ in range(new)]
            read_all([first_tokens(lab, handle, context) for handle in handles[-new:]])
            yield about | decode_batch(lab, handles, context)
    finally:
        for handle in handles:
            handle.close()


def first_tokens(lab: Lab, handle: turbomind.Handle, context: int) -> turbomind.Stream:
    """Starts a sequence with a prompt of `context` tokens and one generated token."""
    return handle.advance(0, lab.prompt(context), max_new_tokens=1, **GREEDY)


def decode_batch(lab: Lab, handles: list[turbomind.Handle], context: int) -> dict[str, Any]:
    """Measures the time per token after every slot has a few tokens, until the first one ends."""
    steps = lab.plan.steps
    streams = [
        handle.advance(context, lab.prompt(1), max_new_tokens=steps, **GREEDY) for handle in handles
    ]
    ms = step_ms(streams, steps)
    if ms is None:
        return {"skipped": NO_MOMENT.format(steps)}
    kv = len(handles) * (context + steps // 2) * lab.shape.kv_bytes_per_token()
    return {
        "ms": ms,
        "tokens_per_s": len(handles) / ms * 1e3,
        "bytes": lab.shape.decode_weight_bytes() + kv,
    }


def step_ms(streams: list[turbomind.Stream], steps: int) -> float | None:
    """Returns the milliseconds of a step in which all streams decode; None if there is none.

    Args:
        streams: Streams that have just begun.
        steps: Tokens of each.
    """
    skipped = min(8, steps - 2)
    times = read_all(streams)
    begin = max(row[skipped] for row in times)
    end = min(row[-1] for row in times)
    tokens = sum(begin < at <= end for row in times for at in row)
    return (end - begin) * 1e3 * len(streams) / tokens if tokens else None


def turns(lab: Lab) -> Figures:
    """Measures new tokens after a history: on the device, loaded from the host, computed again.

    Without a host tier the middle one is left out.
    """
    history, new = lab.plan.turn
    past = lab.prompt(history)
    figures: list[dict[str, Any]] = []
    has_tier = lab.host_memory is not None
    handle = lab.engine.open(persist=has_tier)
    handle.advance(0, past, max_new_tokens=1, **GREEDY).result()

    def turn(how: str, handle: turbomind.Handle, prefix: int) -> None:
        ids = past[prefix:] + lab.prompt(new)
        start = time.perf_counter()
        stream = handle.advance(prefix, ids, max_new_tokens=1, **GREEDY)
        facts: dict[str, Any] = {"figure": "turn", "how": how, "history": history, "new": new}
        facts["ms"] = first_token_ms(stream, start, into=facts)
        figures.append(facts)

    for _ in range(3):
        turn("cached", handle, history)
    flushed = False
    if has_tier:
        handle.save()
        flushed = bool(lab.engine.flush_pages(30))
    for _ in range(3 if has_tier else 0):
        handle.close()
        lab.engine.evict()
        handle = lab.engine.open(persist=True)
        turn("from the host", handle, 0)
        figures[-1]["flushed"] = flushed
    handle.close()
    for _ in range(2):
        handle = lab.engine.open(salt="again")
        turn("computed again", handle, 0)
        handle.close()
        lab.engine.evict()
    yield from median_by(figures, "how")


def together(lab: Lab) -> Figures:
    """Measures many requests at once, to the last token of the last one."""
    requests, prompt, reply = lab.plan.together
    prompts = [lab.prompt(prompt) for _ in range(requests)]
    start = time.perf_counter()
    streams = [lab.engine.stream(ids, max_new_tokens=reply, **GREEDY) for ids in prompts]
    times = read_all(streams)
    seconds = max(row[-1] for row in times) - start
    yield {
        "figure": "together",
        "requests": requests,
        "prompt": prompt,
        "reply": reply,
        "ms": seconds * 1e3,
        "tokens_per_s": requests * reply / seconds,
    }


def first_token_ms(
    stream: turbomind.Stream, start: float, into: dict[str, Any] | None = None
) -> float:
    """Returns the milliseconds from `start` to the first token; reads the stream to its end."""
    first = None
    for event in stream:
        if event.error is not None:
            raise event.error
        if event.token_ids and first is None:
            first = event.seconds
        if event.finish_reason is not None and into is not None:
            into["reused_tokens"] = event.reused_tokens
            into["loaded_tokens"] = event.loaded_tokens
    if first is None:
        raise RuntimeError("a request ended without a token")
    return (first - start) * 1e3


def read_all(streams: list[turbomind.Stream]) -> list[list[float]]:
    """Returns the time of each token of each stream, in seconds.

    Looks seldom, so as not to disturb.
    """
    times: list[list[float]] = [[] for _ in streams]
    waiting = set(range(len(streams)))
    while waiting:
        time.sleep(0.005)
        for i in list(waiting):
            for event in streams[i].poll():
                if event.error is not None:
                    raise event.error
                times[i] += [event.seconds] * len(event.token_ids)
            if streams[i].done:
                waiting.discard(i)
    return times


def median_by(figures: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns the figure of median time among those that are equal in `name`."""
    chosen = []
    for value in dict.fromkeys(figure[name] for figure in figures):
        same = sorted((f for f in figures if f[name] == value), key=lambda figure: figure["ms"])
        chosen.append(same[len(same) // 2] | {"all_ms": [round(f["ms"], 3) for f in same]})
    return chosen
