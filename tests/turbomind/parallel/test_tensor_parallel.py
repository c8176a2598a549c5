"""Tensor parallelism: a model cut over ranks has the results of one rank, and they keep their bits
whatever else runs, as long as the number of ranks is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import packed_files
import pytest
from checkpoints import MODELS, Zoo, make_model, prompt, reference_logits, vocab
from devices import rms
from parity import LENGTH, NEW, check_greedy, check_logits, error_of

from turbomind import Engine, InvalidRequest

pytestmark = pytest.mark.cpu_only("test_gpu_ranks.py has engines on GPUs")

Open = Callable[..., Engine]
# Why a model cannot be cut over 2 ranks, and over 4; the others can.
REFUSED = {
    2: {
        "llama_gqa_biases_tied": "3 KV heads",
        "llama_mqa_80": "5 heads",
        "qwen2_window": "7 heads",
        "qwen3_bias_window": "3 heads",
        "qwen3_moe_window": "experts with an intermediate size of 33",
        "qwen2_moe_window": "an intermediate size of 33",
        "olmoe": "3 KV heads",
    },
    4: {
        "llama_gqa_biases_tied": "6 heads",
        "llama_mqa_80": "5 heads",
        "llama_96": "2 heads",
        "qwen2_window": "7 heads",
        "qwen3_bias_window": "3 heads",
        "qwen3_moe_window": "experts with an intermediate size of 33",
        "qwen2_moe_window": "an intermediate size of 33",
        "olmoe": "6 heads",
    },
}
# Models in which each part of a layer is cut: KV heads that are replicated, windows, biases, norms,
# experts with and without an MLP, sinks, per-layer inputs.
BF16 = ["qwen2", "gemma2", "gemma3", "granite", "smollm3_window", "qwen2_moe", "gpt_oss", "gemma4",
        "gemma4_shared"]  # fmt: skip
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 12, "temperature": 0.9, "seed": 7, "logprobs": 2, "ignore_eos": True,
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_logits_of_transformers(
    name: str, tp: int, zoo: Zoo, open_engine: Open
) -> None:
    folder = zoo.folder(name)
    if why := REFUSED[tp].get(name):
        with pytest.raises(InvalidRequest, match=f"tp is {tp}, but layer [0-9]+ has {why}; exp"):
            open_engine(folder, tp=tp)
        return
    model, engine = zoo.model(name), open_engine(folder, tp=tp)
    ids = prompt(LENGTH, vocab(model))
    tolerance = check_logits(engine, ids, model)
    check_greedy(engine, model, ids, NEW, tolerance)
    whole = open_engine(folder, tp=1)
    assert np.abs(engine.logits(ids) - whole.logits(ids)).max() <= tolerance
    assert engine.fingerprint == whole.fingerprint
    assert engine.numerics_fingerprint == f"{whole.numerics_fingerprint}/tp{tp}"


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", BF16)
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_one_rank(
    name: str, tp: int, zoo: Zoo, open_engine: Open
) -> None:
    model, folder = zoo.model(name), zoo.folder(name, "bfloat16")
    prompts = [prompt(LENGTH, vocab(model), seed) for seed in (4, 5, 6)]
    exact = [reference_logits(model, ids) for ids in prompts]
    errors = []
    for ranks in (1, tp):
        engine = open_engine(folder, tp=ranks)
        errors.append(error_of(name, [engine.logits(ids) for ids in prompts], exact))
    assert errors[1] <= 1.1 * errors[0]


def results(engine: Engine, ids: list[int]) -> tuple[Any, np.ndarray]:
    got = engine.generate(ids, **SAMPLING)
    assert got.logprobs is not None
    return (got.token_ids, got.logprobs), engine.logits(ids[:100])


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma4_shared", "qwen2_moe"])
def test_bits_depend_on_the_number_of_ranks_alone(
    name: str, weights: str, zoo: Zoo, open_engine: Open
) -> None:
    quantized = {} if weights == "bfloat16" else {"quantize": weights}
    if weights == "int4":
        quantized |= {"group_size": 32}
    folder = zoo.folder(name, "bfloat16")
    if weights == "int4":
        with pytest.raises(InvalidRequest, match="is cut at multiples of 32 columns, not of"):
            open_engine(folder, tp=2, **quantized)
        return
    options = {"tp": 2, **quantized}
    engine = open_engine(folder, **options)
    ids = prompt(LENGTH, engine.vocab_size, seed=3)
    want, logits = results(open_engine(folder, **options, prefix_reuse=False), ids)
    for chunk, threads in [(1, 1), (7, 2), (64, 4)]:
        other = open_engine(folder, **options, prefill_chunk=chunk, threads=threads)
        got, rows = results(other, ids)
        assert got == want, f"chunk {chunk}, {threads} threads"
        assert np.array_equal(rows, logits)
    for _ in range(2):  # computed, then from cached pages
        got, rows = results(engine, ids)
        assert got == want
        assert np.array_equal(rows, logits)
    others = [prompt(n, engine.vocab_size, seed=n) for n in (5, 40, 90)]
    with ThreadPoolExecutor(3) as threads:
        beside = [threads.submit(engine.generate, each, **SAMPLING) for each in others]
        assert results(engine, ids)[0] == want
        for each in beside:
            assert len(each.result().token_ids) == SAMPLING["max_new_tokens"]


def test_stored_codes_are_cut_with_their_scales(tmp_path: Path, open_engine: Open) -> None:
    """GPTQ: o and down are cut between groups of 64 columns; an order of columns is refused."""
    model = make_model("Llama", {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 515})

    def folder(name: str, ordered: bool) -> Path:
        path = tmp_path / name
        config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": ordered}

        def module(name: str, weight: np.ndarray) -> Any:
            dice = np.random.default_rng(list(name.replace("up_proj", "gate_proj").encode()))
            order = dice.permutation(weight.shape[1]) if ordered else None
            return packed_files.gptq(dice, weight, bits=4, group=64, order=order)

        path.mkdir()
        return packed_files.write(model, path, config, module)

    plain = folder("plain", False)
    ids = prompt(90, 515)
    want = open_engine(plain, tp=1, kv_dtype="float32").logits(ids)
    for tp in (2, 4):
        got = open_engine(plain, tp=tp, kv_dtype="float32").logits(ids)
        # Products round x to int8 per 64 columns, the same ones on any rank; another last bit of
        # x may change one of these codes.
        assert rms(got - want) <= 3e-3 * rms(want)
    with pytest.raises(InvalidRequest, match="tp is 2, but weight layers.0.o is .*-ordered, which"):
        open_engine(folder("ordered", True), tp=2)


def test_pages_of_another_number_of_ranks_are_foreign(
    zoo: Zoo, tmp_path: Path, open_engine: Open
) -> None:
    folder, pages = zoo.folder("llama_gqa"), tmp_path / "pages"
    with Engine(folder, tp=1, threads=1, cache_memory="32MiB", page_folder=pages) as one:
        ids = prompt(LENGTH, one.vocab_size)
        with one.open(persist=True).advance(0, ids, **SAMPLING) as stream:
            tokens = ids + stream.result().token_ids
    payloads = {path: path.read_bytes() for path in pages.glob("*.kv")}
    assert payloads
    for tp in (2, 4):
        engine = open_engine(folder, tp=tp, page_folder=pages)
        cold = open_engine(folder, tp=tp, prefix_reuse=False).generate(tokens, **SAMPLING)
        mixed = engine.generate(tokens, **SAMPLING)
        assert mixed.foreign_tokens == mixed.loaded_tokens == len(tokens) - 1
        assert mixed.token_ids == cold.token_ids
        exact = engine.generate(tokens, exact=True, **SAMPLING)
        assert (exact.reused_tokens, exact.foreign_tokens) == (0, 0)
        assert exact.logprobs == cold.logprobs
        engine.close()
        assert {path: path.read_bytes()[: len(old)] for path, old in payloads.items()} == payloads
