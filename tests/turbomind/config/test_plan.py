"""A plan is what an engine would be, from configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY, write_tiny

import turbomind
from turbomind import Engine, InvalidRequest, ModelError, NotFound

MIB = 1 << 20
DUMMY = {"load_format": "dummy", "device": "cpu", "cache_memory": "8MiB"}


@pytest.fixture(name="config")
def made_config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "threads": 1, "max_batch_size": 3, "prefill_chunk": 64},
        {"quantize": "int8", "dtype": "bfloat16"},
        {"tp": 2, "isa": "portable"},
        {"cache_memory": None, "cache_pages": 9, "host_memory": "1MiB"},
        {"device": "cuda_emulated", "dtype": "bfloat16", "cache_memory": "2MiB"},
    ],
)
def test_an_engine_is_what_its_plan_says(config: Path, options: dict[str, Any]) -> None:
    options = {**DUMMY, **options}
    plan = turbomind.plan(config, **options)
    with Engine(config, **options) as engine:
        assert (plan.device, plan.tp, plan.threads, plan.isa) == (
            engine.device,
            engine.tp,
            engine.threads,
            engine.isa,
        )
        assert plan.model == engine.info
        assert plan.core.max_batch_size == engine.max_batch_size
        assert plan.core.prefill_chunk == engine.prefill_chunk
        parts = {part.name: part.bytes for part in plan.parts}
        cache = parts["KV cache"]
        assert 0.9 * cache <= engine.stats().cache_bytes <= cache
        (weights,) = (size for name, size in parts.items() if name.startswith("weights as"))
        assert engine.weight_bytes <= weights <= 1.02 * engine.weight_bytes
    assert plan.device_note is None


def test_a_plan_loads_nothing_and_writes_nothing(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "model"
    write_tiny(folder)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("turbomind.engine.plan.load", None)
    pages = tmp_path / "pages"
    turbomind.plan(folder, device="cpu", page_folder=pages, weights_digests=tmp_path / "digests")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_that_does_not_fit_is_refused_by_its_check(config: Path, monkeypatch) -> None:
    monkeypatch.setattr("turbomind.engine.plan.available_memory", lambda: 40 * MIB)
    plan = turbomind.plan(config, **DUMMY)
    assert sum(part.bytes for part in plan.parts) > plan.available == 40 * MIB
    with pytest.raises(InvalidRequest, match="expected at most the 40 MiB that this process"):
        plan.check()
    with pytest.raises(InvalidRequest, match="expected at most the 40 MiB of a replica"):
        plan.check("of a replica")


def test_a_named_gpu_that_cannot_run_a_model_is_a_fault_of_the_plan(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "head_dim": 20}))
    plan = turbomind.plan(config, load_format="dummy", device="cuda_emulated")
    assert plan.fault.startswith("layers[0].k_dim is 20, expected a multiple of 8")
    with pytest.raises(ModelError, match="k_dim is 20"):
        plan.check()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cache_memry": "1GiB"}, InvalidRequest, "unknown engine option 'cache_memry'"),
        ({"threads": 0}, InvalidRequest, "threads is 0, expected an integer from 1"),
        ({"isa": 3}, InvalidRequest, "isa is 3, expected a string"),
        ({"quantize": "int3"}, InvalidRequest, "quantize is 'int3', expected one of"),
        ({"load_format": "pickle"}, InvalidRequest, "load_format is 'pickle', expected one of"),
        ({"disk_quota": "1GiB"}, InvalidRequest, "disk_quota is '1GiB', expected a page_folder"),
        ({}, NotFound, "no such model"),
    ],
)
def test_options_are_checked_before_the_model(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    for opened in (turbomind.plan, Engine):
        with pytest.raises(error, match=words if options else "absent"):
            opened(tmp_path / "absent", device="cpu", **options)
