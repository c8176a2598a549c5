"""The profiler's table of every rank, and how they are joined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import TINY, prompt

from turbomind import Engine

pytestmark = pytest.mark.cpu_only("test_gpu_ranks.py has engines on GPUs")

LAYERS = 3
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}

Open = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY | SIZES))
    return tmp_path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rank_is_profiled(tp: int, folder: Path, open_engine: Open) -> None:
    engine = open_engine(folder, load_format="dummy", tp=tp, warm_up=False)
    engine.profile()
    before = engine.stats().steps
    engine.generate(prompt(20, engine.vocab_size), max_new_tokens=5, ignore_eos=True)
    stats = engine.stats()
    steps = stats.steps - before
    assert len(stats.ranks) == tp
    for rank in stats.ranks:
        assert rank.ops["attention"]["calls"] == LAYERS * steps
        for op in ("reduce", "reduce_wait"):
            calls = rank.ops[op]["calls"] if op in rank.ops else 0
            assert calls == (2 * LAYERS * steps if tp > 1 else 0)
    assert "sample" in stats.ranks[0].ops
    assert all("sample" not in rank.ops for rank in stats.ranks[1:])
    for op, joined in stats.ops.items():
        parts = [rank.ops[op] for rank in stats.ranks if op in rank.ops]
        slowest = max(parts, key=lambda part: part["ns"])
        assert (joined["calls"], joined["ns"]) == (slowest["calls"], slowest["ns"])
        for total in ("bytes", "flops"):
            assert joined[total] == sum(part[total] for part in parts)
    assert set(stats.ops) == {op for rank in stats.ranks for op in rank.ops}


def test_the_profiler_of_every_rank_stops_and_starts_empty(folder: Path, open_engine: Open) -> None:
    engine = open_engine(folder, load_format="dummy", tp=2)
    engine.profile()
    engine.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True)
    engine.profile(False)
    tables = [rank.ops for rank in engine.stats().ranks]
    engine.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True)
    assert [rank.ops for rank in engine.stats().ranks] == tables
    engine.profile()
    assert [rank.ops for rank in engine.stats().ranks] == [{}, {}]
