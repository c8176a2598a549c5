"""Logits and greedy tokens against transformers, on random small models of every family.

The CPU computes in float32. A GPU has 16 bits: its logits must be as close to the reference as
those of the CPU with weights and KV of 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from assets import asset
from checkpoints import MODELS, Zoo, prompt, reference_logits
from devices import rms

import turbomind

Open = Callable[..., turbomind.Engine]

LENGTH = 150  # two full pages and a tail
NEW = 10
BF16 = ["llama_gqa_biases_tied", "llama_96", "llama_yarn", "mistral_window", "qwen2", "qwen3"]
ISAS = devices.isas()
INTERNLM2 = ["llama_mha", "llama_gqa"]


def check_logits(
    engine: turbomind.Engine, ids: list[int], theirs: np.ndarray, **options: Any
) -> float:
    """Returns the tolerance of a logit; `options` are those of the engine."""
    ours = engine.logits(ids)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    largest = np.abs(theirs).max()
    assert np.ptp(theirs, axis=1).min() > 1e-2 * largest, "the reference is flat: nothing is tested"
    if devices.ON_GPU:
        rounded = devices.rounding(engine.info.path, ids, theirs, **options)
        assert rms(ours - theirs) <= 1.5 * rms(rounded) < 0.1 * rms(theirs)
        return 3 * float(np.abs(rounded).max())
    tolerance = 1e-4 * float(largest)
    assert np.abs(ours - theirs).max() <= tolerance
    return tolerance


def check_greedy(
    engine: turbomind.Engine, model: Any, ids: list[int], count: int, tolerance: float
) -> None:
    """Checks that tokens are the reference's, unless its two best are within the tolerance."""
    result = engine.generate(ids, temperature=0, max_new_tokens=count, ignore_eos=True)
    assert len(result.token_ids) == count
    theirs = reference_logits(model, ids + result.token_ids)[len(ids) - 1 : -1]
    best = theirs.max(axis=1)
    chosen = theirs[np.arange(count), result.token_ids]
    assert (best - chosen <= tolerance).all()


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_logits_of_transformers(
    name: str, zoo: Zoo, open_engine: Open
) -> None:
    model = zoo.model(name)
    engine = open_engine(zoo.folder(name))
    dtype = "bfloat16" if devices.ON_GPU else "float32"
    assert engine.info.dtype == engine.info.kv_dtype == dtype
    ids = prompt(LENGTH, model.config.vocab_size)
    tolerance = check_logits(engine, ids, reference_logits(model, ids))
    check_greedy(engine, model, ids, NEW, tolerance)


@pytest.mark.skipif(not devices.ON_GPU, reason="the CPU has one way to compute")
@pytest.mark.parametrize("deterministic", [False, True])
def test_default_and_deterministic_logits_are_those_of_transformers(
    deterministic: bool, zoo: Zoo, open_engine: Open
) -> None:
    """The other tests are deterministic. By default cuBLASLt, if installed, multiplies more than 16
    rows: those of a prompt, and of a batch that decodes."""
    model, folder = zoo.model("llama_gqa"), zoo.folder("llama_gqa")
    rows, new = 20, 5
    engine = open_engine(folder, deterministic=deterministic, max_batch_size=rows)
    ids = prompt(LENGTH, model.config.vocab_size)
    check_logits(engine, ids, reference_logits(model, ids))
    before = engine.stats()
    result = engine.generate(
        ids[:70], n=rows, seed=1, temperature=1, max_new_tokens=new, ignore_eos=True,
        logprobs=engine.vocab_size,
    )  # fmt: skip
    after = engine.stats()
    assert after.tokens_decoded - before.tokens_decoded == rows * new
    assert after.steps - before.steps <= new + 2, "the rows were not decoded together"
    ours, theirs, rounded = [], [], []
    with turbomind.Engine(
        folder, device="cpu", dtype="bfloat16", threads=2, cache_memory="32MiB"
    ) as cpu:
        for choice in result.choices:
            tokens = ids[:70] + choice.token_ids
            theirs.append(reference_logits(model, tokens)[69:-1])
            rounded.append(cpu.logits(tokens)[69:-1])
            ours.append([[row[1] for row in sorted(entry.top)] for entry in choice.logprobs])
    assert len({tuple(choice.token_ids) for choice in result.choices}) > rows / 2
    own, exact, sixteen = (centered(each) for each in (ours, theirs, rounded))
    assert rms(own - exact) <= 1.5 * rms(sixteen - exact) < 0.1 * rms(exact)


def centered(logits: Any) -> np.ndarray:
    """Subtracts each row's mean, so that log-probabilities compare with logits."""
    values = np.asarray(logits, np.float64)
    return values - values.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["llama_gqa_biases_tied", "qwen3_bias_window"])
def test_every_isa_has_the_logits_of_transformers(
    name: str, isa: str, zoo: Zoo, open_engine: Open
) -> None:
    model = zoo.model(name)
    ids = prompt(LENGTH, model.config.vocab_size, seed=2)
    engine = open_engine(zoo.folder(name), isa=isa)
    check_logits(engine, ids, reference_logits(model, ids))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129])
def test_prompts_that_end_at_page_borders(length: int, zoo: Zoo, open_engine: Open) -> None:
    model = zoo.model("mistral_window")
    ids = prompt(length, model.config.vocab_size, seed=3)
    engine = open_engine(zoo.folder("mistral_window"))
    check_logits(engine, ids, reference_logits(model, ids))


def test_dynamic_ntk_equals_transformers_beyond_its_length(zoo: Zoo, open_engine: Open) -> None:
    """transformers computes the table for the length it sees, so the lengths must agree."""
    model = zoo.model("llama_dynamic")
    ids = prompt(300, model.config.vocab_size)
    engine = open_engine(zoo.folder("llama_dynamic"), rope_length=300)
    assert engine.info.description.max_context == 300
    check_logits(engine, ids, reference_logits(model, ids), rope_length=300)
    plain = open_engine(zoo.folder("llama_dynamic"))
    with pytest.raises(turbomind.ContextFull):
        plain.logits(ids)


@pytest.mark.parametrize("name", INTERNLM2)
def test_internlm2_is_a_llama(name: str, zoo: Zoo, open_engine: Open) -> None:
    model = zoo.model(name)
    engine = open_engine(zoo.internlm2(name))
    ids = prompt(LENGTH, model.config.vocab_size)
    tolerance = check_logits(engine, ids, reference_logits(model, ids))
    check_greedy(engine, model, ids, NEW, tolerance)


def test_internlm2_biases_are_applied(zoo: Zoo, open_engine: Open) -> None:
    from checkpoints import make_model, save_as_internlm2

    model = make_model("Llama", {"attention_bias": True, "num_key_value_heads": 2})
    folder = zoo.root / "internlm2-biases"
    save_as_internlm2(model, folder)
    ids = prompt(40, model.config.vocab_size)
    check_logits(open_engine(folder), ids, reference_logits(model, ids))


@pytest.mark.parametrize(
    ("name", "isa"),
    dict.fromkeys([*((name, "auto") for name in BF16), *((BF16[0], isa) for isa in ISAS)]),
)
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(
    name: str, isa: str, zoo: Zoo, open_engine: Open
) -> None:
    """The error against float32 is at most 1.1 times that of the reference in bfloat16."""
    model, rounded = zoo.model(name), zoo.rounded_model(name, "bfloat16")
    prompts = [prompt(LENGTH, model.config.vocab_size, seed) for seed in (4, 5, 6)]
    exact = [reference_logits(model, ids) for ids in prompts]
    theirs = [reference_logits(rounded, ids) for ids in prompts]
    engine = open_engine(zoo.folder(name, "bfloat16"), isa=isa)
    assert engine.info.dtype == engine.info.kv_dtype == "bfloat16"
    ours = [engine.logits(ids) for ids in prompts]
    error = rms(np.concatenate(ours) - np.concatenate(exact))
    assert error <= 1.1 * rms(np.concatenate(theirs) - np.concatenate(exact))


@pytest.mark.parametrize(
    ("name", "isa"),
    dict.fromkeys([*((name, "auto") for name in BF16), *((BF16[0], isa) for isa in ISAS)]),
)
def test_float16_logits_are_as_close_to_float32_as_those_of_transformers(
    name: str, isa: str, zoo: Zoo, open_engine: Open
) -> None:
    """With KV in float16 the error against float32 is at most 1.1 times that of the reference in
    float16, and less than with KV in bfloat16."""
    model, rounded = zoo.model(name), zoo.rounded_model(name, "float16")
    prompts = [prompt(LENGTH, model.config.vocab_size, seed) for seed in (4, 5, 6)]
    exact = np.concatenate([reference_logits(model, ids) for ids in prompts])
    theirs = np.concatenate([reference_logits(rounded, ids) for ids in prompts])
    folder = zoo.folder(name, "float16")

    def error(kv_dtype: str) -> float:
        engine = open_engine(folder, isa=isa, kv_dtype=kv_dtype)
        assert (engine.info.dtype, engine.info.kv_dtype) == ("float16", kv_dtype)
        return rms(np.concatenate([engine.logits(ids) for ids in prompts]) - exact)

    ours = error("float16")
    assert ours <= 1.1 * rms(theirs - exact)
    assert devices.ON_GPU or ours < 0.5 * error("bfloat16")


def test_float16_weights_have_the_logits_of_transformers(zoo: Zoo, open_engine: Open) -> None:
    """float16 weights hold these checkpoints exactly, up to subnormals; KV in float32, on a GPU in
    float16."""
    model = zoo.model("qwen2")
    ids = prompt(LENGTH, model.config.vocab_size)
    kv_dtype = "auto" if devices.ON_GPU else "float32"
    engine = open_engine(zoo.folder("qwen2"), dtype="float16", kv_dtype=kv_dtype)
    check_logits(engine, ids, reference_logits(model, ids), dtype="float16")


def test_shards_and_one_file_are_the_same_model(zoo: Zoo, open_engine: Open) -> None:
    one, many = zoo.folder("qwen3"), zoo.folder("qwen3", shard="50KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    ids = prompt(70, 131)
    assert np.array_equal(open_engine(one).logits(ids), open_engine(many).logits(ids))


def test_score_and_logprobs_are_log_softmax(zoo: Zoo, open_engine: Open) -> None:
    import torch

    model = zoo.model("qwen2_window")
    engine = open_engine(zoo.folder("qwen2_window"))
    ids = prompt(LENGTH, model.config.vocab_size)
    theirs = reference_logits(model, ids)
    check_logits(engine, ids, theirs)
    logits = torch.from_numpy(engine.logits(ids) if devices.ON_GPU else theirs).double()
    table = torch.log_softmax(logits, dim=-1).numpy()
    expected = table[np.arange(LENGTH - 1), ids[1:]]
    assert np.allclose(engine.score(ids), expected, atol=1e-3)
    result = engine.generate(ids, temperature=0, max_new_tokens=1, logprobs=3, ignore_eos=True)
    (entry,) = result.logprobs
    order = np.argsort(-table[-1])[:3]
    assert [i for i, _ in entry.top] == [int(i) for i in order]
    assert entry.logprob == entry.top[0][1] == pytest.approx(table[-1].max(), abs=1e-3)


@pytest.mark.cpu_only("the golden tokens are those of float32")
def test_a_trained_model_repeats_its_stored_stories(open_engine: Open) -> None:
    """A trained model generates its stored stories token for token."""
    folder: Path = asset("models/stories260K/hf")
    golden = json.loads(asset("models/stories260K/golden.json").read_text())
    engine = open_engine(folder)
    for entry in golden["prompts"]:
        result = engine.generate(entry["prompt_ids"], temperature=0, max_new_tokens=200)
        assert result.token_ids == entry["greedy_ids"]
        first = np.asarray(entry["first_logits"], np.float32)
        ours = engine.logits(entry["prompt_ids"])[-1]
        assert np.abs(ours - first).max() <= 1e-4 * np.abs(first).max()
