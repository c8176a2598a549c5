"""benchmarks/tune_amx.py, and the orders that engines read from its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assets import ROOT
from checkpoints import TINY

import turbomind
from turbomind import _C
from turbomind.errors import InvalidRequest
from turbomind.loading import loader
from turbomind.loading.tile_orders import FIELDS, TABLE, tile_order

ORDER = {"chunk_k_blocks": 3, "stays": "rows", "stream": True}
needs_emulation = pytest.mark.skipif(
    "avx512_bf16" not in turbomind.available_isas(), reason="the emulation needs AVX512-BF16"
)


def tune(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/tune_amx.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def table(folder: Path, entry: Any, processor: str | None = None) -> Path:
    path = folder / "orders.json"
    path.write_text(json.dumps({"processors": {processor or _C.cpu_name(): entry}}))
    return path


@needs_emulation
def test_the_command_stores_an_order_that_engines_read(tmp_path: Path) -> None:
    path = table(tmp_path, ORDER, processor="another")
    short = ["--emulated", "--seconds", "0.001", "--rounds", "1", "--threads", "1"]
    done = tune(*short, "--table", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("chunk") == 16
    assert done.stdout.count("silu_mul") == 2
    stored = json.loads(path.read_text())["processors"]
    assert stored["another"] == ORDER
    entry = stored[_C.cpu_name()]
    assert {"caches", "cores", "flops", "epilogues"} <= set(entry["measured"])
    assert isinstance(entry["measured"]["cores"]["siblings"], bool)
    order = tile_order("amx", path)
    assert order is not None
    assert [getattr(order, field) for field in FIELDS] == [entry[field] for field in FIELDS]


@pytest.mark.skipif("amx" in turbomind.available_isas(), reason="this machine has AMX")
def test_without_amx_it_says_so_and_stores_nothing(tmp_path: Path) -> None:
    path = tmp_path / "orders.json"
    done = tune("--table", str(path))
    assert done.returncode == 1
    assert "no AMX on " in done.stderr
    assert "--emulated" in done.stderr
    assert not path.exists()


def test_the_table_that_ships_is_valid() -> None:
    for processor in json.loads(TABLE.read_text())["processors"]:
        assert tile_order("amx", TABLE, processor) is not None
    assert tile_order("amx", TABLE, "a processor that nobody measured") is None
    assert tile_order("avx512_bf16", Path("/missing")) is None


@pytest.mark.parametrize(
    "entry",
    [
        {**ORDER, "stays": "x"},
        {**ORDER, "chunk_k_blocks": 0},
        {"chunk_k_blocks": 8},
        {**ORDER, "stream": "yes"},
        [8],
    ],
)
def test_a_wrong_entry_is_refused(entry: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"orders\.json.*expected chunk_k_blocks, stays"):
        tile_order("amx", table(tmp_path, entry))


@needs_emulation
def test_an_engine_takes_the_order_and_keeps_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "hidden_size": 160, "torch_dtype": "bfloat16"}))
    taken = []

    def logits() -> Any:
        options: dict[str, Any] = {"device": "cpu", "isa": "amx_emulated", "threads": 2}
        with turbomind.Engine(
            config, load_format="dummy", cache_memory="4MiB", **options
        ) as engine:
            return engine.logits(list(range(3, 43)))

    def order_of(isa: str) -> _C.TileOrder | None:
        taken.append(tile_order(isa, path))
        return taken[-1]

    default = logits()
    path = table(tmp_path, ORDER)
    monkeypatch.setattr(loader, "tile_order", order_of)
    np.testing.assert_array_equal(logits(), default)
    assert [order.stays for order in taken] == ["rows"]
