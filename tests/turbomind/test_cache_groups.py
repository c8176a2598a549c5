"""How the memory of the KV cache is divided between full attention and windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import turbomind
import turbomind._C as _C
from turbomind.loading.loader import describe

PAGE = _C.PAGE_TOKENS
# The KV of Gemma 3 1B: 26 layers, every sixth with full attention, and the least of the rest.
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 131072,
    "num_attention_heads": 1,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    (path / "config.json").write_text(json.dumps(GEMMA3_1B))
    return path


def opened(folder: Path, **options: Any) -> turbomind.Engine:
    return turbomind.Engine(folder, threads=1, load_format="dummy", **options)


@pytest.mark.cpu_only("the emulated GPU is slow")
def test_a_long_sequence_fits_beside_the_windows(folder: Path) -> None:
    with opened(folder, cache_memory="512MiB") as engine:
        stats = engine.stats()
        assert engine.max_context >= 60000
        window, full = stats.groups if stats.groups[0].window else stats.groups[::-1]
        assert (window.window, full.window) == (512, 0)
        assert full.total * PAGE >= 60000
        # The windows of 16 sequences and of some idle ones, of 9 pages each, and chunks.
        assert window.total >= (16 + 2) * 9 + 512 // PAGE
        assert 510 << 20 < stats.cache_bytes <= 512 << 20
        assert stats.cache_bytes == sum(group.total * group.page_bytes for group in stats.groups)
        engine.generate([5, 6, 7] * 500, max_new_tokens=2, ignore_eos=True)
        stats = engine.stats()
        for group in stats.groups:
            assert group.referenced == 0
            assert group.free + group.cached == group.total
        window, full = stats.groups if stats.groups[0].window else stats.groups[::-1]
        assert (full.cached, full.out_of_reach) == (1500 // PAGE, 0)
        assert 0 < window.out_of_reach < window.cached
        assert stats.pages_total == full.total + window.total
        assert stats.pages_cached == full.cached + window.cached
        engine.check_invariants()


@pytest.mark.cpu_only("the emulated GPU has another memory")
@pytest.mark.parametrize("pages", [1, 30, 700])
def test_cache_pages_are_those_of_full_attention(folder: Path, pages: int) -> None:
    with opened(folder, cache_pages=pages, max_batch_size=4) as engine:
        stats = engine.stats()
        totals = [group.total for group in stats.groups]
        assert max(totals) == pages
        assert engine.max_context == pages * PAGE
        assert (min(totals) == pages) == (pages <= 30)
    planned = turbomind.plan(folder, device="cpu", cache_pages=pages, max_batch_size=4)
    kv = next(part.bytes for part in planned.parts if part.name == "KV cache")
    assert kv == stats.cache_bytes


def test_pool_sizes_come_from_the_options(folder: Path) -> None:
    groups = _C.plan_cache(describe(folder).description.to_core("bfloat16", "bfloat16", ""))

    def windows(**options: int) -> int:
        few = {"bytes": 0, "pages": 5000, "rows": 1, "chunk": 64} | options
        return min(_C.pool_sizes(groups, **few))

    least = windows()
    assert windows(rows=3) == least + 2 * 9
    assert windows(chunk=640) == least + 2 * 9
    assert windows(pages=5000 * 9) > 4 * least
    assert windows(rows=4096) == 5000
