"""The memory and the measured limits of the GPUs of several ranks, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import TINY
from command import lmchat

from cli.bench.measure import gpu_ceilings
from turbomind import _C, InvalidRequest, describe
from turbomind.config.defaults import EMULATED, CacheSize
from turbomind.config.device import model_fault, ranks_by_gpu
from turbomind.config.memory_budget import check_gpu_memory
from turbomind.loading.loader import ModelInfo

pytestmark = pytest.mark.cpu_only("GPUs are named here")


def emulated(*indices: int) -> list[_C.GpuOptions]:
    return [_C.GpuOptions("emulated", index, False, []) for index in indices]


def described(folder: Path, tp: int, **changes: Any) -> ModelInfo:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(TINY | heads | changes))
    return describe(folder / "config.json", weights=False, gpu=True, tp=tp)


def test_ranks_are_grouped_by_their_gpu() -> None:
    for indices, expected in (
        ((0,), {0: [0]}),
        ((2, 0, 1), {2: [0], 0: [1], 1: [2]}),
        ((3, 3), {3: [0, 1]}),
    ):
        found = ranks_by_gpu(emulated(*indices))
        assert {gpu.index: ranks for gpu, ranks in found} == expected
        assert [gpu.index for gpu, _ in found] == list(expected)


@pytest.mark.parametrize(("indices", "on_each"), [((2,), 1), ((1, 0), 1), ((1, 1), 2)])
def test_each_gpu_needs_the_memory_of_its_ranks(
    indices: tuple[int, ...], on_each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough bytes on every GPU are accepted, a byte less on the last one is not."""
    info = described(tmp_path, len(indices))
    weights = dict.fromkeys(indices, 0)
    for index, size in zip(indices, info.rank_weight_bytes, strict=True):
        weights[index] += size
    free = {index: size + (on_each << 20) // len(indices) for index, size in weights.items()}
    last = indices[-1]
    monkeypatch.setattr(_C, "gpu_free_bytes", lambda gpu: free[gpu.index])

    def check(size: str) -> None:
        cache = CacheSize(size, EMULATED)
        check_gpu_memory(info, _C.EngineOptions(), cache, emulated(*indices))

    check("1MiB")
    check("100%")
    free[last] -= 1
    with pytest.raises(InvalidRequest) as refusal:
        check("1MiB")
    which = f" on cuda_emulated:{last}" if len(indices) > 1 else ""
    assert str(refusal.value).startswith(f"the weights{which} need {weights[last]} bytes as ")
    assert f"expected at most {free[last]} together" in str(refusal.value)
    check("100%")
    free[last] = weights[last] - 1
    with pytest.raises(InvalidRequest, match="expected at most"):
        check("1%")


def test_cache_pages_are_divided_over_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, options = described(tmp_path, 2), _C.EngineOptions()
    options.cache_pages = 100
    [group] = _C.plan_cache(info.to_core(), 2)
    free = {rank: size + 50 * group.page_bytes for rank, size in enumerate(info.rank_weight_bytes)}
    monkeypatch.setattr(_C, "gpu_free_bytes", lambda gpu: free[gpu.index])
    check_gpu_memory(info, options, CacheSize(None, EMULATED), emulated(0, 1))
    free[1] -= 1
    with pytest.raises(InvalidRequest, match="on cuda_emulated:1 need"):
        check_gpu_memory(info, options, CacheSize(None, EMULATED), emulated(0, 1))


def test_a_model_is_compared_with_the_memory_of_each_gpu(tmp_path: Path) -> None:
    """Weights that one GPU has no room for may be cut over two, but not over two ranks of one."""
    large = {"intermediate_size": 1 << 20, "num_hidden_layers": 8}
    info = described(tmp_path, 1, **large)
    total = next(gpu.total_bytes for gpu in _C.gpu_devices() if gpu.kind == "emulated")
    assert total < info.weight_bytes < 2 * total
    fault = f"need {info.weight_bytes} bytes as bfloat16, it has {total}"
    assert model_fault(info, emulated(1)) == f"the weights {fault}"
    info = described(tmp_path, 2, **large)
    assert model_fault(info, emulated(0, 1)) == ""
    assert model_fault(info, emulated(1, 1)).startswith("the weights on cuda_emulated:1 need ")
    assert "k_dim is 20" in model_fault(described(tmp_path, 2, head_dim=20), emulated(0, 1))
    with pytest.raises(InvalidRequest, match="^tp is 3, but layer 0 has 4 heads; expected 1, 2 or"):
        model_fault(described(tmp_path, 3), emulated(0, 1, 2))


def test_commands_take_a_list(tmp_path: Path) -> None:
    described(tmp_path, 1)
    config = str(tmp_path / "config.json")
    done = lmchat("info", config, "--device", "cuda_emulated:1,0", "--tp", "2", "--json")
    report = json.loads(done.stdout)
    assert report["machine"]["device"] == "cuda_emulated:1,0"
    assert (report["model"]["ranks"], report["model"]["gpu_fault"]) == (2, None)
    assert report["model"]["dtype"] == "bfloat16"
    wrong = lmchat("info", config, "--device", "cuda_emulated:0,1", "--tp", "3")
    assert wrong.returncode == 2
    assert "tp is 3, expected 2, the number of GPUs: device is 'cuda_emu" in wrong.stderr


def test_ceilings_of_gpus_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU is measured once, also where it has several ranks."""
    measured: list[int] = []

    def measure(gpu: _C.GpuOptions, *_: object) -> SimpleNamespace:
        measured.append(gpu.index)
        return SimpleNamespace(read=1.0 + gpu.index, copy=10.0, flops=100.0)

    monkeypatch.setattr(_C, "measure_gpu", measure)
    found = gpu_ceilings(emulated(3, 1), 1)
    assert (found.device, found.read, found.copy, found.tiles) == (
        "cuda_emulated:3,1", 6.0, 20.0, 200.0,
    )  # fmt: skip
    assert found.name.count(",") == 1
    found = gpu_ceilings(emulated(0, 0), 1)
    assert (found.device, found.read, found.tiles) == ("cuda_emulated:0,0", 1.0, 100.0)
    assert measured == [3, 1, 0]
