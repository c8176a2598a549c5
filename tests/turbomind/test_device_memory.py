"""Memory and default options of an engine on each device; models and requests on emulated GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from checkpoints import TINY, Zoo, prompt, reference_logits, relative, rounded

from turbomind import _C, Engine, Handle, InvalidRequest
from turbomind.config.defaults import CPU, EMULATED, GPU, CacheSize, defaults
from turbomind.machine import available_memory, parse_share, physical_memory

Open = Callable[..., Engine]
EMULATED_GPU = {"device": "cuda_emulated", "threads": 1}
SMALL = {**EMULATED_GPU, "cache_memory": "8MiB"}
GREEDY = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_shares_are_percentages_above_0_and_up_to_100() -> None:
    assert parse_share("x", "90%") == 0.9
    assert parse_share("x", " 12.5 % ") == 0.125
    assert parse_share("x", "2GiB") is None
    assert parse_share("x", 90) is None
    for wrong in ("0%", "101%", "%", "-5%", "half%", "5%%"):
        with pytest.raises(InvalidRequest, match="x is .*expected a share above 0%"):
            parse_share("x", wrong)
    with pytest.raises(InvalidRequest, match="'lots', expected bytes .* or a share like '90%'"):
        CacheSize("lots")
    assert 0 < available_memory() <= physical_memory()
    assert CacheSize("50%").on_host(needed=physical_memory()) == 0


def test_defaults_depend_on_the_device() -> None:
    def gpu(kind: str) -> list[_C.GpuOptions]:
        return [_C.GpuOptions(kind, 0, False, [])]

    assert defaults([]) == CPU
    assert (CPU.cache_memory, CPU.prefill_chunk, CPU.step_ms) == ("2GiB", 512, 100.0)
    assert defaults(gpu("cuda")) == GPU
    assert (GPU.cache_memory, GPU.prefill_chunk, GPU.step_ms) == ("90%", 2048, 25.0)
    assert defaults(gpu("emulated")) == EMULATED


def test_a_share_on_the_cpu_is_of_available_memory(config: Path, open_engine: Open) -> None:
    """The CPU backs memory as it is used, so a share is computed and not reserved."""
    engine = open_engine(config, device="cpu", load_format="dummy", cache_memory="1%")
    assert 0 < engine.stats().cache_bytes <= physical_memory() // 100
    assert engine.library_note is None


def test_info_takes_a_share_too(config: Path) -> None:
    done = command.lmchat("info", str(config), "--cache-memory", "10%", "--json")
    model = json.loads(done.stdout)["model"]
    assert 0 < model["cache_bytes"] <= physical_memory() // 10


def test_a_share_on_a_gpu_is_of_its_free_memory(config: Path, open_engine: Open) -> None:
    share = open_engine(config, **EMULATED_GPU, load_format="dummy", cache_memory="5%")
    total = next(d.total_bytes for d in _C.gpu_devices() if d.kind == "emulated")
    assert 0.02 * total < share.stats().cache_bytes <= 0.05 * total
    assert share.library_note == "our own kernels"
    default = open_engine(config, **EMULATED_GPU, load_format="dummy", cache_memory=None)
    assert 60 << 20 < default.stats().cache_bytes <= 64 << 20
    for options, match in (
        ({"cache_memory": "900TiB"}, "KV cache [0-9]+ .cache_memory, .* the device's free memory"),
        ({"cache_memory": 1000}, "cache_memory is 1000 bytes, expected at least one page"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            Engine(config, **{**SMALL, **options}, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_gqa", {"dtype": "float16"}),
        ("llama_gqa", {}),  # of a float32 checkpoint: bfloat16
        ("llama_gqa_biases_tied", {}),
        ("llama_mqa_80", {"dtype": "float16"}),
        ("qwen3_bias_window", {}),
        ("llama_yarn_all", {}),
    ],
)
def test_a_gpu_runs_models_of_all_shapes(
    name: str, options: dict[str, Any], zoo: Zoo, open_engine: Open
) -> None:
    """A model that loads runs every kind of step."""
    gpu = open_engine(zoo.folder(name), **SMALL, **options)
    dtype = options.get("dtype", "bfloat16")
    assert (gpu.info.dtype, gpu.info.kv_dtype) == (dtype, dtype)
    model, ids = zoo.model(name), prompt(21, gpu.vocab_size)
    wanted = reference_logits(model, ids)
    bound = 1.1 * relative(reference_logits(rounded(model, dtype), ids), wanted)
    assert relative(gpu.logits(ids), wanted) < bound < 0.1
    assert len(gpu.generate(ids, **GREEDY).token_ids) == 4


def test_a_gpu_runs_requests_of_all_kinds(config: Path, open_engine: Open) -> None:
    """Requests with more logits than a step holds, several choices and every processor."""
    engine = open_engine(config, **SMALL, load_format="dummy", max_batch_size=3)
    ids = prompt(150, engine.vocab_size)
    rows = engine.logits(ids).astype(np.float64)
    logprobs = rows - np.log(np.sum(np.exp(rows - rows.max(1, keepdims=True)), 1, keepdims=True))
    logprobs -= rows.max(1, keepdims=True)
    wanted = logprobs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(engine.score(ids), wanted, atol=1e-3)
    greedy = engine.generate(ids[:9], **GREEDY).token_ids
    edited = engine.generate(ids[:9], **GREEDY, repetition_penalty=1.3, logit_bias={5: 100.0})
    assert edited.token_ids == [5] * 4
    many = engine.stream(ids[:9], n=7, **{**GREEDY, "temperature": 1.0, "seed": 5})
    choices: dict[int, list[int]] = {}
    for event in many:
        assert event.error is None
        choices.setdefault(event.choice, []).extend(event.token_ids)
    assert sorted(choices) == list(range(7))
    assert all(len(c) == 4 for c in choices.values())
    assert engine.generate(ids[:9], **GREEDY).token_ids == greedy


def test_the_profiler_measures_a_gpu(config: Path, open_engine: Open) -> None:
    engine = open_engine(config, **SMALL, load_format="dummy")
    plain = engine.generate(prompt(9, engine.vocab_size), **GREEDY).token_ids
    engine.profile()
    assert engine.generate(prompt(9, engine.vocab_size), **GREEDY).token_ids == plain
    table = engine.stats().ops
    for op in ("embed", "norm", "qkv", "rope_kv", "attention", "gate_up", "head", "sample"):
        assert table[op]["calls"] > 0
        assert table[op]["ns"] > 0
    engine.profile(False)
    calls = engine.stats().ops["attention"]["calls"]
    engine.generate(prompt(9, engine.vocab_size), **GREEDY)
    assert engine.stats().ops["attention"]["calls"] == calls


@pytest.mark.parametrize("kind", ["host", "both"])
def test_pages_return_from_pinned_memory_unchanged(
    kind: str, tmp_path: Path, config: Path, open_engine: Open
) -> None:
    """Several full pages and a partial one return in batches, bit for bit."""
    tiers: dict[str, Any] = {"host_memory": "4MiB"}
    if kind == "both":
        tiers["page_folder"] = tmp_path / "pages"
    engine = open_engine(config, **SMALL, load_format="dummy", **tiers)
    params = {**GREEDY, "logprobs": 5}
    ids = prompt(230, engine.vocab_size)

    def turn(handle: Handle, prefix_length: int, append: list[int]) -> Any:
        with handle.advance(prefix_length, append, **params) as stream:
            return stream.result()

    handle = engine.open(persist=True)
    tokens = ids + turn(handle, 0, ids).token_ids
    resident = turn(handle, len(tokens) - 1, [*tokens[-1:], 7])
    for _ in range(2):
        handle.truncate(len(tokens) - 1)
        handle.save()
        assert engine.flush_pages(30)
        handle.park()
        engine.evict()
        got = turn(handle, len(tokens) - 1, [*tokens[-1:], 7])
        assert got.loaded_tokens == len(tokens) - 1
        assert (got.token_ids, got.logprobs) == (resident.token_ids, resident.logprobs)
    stats = engine.stats()
    assert stats.tiers["host"].reads >= 8
    assert stats.failed_loads == stats.failed_saves == 0
