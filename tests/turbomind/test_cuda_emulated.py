"""Whole models on emulated GPU kernels: prefill, decode, sampling, pages of sessions.

Logits are compared with those of transformers, batch-invariant results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Zoo, prompt, reference_logits, relative, rounded

from turbomind import Engine, InvalidRequest, ModelError

Open = Callable[..., Engine]
EMULATED = {"device": "cuda_emulated", "dtype": "bfloat16", "cache_memory": "8MiB", "threads": 1}
GREEDY = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}
BY_THE_HOST: dict[str, Any] = {"logit_bias": {0: 0.0}}  # the host samples from edited logits
SEEDED = {**GREEDY, "temperature": 1.0, "top_p": 0.95, "seed": 3}
MODELS = ("llama_gqa", "qwen2_window", "mistral_window_page")


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_as_exact_as_those_of_transformers(
    name: str, zoo: Zoo, open_engine: Open
) -> None:
    """The logits are as close to float32 as those of transformers in bfloat16."""
    model = zoo.model(name)
    gpu = open_engine(zoo.folder(name), **EMULATED)
    ids = prompt(70, gpu.vocab_size)
    wanted = reference_logits(model, ids)
    bound = 1.1 * relative(reference_logits(rounded(model, "bfloat16"), ids), wanted)
    assert relative(gpu.logits(ids), wanted) < bound < 0.1
    # One token at a time on a handle's KV, so that steps are captured and replayed.
    params = {**GREEDY, "max_new_tokens": 1, "logprobs": gpu.vocab_size}
    handle = gpu.open()
    with handle.advance(0, ids[:60], **params) as stream:
        stream.result()
    squares = []
    for at in range(60, 70):
        with handle.advance(at, [ids[at]], **params) as stream:
            row = stream.result().logprobs[0]
        got = np.empty(gpu.vocab_size)
        for token, logprob in row.top:
            got[token] = logprob
        squares.append(relative(got - got.mean(), wanted[at] - wanted[at].mean()) ** 2)
    assert np.sqrt(np.mean(squares)) < bound


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_result_does_not_depend_on_other_sequences_of_the_batch(
    params: dict[str, Any], zoo: Zoo, open_engine: Open
) -> None:
    engine = open_engine(zoo.folder("llama_gqa"), **EMULATED, prefix_reuse=False)
    rows = {**params, "logprobs": engine.vocab_size}
    prompts = [prompt(n, engine.vocab_size, seed=n) for n in (3, 40, 90, 130)]
    alone = [engine.generate(ids, **rows) for ids in prompts]
    streams = [engine.stream(ids, **rows) for ids in prompts]
    for stream, wanted in zip(streams, alone, strict=True):
        got = stream.result()
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == wanted.logprobs  # bit for bit
    chunked = open_engine(zoo.folder("llama_gqa"), **EMULATED, prefill_chunk=16)
    again = [chunked.generate(ids, **rows) for ids in prompts]
    assert [g.logprobs for g in again] == [g.logprobs for g in alone]
    # Sampled on the device and on the host, which sums in another order.
    assert [engine.generate(ids, **params).token_ids for ids in prompts] == [
        g.token_ids for g in alone
    ]
    for ids, wanted in zip(prompts, alone, strict=True):
        got = engine.generate(ids, **rows, **BY_THE_HOST)
        assert got.token_ids == wanted.token_ids
        for mine, device in zip(got.logprobs, wanted.logprobs, strict=True):
            assert [t for t, _ in mine.top] == [t for t, _ in device.top]
            values = [[x for _, x in row.top] + [row.logprob] for row in (mine, device)]
            np.testing.assert_allclose(*values, rtol=3e-7, atol=1e-6)


def test_overlapped_steps_give_the_tokens_of_waiting_steps(zoo: Zoo, open_engine: Open) -> None:
    """Tokens and log-probabilities equal those of steps that wait for the host."""
    options = {**EMULATED, "prefix_reuse": False, "step_ms": 1000}  # prompts in few steps
    engine = open_engine(zoo.folder("llama_gqa"), **options)
    lengths = {3: 12, 40: 5, 61: 9, 62: 1, 125: 7}  # prompt length: new tokens
    prompts = [prompt(n, engine.vocab_size, seed=n) for n in lengths]
    params = [{**SEEDED, "max_new_tokens": most} for most in lengths.values()]
    waiting = [
        engine.generate(ids, **p, **BY_THE_HOST).token_ids
        for ids, p in zip(prompts, params, strict=True)
    ]
    alone = engine.stats()
    assert alone.steps_overlapped <= alone.steps - alone.tokens_decoded  # never after a token
    # A stop token, which only the host checks, while the next step already runs.
    params[2]["stop_token_ids"] = [waiting[2][4]]
    ends = [len(ids) for ids in waiting]
    ends[2] = waiting[2].index(waiting[2][4]) + 1
    before = engine.stats()
    streams = [engine.stream(ids, **p) for ids, p in zip(prompts, params, strict=True)]
    got = [stream.result() for stream in streams]
    assert [g.token_ids for g in got] == [ids[:end] for ids, end in zip(waiting, ends, strict=True)]
    after = engine.stats()
    assert after.tokens_decoded - before.tokens_decoded == sum(ends)
    assert after.steps_overlapped > (after.steps - before.steps) / 2
    assert after.slots == 0
    # Several choices fork after a step, and their steps overlap from there on.
    choices = engine.generate(prompts[0], **{**params[0], "n": 2, "seed": 9}).choices
    two = {**params[0], "n": 2, "seed": 9}
    by_the_host = engine.generate(prompts[0], **two, **BY_THE_HOST).choices
    assert [c.token_ids for c in choices] == [c.token_ids for c in by_the_host]
    # Log-probabilities are read later and delay no step.
    before = engine.stats()
    late = engine.generate(prompts[0], **params[0], logprobs=3)
    assert late.token_ids == waiting[0]
    assert [len(row.top) for row in late.logprobs] == [3] * len(waiting[0])
    after = engine.stats()
    assert after.steps_overlapped - before.steps_overlapped == after.steps - before.steps - 1
    # A prompt in chunks continues without the host.
    chunked = open_engine(zoo.folder("llama_gqa"), **options, prefill_chunk=16)
    assert chunked.generate(prompts[-1], **params[-1]).token_ids == waiting[-1]
    assert chunked.stats().steps_overlapped == chunked.stats().steps - 1 > 125 // 16


def test_pages_of_the_cpu_are_used_on_a_gpu(zoo: Zoo, tmp_path: Path, open_engine: Open) -> None:
    """A GPU uses KV that the CPU has computed, and counts it as foreign."""
    folder, pages = zoo.folder("llama_gqa"), {"page_folder": tmp_path / "pages"}
    with Engine(folder, threads=1, dtype="bfloat16", cache_memory="8MiB", **pages) as cpu:
        ids = prompt(150, cpu.vocab_size)
        handle = cpu.open(persist=True)
        with handle.advance(0, ids, **GREEDY) as stream:
            tokens = ids + stream.result().token_ids
    gpu = open_engine(folder, **EMULATED, **pages)
    back = gpu.open(persist=True)
    with back.advance(0, tokens, **GREEDY) as stream:
        got = stream.result()
    assert got.foreign_tokens == got.loaded_tokens == len(tokens) - 1
    cold = open_engine(folder, **EMULATED)
    assert got.token_ids == cold.generate(tokens, **GREEDY).token_ids


def test_options_that_a_gpu_lacks_are_refused(zoo: Zoo) -> None:
    folder = zoo.folder("llama_gqa")
    with pytest.raises(ModelError, match="float32, expected bfloat16 or float16"):
        Engine(folder, **{**EMULATED, "dtype": "float32"})
    with pytest.raises(InvalidRequest, match="device is 'gpu', expected 'auto', 'cpu', 'cuda'"):
        Engine(folder, device="gpu")
    with pytest.raises(InvalidRequest, match="deterministic is 1, expected True, False or None"):
        Engine(folder, deterministic=1)
