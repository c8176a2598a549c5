"""Bytes by rank: an opened engine, `lmchat info` and the estimate before loading agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TINY
from command import lmchat

from turbomind import _C, Engine, plan

pytestmark = pytest.mark.cpu_only("test_gpu_ranks.py has engines on GPUs")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "num_hidden_layers": 3}
CONFIG = TINY | HEADS | SIZES | {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}
PIECE = 256  # bytes at which the weights of a slot begin

Open = Callable[..., Engine]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def rank_bytes(ranks: int) -> int:
    """Returns the weights of a rank of CONFIG by hand, in bfloat16: heads, sizes and columns of a
    rank, each matrix in whole pieces."""
    heads, kv, mlp = 4 // ranks, max(1, 2 // ranks), 128 // ranks
    matrices = [((heads + 2 * kv) * 32, 64), (64, heads * 32), (2 * mlp, 64), (64, mlp)]
    return 3 * sum(2 * rows * -(-cols // 32) * 32 for rows, cols in matrices)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_engine_has_what_was_planned(tp: int, folder: str, open_engine: Open) -> None:
    engine = open_engine(folder, load_format="dummy", tp=tp)
    stats, info = engine.stats(), engine.info
    assert stats.weight_bytes == engine.weight_bytes == info.weight_bytes
    assert len(stats.ranks) == tp
    assert sum(rank.cache_bytes for rank in stats.ranks) == stats.cache_bytes
    assert len({rank.cache_bytes for rank in stats.ranks}) == 1
    shared = 512 * 64 * 2 + 7 * 64 * 4  # the embedding, which is the head, and seven norms
    for rank in stats.ranks:
        assert rank.weight_bytes == rank_bytes(tp) + (shared if tp == 1 else 0)
    assert stats.shared_weight_bytes == (0 if tp == 1 else shared)
    kv = 3 * 2 * 32 * max(1, 2 // tp) * 2  # of a token on a rank: layers, K and V, head, heads
    tokens = stats.pages_total * 64
    assert {rank.cache_bytes for rank in stats.ranks} == {kv * tokens}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_info_shows_the_bytes_of_an_engine(tp: int, folder: str, open_engine: Open) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "tp": tp, "cache_memory": "16MiB"}
    stats = open_engine(folder, **options).stats()
    arguments = ["info", folder, "--device", "cpu", "--tp", str(tp), "--cache-memory", "16MiB"]
    model = json.loads(lmchat(*arguments, "--json").stdout)["model"]
    assert model["weight_bytes"] == stats.weight_bytes
    assert model["shared_weight_bytes"] == stats.shared_weight_bytes
    shown = [(rank["weight_bytes"], rank["cache_bytes"]) for rank in model["rank_memory"]]
    assert shown == [(rank.weight_bytes, rank.cache_bytes) for rank in stats.ranks]
    each = [rank["bytes_per_token"] for rank in model["rank_memory"]]
    assert sum(each) == model["kv"]["bfloat16"]["bytes_per_token"]


def test_info_prints_each_rank(folder: str) -> None:
    arguments = ["info", folder, "--device", "cpu", "--tp", "2", "--cache-memory", "16MiB"]
    lines = lmchat(*arguments).stdout.splitlines()
    rows = {line[:9].rstrip(): line[9:].strip() for line in lines}
    assert rows["ranks"] == "2 (tensor parallelism)"
    assert rows["all ranks"].endswith("of weights in one copy")
    pages = (16 << 20) // (64 * 768)  # 768 bytes per token on both ranks
    part = (
        f"{rank_bytes(2) / 1024:.4g} KiB of weights, {pages * 64 * 384 / 2**20:.4g} MiB of KV "
        "pages, 384 B per token"
    )
    assert rows["rank 0"] == rows["rank 1"] == part
    assert "rank 2" not in rows
    assert "\nrank" not in lmchat("info", folder, "--device", "cpu").stdout


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_estimate_counts_every_copy(tp: int, folder: str, open_engine: Open) -> None:
    """A KV head that several ranks have counts once for each, in weights and pages."""
    engine = open_engine(folder, load_format="dummy", tp=tp, cache_pages=10)
    stats = engine.stats()
    planned = plan(folder, device="cpu", load_format="dummy", tp=tp, cache_pages=10)
    parts = {part.name: part.bytes for part in planned.parts}
    assert stats.weight_bytes <= parts["weights as bfloat16"] <= 1.02 * stats.weight_bytes
    assert parts["KV cache"] == stats.cache_bytes


def test_the_estimate_has_a_thread_for_each_rank(folder: str) -> None:
    """Attention has work memory for each thread, and a rank has one at least."""

    def needed(tp: int, threads: int) -> int:
        return plan(folder, weights=False, device="cpu", tp=tp, threads=threads).kept_bytes

    isa = _C.resolve_isa("auto")
    each = _C.attention_scratch_bytes(isa, 4, 32, 32) - _C.attention_scratch_bytes(isa, 1, 32, 32)
    assert needed(1, 4) - needed(1, 1) == each > 0
    assert needed(4, 1) == needed(4, 4)
