"""Results are bit-identical under other batches, chunks, threads, eviction, forks and pressure.

Every test compares sampled token ids and log-probabilities (exact floats) with those of a request
that ran alone, in one chunk, on two threads.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import devices
import gguf
import gguf_files
import numpy as np
import packed_files
import pytest
from checkpoints import make_model

import turbomind

ISAS = devices.isas()

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "vocab_size": 515,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
# Two cache groups: full attention in the first layer, in the others a window of no page multiple.
MIXED_WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 100,
    "max_window_layers": 1,
    "eos_token_id": 2,
}
MODELS = {"llama": LLAMA, "mixed_windows": MIXED_WINDOWS}
# One model per mechanism that these two do not have.
MECHANISMS: dict[str, dict[str, Any]] = {
    "no_rotation": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 100,
    },
    "partial_longrope": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 128,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 6,
            "long_factor": [1.0, 1.5, 2.0, 4.0, 7.0, 9.0],
        },
    },
    "gemma": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 100,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 20.0,
    },
    "soft_caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 100,
        "attn_logit_softcapping": 2.0,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 20,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 72,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "shared_expert": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "head_dim": None,
        "num_experts": 20,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 72,
        "shared_expert_intermediate_size": 96,
    },
    "norms_across_heads": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "head_dim": None,
        "num_experts": 10,
        "num_experts_per_tok": 2,
    },
    "sinks": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 100,
        "num_local_experts": 10,
        "num_experts_per_tok": 3,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 40,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_theta": None,
        "sliding_window": 100,
    },
    "shared_kv_and_inputs_per_layer": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": 40,
        "hidden_size_per_layer_input": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "rope_theta": None,
        "sliding_window": 100,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 515,
    },
    "experts_beside_an_mlp": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 20,
        "top_k_experts": 4,
        "moe_intermediate_size": 72,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 40,
        "rope_theta": None,
        "sliding_window": 100,
    },
    "multipliers": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.7,
    },
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 20,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 7,
    "logprobs": 2,
    "ignore_eos": True,
}
# Engine options of quantized weights.
QUANTIZED = pytest.mark.parametrize(
    "weights",
    [
        pytest.param(options, marks=pytest.mark.cpu_only("a GPU refuses them"), id=name)
        for name, options in {
            "int8": {"quantize": "int8"},
            "int4": {"quantize": "int4", "group_size": 64, "head": "int4"},
        }.items()
    ],
)
Signature = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a config.json per model; the weights are dummies."""
    out = {}
    others = {name: LLAMA | changes for name, changes in MECHANISMS.items()}
    for name, config in (MODELS | others).items():
        out[name] = tmp_path_factory.mktemp(name)
        (out[name] / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def make_engine(model: Path, **options: Any) -> turbomind.Engine:
    defaults: dict[str, Any] = {
        "threads": 2, "cache_memory": "64MiB", "prefill_chunk": 512, "load_format": "dummy",
    }  # fmt: skip
    return turbomind.Engine(model, **{**defaults, **options})


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def signature(generation: turbomind.Generation) -> Signature:
    assert generation.logprobs is not None
    return list(generation.token_ids), [lp.logprob for lp in generation.logprobs]


def generate(engine: turbomind.Engine, ids: list[int], **changes: Any) -> Signature:
    return signature(engine.generate(ids, **{**SAMPLING, **changes}))


def generate_on(handle: turbomind.Handle, **changes: Any) -> Signature:
    tokens: list[int] = []
    logprobs: list[float] = []
    for event in handle.generate(**{**SAMPLING, **changes}):
        assert event.error is None, event.error
        tokens += event.token_ids
        logprobs += [lp.logprob for lp in event.logprobs or []]
    return tokens, logprobs


def page_bytes(model: Path, **options: Any) -> int:
    """Returns the bytes of a page of all cache groups."""
    with make_engine(model, **options) as engine:
        return sum(group.page_bytes for group in engine.stats().groups)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", devices.FLOAT16_KV, devices.FLOAT32])
@pytest.mark.parametrize("isa", ISAS)
def test_chunks_and_threads_do_not_change_results(model: Path, isa: str, kv_dtype: str) -> None:
    ids = prompt(333)
    options = {"isa": isa, "kv_dtype": kv_dtype, "dtype": "bfloat16"}
    with make_engine(model, **options) as engine:
        expected = generate(engine, ids)
        logits = engine.logits(ids[:150])
    for chunk, threads in [(1, 2), (7, 1), (64, 2), (512, 1)]:
        with make_engine(model, **options, prefill_chunk=chunk, threads=threads) as engine:
            assert generate(engine, ids) == expected, f"chunk {chunk}, {threads} threads"
            assert np.array_equal(engine.logits(ids[:150]), logits)


@pytest.mark.parametrize("dtype", ["float16", devices.FLOAT32])
def test_chunks_and_threads_do_not_change_results_of_other_weights(model: Path, dtype: str) -> None:
    ids = prompt(200)
    with make_engine(model, dtype=dtype) as engine:
        expected = generate(engine, ids)
    with make_engine(model, dtype=dtype, prefill_chunk=7, threads=1) as engine:
        assert generate(engine, ids) == expected


@QUANTIZED
@pytest.mark.parametrize("isa", ISAS)
def test_chunks_and_threads_do_not_change_results_of_quantized_weights(
    model: Path, isa: str, weights: dict[str, Any]
) -> None:
    ids = prompt(200)
    with make_engine(model, isa=isa, **weights) as engine:
        expected = generate(engine, ids)
        logits = engine.logits(ids[:150])
    for chunk, threads in [(1, 1), (7, 2), (64, 1)]:
        with make_engine(model, isa=isa, **weights, prefill_chunk=chunk, threads=threads) as engine:
            assert generate(engine, ids) == expected, f"chunk {chunk}, {threads} threads"
            assert np.array_equal(engine.logits(ids[:150]), logits)


@QUANTIZED
def test_other_requests_do_not_change_results_of_quantized_weights(
    model: Path, weights: dict[str, Any]
) -> None:
    check_fifteen_others(model, **weights)


@pytest.fixture(scope="module", params=["gguf", "gptq"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the kind Q4_K_M, with two types in one projection, or GPTQ with `desc_act`."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 515}
    model = make_model("Llama", {**sizes, "max_position_embeddings": 2048})
    if request.param == "gptq":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}

        def module(name: str, weight: np.ndarray) -> Any:
            dice = np.random.default_rng(list(name.replace("up_proj", "gate_proj").encode()))
            order = dice.permutation(weight.shape[1])
            return packed_files.gptq(dice, weight, bits=4, group=64, order=order)

        return packed_files.write(model, folder, config, module)
    model.save_pretrained(folder)
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "BF16"}

    def kind(name: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], "Q4_K")]

    return gguf_files.write_gguf(folder, folder / "model.gguf", kind)


@pytest.mark.cpu_only("a GPU refuses them")
@pytest.mark.parametrize("isa", ISAS)
def test_chunks_threads_and_requests_do_not_change_results_of_stored_codes(
    stored: Path, isa: str
) -> None:
    ids, options = prompt(150), {"isa": isa, "load_format": "auto"}
    with make_engine(stored, **options) as engine:
        expected = generate(engine, ids)
        logits = engine.logits(ids)
    for chunk, threads in [(1, 1), (64, 2)]:
        with make_engine(stored, **options, prefill_chunk=chunk, threads=threads) as engine:
            assert generate(engine, ids) == expected, f"chunk {chunk}, {threads} threads"
            assert np.array_equal(engine.logits(ids), logits)
    if isa == ISAS[0]:
        check_fifteen_others(stored, **options)


@pytest.mark.parametrize("isa", ISAS)
def test_fifteen_other_requests_do_not_change_results(model: Path, isa: str) -> None:
    check_fifteen_others(model, isa=isa)


def check_fifteen_others(model: Path, **options: Any) -> None:
    prompts = [
        prompt(length, seed) for seed, length in enumerate([1, 63, 64, 65, 127, 128, 200, 5] * 2)
    ]
    with make_engine(model, **options, prefix_reuse=False) as engine:
        solo = [generate(engine, ids, seed=i) for i, ids in enumerate(prompts)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(
                pool.map(lambda item: generate(engine, item[1], seed=item[0]), enumerate(prompts))
            )
    assert together == solo


@pytest.mark.parametrize("isa", ISAS)
def test_reuse_and_eviction_do_not_change_results(model: Path, isa: str) -> None:
    ids = prompt(300)
    with make_engine(model, isa=isa) as engine:
        first = generate(engine, ids)
        before = engine.stats()
        again = generate(engine, ids)
        reused = engine.stats()
        assert reused.tokens_reused - before.tokens_reused >= 256
        assert reused.tokens_prefilled - before.tokens_prefilled == 300 - 256
        engine.evict()
        assert engine.stats().pages_cached == 0
        evicted = generate(engine, ids)
        assert engine.stats().tokens_prefilled - reused.tokens_prefilled == 300
        # Pages of another request serve a prompt with the same prefix.
        longer = ids[:200] + prompt(60, seed=9)
        shared = generate(engine, longer)
    with make_engine(model, isa=isa, prefix_reuse=False) as engine:
        assert generate(engine, longer) == shared
    assert again == first
    assert evicted == first


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_mechanism_depends_on_batch_chunks_threads_or_eviction(
    name: str, folders: dict[str, Path]
) -> None:
    check_mechanism(folders[name])


@QUANTIZED
@pytest.mark.parametrize("name", ["experts", "experts_beside_an_mlp"])
def test_no_quantized_expert_depends_on_batch_chunks_threads_or_eviction(
    name: str, weights: dict[str, Any], folders: dict[str, Path]
) -> None:
    check_mechanism(folders[name], **weights)


def check_mechanism(folder: Path, **options: Any) -> None:
    ids = prompt(333)
    with make_engine(folder, **options) as engine:
        alone = generate(engine, ids)
    options |= {"threads": 1, "prefill_chunk": 65, "cache_pages": 24}
    with make_engine(folder, **options) as engine:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(generate, engine, prompt(n, n)) for n in (20, 150, 400)]
            assert generate(engine, ids) == alone
            for other in others:
                other.result()
        assert generate(engine, ids) == alone
        generate(engine, prompt(1400, 9))  # evicts the pages
        assert generate(engine, ids) == alone


@pytest.mark.parametrize("tail", [1, 63])
def test_a_handle_equals_a_request_without_one(model: Path, tail: int) -> None:
    """Three turns on one handle equal requests that prefill everything each time."""
    with make_engine(model) as reusing, make_engine(model, prefix_reuse=False) as fresh:
        history: list[int] = []
        with reusing.open() as handle:
            for round_ in range(3):
                new = prompt(64 * round_ + tail, seed=round_)
                handle.append(new)
                history += new
                before = reusing.stats().tokens_prefilled
                got = generate_on(handle)
                prefilled = reusing.stats().tokens_prefilled - before
                assert got == generate(fresh, history)
                # The last sampled token of a round has no KV until the next one.
                assert prefilled == len(new) + (1 if round_ else 0)
                history += got[0]
            assert handle.token_ids == history


@pytest.mark.parametrize("isa", ISAS)
def test_forks_and_truncated_handles_equal_fresh_requests(model: Path, isa: str) -> None:
    ids = prompt(150)
    with (
        make_engine(model, isa=isa) as engine,
        make_engine(model, isa=isa, prefix_reuse=False) as fresh,
    ):
        with engine.open() as root:
            root.append(ids)
            reply = generate_on(root)
            base = ids + reply[0]
            with root.fork() as left, root.fork() as right:
                left.append([5, 6, 7])
                right.append([8])
                with ThreadPoolExecutor(2) as pool:
                    results = list(pool.map(generate_on, [left, right]))
                assert results[0] == generate(fresh, [*base, 5, 6, 7])
                assert results[1] == generate(fresh, [*base, 8])
            for length in (128, 127, 100, 64, 1):  # at, before and inside page borders
                root.truncate(length)
                root.append([9, 10])
                assert generate_on(root) == generate(fresh, [*base[:length], 9, 10])
                root.truncate(length)
        engine.evict()
        stats = engine.stats()
        assert stats.pages_free == stats.pages_total


@pytest.mark.parametrize("isa", ISAS[-1:])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", devices.FLOAT16_KV, devices.FLOAT32])
def test_preemption_does_not_change_results(model: Path, isa: str, kv_dtype: str) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate([70, 100, 130, 64, 90, 1])]
    options = {"isa": isa, "kv_dtype": kv_dtype}
    tiny = 4 * page_bytes(model, **options)
    with make_engine(model, **options, prefix_reuse=False) as roomy:
        expected = [
            generate(roomy, ids, seed=i, max_new_tokens=60) for i, ids in enumerate(prompts)
        ]
    with make_engine(model, **options, cache_memory=tiny) as engine:
        assert engine.stats().pages_total in (4, 8)
        for _ in range(20):  # on a busy machine requests may come so late that none is preempted
            for _ in range(30):  # the engine now expects short replies, and admits too many
                generate(engine, [1], max_new_tokens=1)
            with ThreadPoolExecutor(len(prompts)) as pool:
                got = list(
                    pool.map(
                        lambda item: generate(engine, item[1], seed=item[0], max_new_tokens=60),
                        enumerate(prompts),
                    )
                )
            assert got == expected
            if engine.stats().preemptions > 0:
                break
        assert engine.stats().preemptions > 0
        stats = engine.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_referenced == stats.pages_total
        assert stats.pages_referenced == 0


def test_choices_share_the_pages_of_the_prompt(model: Path) -> None:
    ids = prompt(140)
    with make_engine(model) as engine:
        result = engine.generate(ids, n=4, **SAMPLING)
        assert engine.stats().tokens_prefilled == 140
        assert len({tuple(c.token_ids) for c in result.choices}) > 1
    # A choice does not depend on the number of choices.
    with make_engine(model) as engine:
        pair = engine.generate(ids, n=2, **SAMPLING)
    for a, b in zip(pair.choices, result.choices, strict=False):
        assert list(a.token_ids) == list(b.token_ids)


def test_score_and_logits_agree(model: Path) -> None:
    ids = prompt(200)
    with make_engine(model) as engine:
        logits = engine.logits(ids).astype(np.float64)
        scores = engine.score(ids)
        greedy = engine.generate(ids[:150], max_new_tokens=1, temperature=0, ignore_eos=True)
    top = logits.max(axis=1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    expected = logprobs[np.arange(199), ids[1:]]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert greedy.token_ids[0] == int(logits[149].argmax())
