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
from checkpoints import MODELS, Zoo, prompt, reference_logits, rounded, vocab
from devices import rms
from parity import LENGTH, NEW, check_greedy, check_logits, error_of

import turbomind

Open = Callable[..., turbomind.Engine]

BF16 = [
    "llama_gqa_biases_tied", "llama_96", "llama_yarn", "mistral_window", "qwen2", "qwen3",
    "phi3_longrope", "smollm3_window", "granite", "gemma", "gemma2", "gemma3", "qwen3_moe",
    "qwen3_moe_window", "mixtral", "qwen2_moe", "olmoe", "granite_moe",
    "gpt_oss", "gemma4", "gemma4_shared", "gemma4_moe",
]  # fmt: skip
HEADS_OF_14 = pytest.param(
    "olmoe", marks=pytest.mark.cpu_only("a GPU refuses heads that are no multiple of 8 columns")
)
ISAS = devices.isas()
INTERNLM2 = ["llama_mha", "llama_gqa"]


@pytest.mark.parametrize("name", [HEADS_OF_14 if name == "olmoe" else name for name in MODELS])
def test_every_family_has_the_logits_of_transformers(
    name: str, zoo: Zoo, open_engine: Open
) -> None:
    model = zoo.model(name)
    engine = open_engine(zoo.folder(name))
    dtype = "bfloat16" if devices.ON_GPU else "float32"
    assert engine.info.dtype == engine.info.kv_dtype == dtype
    ids = prompt(LENGTH, vocab(model))
    tolerance = check_logits(engine, ids, model)
    check_greedy(engine, model, ids, NEW, tolerance)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "granite_moe", "gpt_oss", "gemma4_moe",
             "qwen3_vl_moe"],
)  # fmt: skip
@pytest.mark.cpu_only("names of tensors are the same on a GPU")
def test_stacked_experts_of_transformers_5_have_the_same_logits(
    name: str, zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    """As `save_pretrained` writes them in the form of its modules."""
    model = zoo.model(name)
    model.save_pretrained(tmp_path, save_original_format=False)
    ids = prompt(LENGTH, vocab(model))
    check_logits(open_engine(tmp_path, **devices.EXACT), ids, model)


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
    ids = prompt(LENGTH, vocab(model))
    check_logits(engine, ids, model)
    before = engine.stats()
    result = engine.generate(
        ids[:70], n=rows, seed=1, temperature=1, max_new_tokens=new, ignore_eos=True,
        logprobs=engine.vocab_size,
    )  # fmt: skip
    after = engine.stats()
    assert after.tokens_decoded - before.tokens_decoded == rows * new
    assert after.steps - before.steps <= new + 2, "the rows were not decoded together"
    sixteen, ours, theirs, yardstick = rounded(model, "bfloat16"), [], [], []
    for choice in result.choices:
        tokens = ids[:70] + choice.token_ids
        theirs.append(reference_logits(model, tokens)[69:-1])
        yardstick.append(reference_logits(sixteen, tokens)[69:-1])
        ours.append([[row[1] for row in sorted(entry.top)] for entry in choice.logprobs])
    assert len({tuple(choice.token_ids) for choice in result.choices}) > rows / 2
    own, exact, bound = (centered(each) for each in (ours, theirs, yardstick))
    assert rms(own - exact) <= 1.1 * rms(bound - exact) < 0.1 * rms(exact)


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
    ids = prompt(LENGTH, vocab(model), seed=2)
    engine = open_engine(zoo.folder(name), isa=isa)
    check_logits(engine, ids, model)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129])
def test_prompts_that_end_at_page_borders(length: int, zoo: Zoo, open_engine: Open) -> None:
    model = zoo.model("mistral_window")
    ids = prompt(length, vocab(model), seed=3)
    engine = open_engine(zoo.folder("mistral_window"))
    check_logits(engine, ids, model)


def test_dynamic_ntk_equals_transformers_beyond_its_length(zoo: Zoo, open_engine: Open) -> None:
    """transformers computes the table for the length it sees, so the lengths must agree."""
    model = zoo.model("llama_dynamic")
    ids = prompt(300, vocab(model))
    engine = open_engine(zoo.folder("llama_dynamic"), rope_length=300)
    assert engine.info.description.max_context == 300
    check_logits(engine, ids, model)
    plain = open_engine(zoo.folder("llama_dynamic"))
    with pytest.raises(turbomind.ContextFull):
        plain.logits(ids)


@pytest.mark.parametrize("name", INTERNLM2)
def test_internlm2_is_a_llama(name: str, zoo: Zoo, open_engine: Open) -> None:
    model = zoo.model(name)
    engine = open_engine(zoo.internlm2(name))
    ids = prompt(LENGTH, vocab(model))
    tolerance = check_logits(engine, ids, model)
    check_greedy(engine, model, ids, NEW, tolerance)


def test_internlm2_biases_are_applied(zoo: Zoo, open_engine: Open) -> None:
    from checkpoints import make_model, save_as_internlm2

    model = make_model("Llama", {"attention_bias": True, "num_key_value_heads": 2})
    folder = zoo.root / "internlm2-biases"
    save_as_internlm2(model, folder)
    ids = prompt(40, vocab(model))
    check_logits(open_engine(folder), ids, model)


@pytest.mark.parametrize(
    ("name", "isa"),
    dict.fromkeys([*((name, "auto") for name in BF16), *((BF16[0], isa) for isa in ISAS)]),
)
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_transformers(
    name: str, isa: str, zoo: Zoo, open_engine: Open
) -> None:
    """The error against float32 is at most 1.1 times that of the reference in bfloat16."""
    model = zoo.model(name)
    sixteen = rounded(model, "bfloat16")
    prompts = [prompt(LENGTH, vocab(model), seed) for seed in (4, 5, 6)]
    exact = [reference_logits(model, ids) for ids in prompts]
    theirs = [reference_logits(sixteen, ids) for ids in prompts]
    engine = open_engine(zoo.folder(name, "bfloat16"), isa=isa)
    assert engine.info.dtype == engine.info.kv_dtype == "bfloat16"
    ours = [engine.logits(ids) for ids in prompts]
    assert error_of(name, ours, exact) <= 1.1 * error_of(name, theirs, exact)


@pytest.mark.parametrize(
    ("name", "isa"),
    dict.fromkeys([*((name, "auto") for name in BF16), *((BF16[0], isa) for isa in ISAS)]),
)
def test_float16_logits_are_as_close_to_float32_as_those_of_transformers(
    name: str, isa: str, zoo: Zoo, open_engine: Open
) -> None:
    """With KV in float16 the error against float32 is at most 1.1 times that of the reference in
    float16, and less than with KV in bfloat16."""
    model = zoo.model(name)
    sixteen = rounded(model, "float16")
    prompts = [prompt(LENGTH, vocab(model), seed) for seed in (4, 5, 6)]
    exact = [reference_logits(model, ids) for ids in prompts]
    theirs = [reference_logits(sixteen, ids) for ids in prompts]
    folder = zoo.folder(name, "float16")

    def error(kv_dtype: str) -> float:
        engine = open_engine(folder, isa=isa, kv_dtype=kv_dtype)
        assert (engine.info.dtype, engine.info.kv_dtype) == ("float16", kv_dtype)
        return error_of(name, [engine.logits(ids) for ids in prompts], exact)

    ours = error("float16")
    assert ours <= 1.1 * error_of(name, theirs, exact)
    assert devices.ON_GPU or ours < 0.5 * error("bfloat16")


def test_float16_weights_have_the_logits_of_transformers(zoo: Zoo, open_engine: Open) -> None:
    """float16 weights hold these checkpoints exactly, up to subnormals; KV in float32, on a GPU in
    float16."""
    model = zoo.model("qwen2")
    ids = prompt(LENGTH, vocab(model))
    kv_dtype = "auto" if devices.ON_GPU else "float32"
    engine = open_engine(zoo.folder("qwen2"), dtype="float16", kv_dtype=kv_dtype)
    check_logits(engine, ids, model, dtype="float16")


def test_shards_and_one_file_are_the_same_model(zoo: Zoo, open_engine: Open) -> None:
    one, many = zoo.folder("qwen3"), zoo.folder("qwen3", shard="50KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    ids = prompt(70, 131)
    assert np.array_equal(open_engine(one).logits(ids), open_engine(many).logits(ids))


def test_score_and_logprobs_are_log_softmax(zoo: Zoo, open_engine: Open) -> None:
    import torch

    model = zoo.model("qwen2_window")
    engine = open_engine(zoo.folder("qwen2_window"))
    ids = prompt(LENGTH, vocab(model))
    theirs = reference_logits(model, ids)
    check_logits(engine, ids, model)
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
