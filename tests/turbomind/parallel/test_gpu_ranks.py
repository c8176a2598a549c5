"""Engines whose ranks are on emulated GPUs of their own, or on one, in turns or waiting."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY, Zoo, prompt, reference_logits, relative, rounded
from command import lmchat
from devices import FakeGpus

from turbomind import _C, Engine, Handle, InvalidRequest, ModelError
from turbomind.config import device as device_module

pytestmark = pytest.mark.cpu_only("GPUs are named here")

Open = Callable[..., Engine]
SMALL: dict[str, Any] = {"threads": 1, "cache_memory": "8MiB", "deterministic": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DUMMY = {**SMALL, "load_format": "dummy"}


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of four heads with the given changes."""

    def write(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(TINY | HEADS | changes))
        return tmp_path / "config.json"

    return write


@pytest.fixture
def rank_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches if ranks on one GPU wait for each other, in engines that are opened later."""
    return lambda on: monkeypatch.setenv("TM_CUDA_RANK_WAITS", "1" if on else "0")


# Each part of a layer is cut in one of them: KV heads that are replicated, windows, biases, norms
# of all kinds, experts with and without an MLP, sinks, KV of earlier layers, per-layer inputs.
MODELS = ("qwen2", "gemma2", "gemma3", "granite", "smollm3_window", "qwen2_moe", "gpt_oss",
          "gemma4_shared", "gemma4_per_layer", "gemma4_moe")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cuda_emulated:0,0") for name in ("llama_gqa", "gemma3")),
        *((name, "cuda_emulated:2,1") for name in MODELS),
        *((name, "cuda_emulated:3,1,0,2") for name in MODELS),
    ],
)
def test_logits_are_those_of_the_reference(
    name: str, device: str, zoo: Zoo, open_engine: Open, rank_waits: Callable[[bool], None]
) -> None:
    """Within the error of weights rounded to bfloat16, as with one rank."""
    tp = device.count(",") + 1
    rank_waits(True)
    engine = open_engine(zoo.folder(name), **SMALL, device=device, tp=tp)
    assert (engine.device, engine.tp) == (device, tp)
    reference, ids = zoo.model(name), prompt(70, engine.vocab_size)
    wanted = reference_logits(reference, ids)
    bound = 1.1 * relative(reference_logits(rounded(reference, "bfloat16"), ids), wanted)
    assert relative(engine.logits(ids), wanted) < bound < 0.25


def test_the_gpus_do_not_change_the_results(
    model: Callable[..., Path], open_engine: Open, rank_waits: Callable[[bool], None]
) -> None:
    """Only the number of ranks does, which the fingerprint has."""
    found = []
    for device, waits in (
        ("cuda_emulated:0,1", False),
        ("cuda_emulated:3,2", False),
        ("cuda_emulated:1,1", False),
        ("cuda_emulated:1,1", True),
        ("cuda_emulated", False),
    ):
        rank_waits(waits)
        engine = open_engine(model(), **DUMMY, device=device, tp=2)
        ids = prompt(70, engine.vocab_size)
        done = engine.generate(ids, **GREEDY, logprobs=3)
        found.append((engine.numerics_fingerprint, done.token_ids, done.logprobs))
    assert found[1:] == found[:-1]
    assert found[0][0].endswith("/tp2")
    one = open_engine(model(), **DUMMY, device="cuda_emulated", tp=1)
    assert found[0][0] == f"{one.numerics_fingerprint}/tp2"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_gpu_has_what_was_planned(
    tp: int, model: Callable[..., Path], open_engine: Open
) -> None:
    engine = open_engine(model(), **DUMMY, device="cuda_emulated", tp=tp)
    names = ["cuda_emulated", "cuda_emulated:0,1", "", "cuda_emulated:0,1,2,3"]
    assert engine.device == names[tp - 1]
    stats, info = engine.stats(), engine.info
    assert [rank.weight_bytes for rank in stats.ranks] == info.rank_weight_bytes
    assert stats.shared_weight_bytes == 0
    assert sum(info.rank_weight_bytes) == info.weight_bytes == engine.weight_bytes
    assert {rank.cache_bytes for rank in stats.ranks} == {stats.cache_bytes // tp}
    assert stats.cache_bytes == (8 << 20)


def test_the_cache_is_of_all_gpus_together(model: Callable[..., Path], open_engine: Open) -> None:
    """A share is of the free memory of each, and of one GPU that two ranks are on of that one."""
    [total] = {gpu.total_bytes for gpu in _C.gpu_devices() if gpu.kind == "emulated"}
    options = {**DUMMY, "cache_memory": "5%", "tp": 2}
    for device, expected in (("cuda_emulated:0,1", 0.1), ("cuda_emulated:0,0", 0.05)):
        engine = open_engine(model(), **options, device=device)
        cache = engine.stats().cache_bytes
        engine.close()
        assert 0.9 * expected * total < cache <= expected * total
    for device, size in (("cuda_emulated:0,1", "2.1GiB"), ("cuda_emulated:1,1", "1.1GiB")):
        with pytest.raises(InvalidRequest, match=rf"the weights on {device[:-3]}\d need "):
            Engine(model(), **{**DUMMY, "cache_memory": size}, device=device, tp=2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, which are emulated ones."""
    FakeGpus("2 CUDA devices").install(monkeypatch)
    gpus = [_C.GpuOptions("emulated", index, True, []) for index in range(2)]
    monkeypatch.setattr(
        device_module,
        "_options",
        lambda device, _source, _exact, ranks: [] if device == "cpu" else gpus[:ranks],
    )


def test_auto_computes_on_the_gpus_or_says_why_not(
    two_gpus: None, model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(model(), **DUMMY, tp=2) as engine:
        assert (engine.device, engine.device_note) == ("cuda_emulated:0,1", None)
        assert engine.info.dtype == "bfloat16"
    with Engine(model(), **DUMMY, tp=2, dtype="float32") as engine:
        assert (engine.device, engine.device_note) == ("cpu", None)
    assert caplog.records == []
    with caplog.at_level(logging.WARNING), Engine(model(head_dim=20), **DUMMY, tp=2) as engine:
        assert (engine.device, engine.tp) == ("cpu", 2)
        assert str(engine.device_note).startswith("cuda_emulated:0,1 does not take the model: lay")
    assert [r.getMessage() for r in caplog.records] == [f"{engine.device_note}; the CPU computes"]
    with Engine(model(), **DUMMY, tp=4) as engine:
        assert (engine.device, engine.tp) == ("cpu", 4)
    assert caplog.records[-1].getMessage() == "2 CUDA devices, but tp is 4, so the CPU computes"


def test_what_gpus_refuse_is_refused_before_weights_are_read(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "turbomind.engine.plan.load", lambda *_, **__: pytest.fail("weights are read")
    )
    options = {**DUMMY, "device": "cuda_emulated:0,1", "tp": 2}
    with pytest.raises(ModelError, match="k_dim is 20, expected a multiple of 8"):
        Engine(model(head_dim=20), **options)
    with pytest.raises(InvalidRequest, match="^tp is 2, but layer 0 has 3 heads; expected 1"):
        Engine(model(num_attention_heads=3, num_key_value_heads=3, head_dim=16), **options)
    large = {"intermediate_size": 1 << 21, "num_hidden_layers": 8}
    with pytest.raises(ModelError, match=r"^the weights on cuda_emulated:\d need \d+ bytes as bf"):
        Engine(model(**large), **options)


@pytest.mark.parametrize("device", ["cuda_emulated:0,1", "cuda_emulated:0,0"])
def test_requests_of_several_sequences_and_kinds(
    device: str,
    model: Callable[..., Path],
    open_engine: Open,
    rank_waits: Callable[[bool], None],
) -> None:
    """Sequences that run together have the tokens that each has alone; choices differ."""
    rank_waits(True)
    engine = open_engine(model(), **DUMMY, device=device, tp=2, max_batch_size=3, prefill_chunk=32)
    prompts = [prompt(n, engine.vocab_size) for n in (5, 40, 90)]
    alone = [engine.generate(ids, **GREEDY, logprobs=2) for ids in prompts]
    together = [engine.stream(ids, **GREEDY, logprobs=2) for ids in prompts]
    for one, stream in zip(alone, together, strict=True):
        done = stream.result()
        assert (done.token_ids, done.logprobs) == (one.token_ids, one.logprobs)
    banned = engine.generate(prompts[0], **GREEDY, logit_bias={5: 100.0})
    assert banned.token_ids == [5] * 4
    seeded = {**GREEDY, "temperature": 1.0, "seed": 3}
    assert (
        engine.generate(prompts[0], **seeded).token_ids
        == engine.generate(prompts[0], **seeded).token_ids
    )
    with engine.stream(prompts[0], **{**GREEDY, "max_new_tokens": 100}) as stream:
        next(iter(stream))
        stream.cancel()
    assert engine.generate(prompts[1], **GREEDY).token_ids == alone[1].token_ids


@pytest.mark.parametrize("device", ["cuda_emulated:0,1", "cuda_emulated:0,0"])
def test_pages_of_all_ranks_return_from_lower_tiers(
    device: str,
    tmp_path: Path,
    model: Callable[..., Path],
    open_engine: Open,
    rank_waits: Callable[[bool], None],
) -> None:
    """Also in the next engine, and there on other GPUs."""
    rank_waits(True)
    options: dict[str, Any] = {**DUMMY, "tp": 2, "page_folder": tmp_path / "pages"}
    engine = open_engine(model(), **options, device=device, host_memory="4MiB")
    params = {**GREEDY, "logprobs": 5}
    ids = prompt(230, engine.vocab_size)

    def turn(handle: Handle, length: int, append: list[int]) -> Any:
        with handle.advance(length, append, **params) as stream:
            return stream.result()

    handle = engine.open(persist=True)
    tokens = ids + turn(handle, 0, ids).token_ids
    resident = turn(handle, len(tokens) - 1, [*tokens[-1:], 7])
    handle.truncate(len(tokens) - 1)
    handle.save()
    assert engine.flush_pages(30)
    handle.park()
    engine.evict()
    loaded = turn(handle, len(tokens) - 1, [*tokens[-1:], 7])
    assert loaded.loaded_tokens == len(tokens) - 1
    assert (loaded.token_ids, loaded.logprobs) == (resident.token_ids, resident.logprobs)
    handle.close(save=True)
    engine.close()
    engine = open_engine(model(), **options, device="cuda_emulated:1,1")
    again = engine.generate([*tokens, 7], **params)
    assert again.loaded_tokens >= len(tokens) // 64 * 64
    assert (again.token_ids, again.logprobs) == (resident.token_ids, resident.logprobs)


def test_the_profiler_measures_every_gpu(model: Callable[..., Path], open_engine: Open) -> None:
    engine = open_engine(model(), **DUMMY, device="cuda_emulated:0,1", tp=2)
    engine.profile()
    engine.generate(prompt(9, engine.vocab_size), **GREEDY)
    ranks = engine.stats().ranks
    calls = [rank.ops["qkv"]["calls"] for rank in ranks]
    assert len(set(calls)) == 1
    assert calls[0] > 0
    assert all(rank.ops["reduce"]["ns"] > 0 for rank in ranks)


def test_a_chat_runs_on_two_gpus() -> None:
    """The shipped model, by option and by variable."""
    short = ["chat", "memo", "-p", "Hi", "--temperature", "0", "--max-new-tokens", "2"]
    done = lmchat(*short, "--device", "cuda_emulated:0,1", "--tp", "2", "--deterministic")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\w", done.stdout)
