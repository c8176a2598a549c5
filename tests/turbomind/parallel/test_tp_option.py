"""The number of ranks: where it comes from, what is refused, and the memory of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import TINY

from turbomind import _C, Engine, InvalidRequest, describe
from turbomind.config.device import TP_VARIABLE

pytestmark = pytest.mark.cpu_only("weights that ranks on the CPU share")

Open = Callable[..., Engine]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"num_attention_heads": 4, "num_key_value_heads": 2}))
    return path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "tp is 0, expected an integer from 1"),
        (-1, "tp is -1, expected an integer from 1"),
        (1.5, "tp is 1.5, expected an integer from 1"),
        ("two", "tp is 'two', expected an integer from 1"),
        (True, "tp is True, expected an integer from 1"),
        (3, "tp is 3, but layer 0 has 4 heads; expected 1, 2 or 4 for this model"),
        (2**20, "tp is 1048576, but layer 0 has 4 heads; expected 1, 2 or 4 for this model"),
    ],
)
def test_other_numbers_of_ranks_are_refused(value: object, message: str, config: Path) -> None:
    """The weights are not read: there are none."""
    with pytest.raises(InvalidRequest) as refusal:
        Engine(config, tp=value)  # type: ignore[arg-type]
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two", "²", "99999999999999999999"])
def test_a_wrong_variable_is_refused(
    value: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TP_VARIABLE, value)
    with pytest.raises(InvalidRequest) as refusal:
        Engine(config, load_format="dummy")
    assert str(refusal.value).startswith(f"the environment variable {TP_VARIABLE} is {value!r}")


def test_the_variable_is_the_default(
    config: Path, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, ranks in (("", 1), ("1", 1), ("4", 4)):
        monkeypatch.setenv(TP_VARIABLE, value)
        assert open_engine(config, load_format="dummy").tp == ranks
    engine = open_engine(config, load_format="dummy", tp=2)
    assert engine.numerics_fingerprint.endswith("/tp2")


def emulated(*indices: int) -> list[_C.GpuOptions]:
    return [_C.GpuOptions("emulated", index, False, []) for index in indices]


def test_the_core_takes_a_gpu_for_each_rank(config: Path) -> None:
    core = describe(config, weights=False, gpu=True).to_core()
    _C.DecoderBuilder(core, "auto", 1, emulated(1))
    _C.DecoderBuilder(core, "auto", 1, emulated(0, 1), None, 2)
    for gpus, ranks, expected in (
        ((0,), 2, "tp is 2, expected 1, the number of GPUs"),
        ((0, 1), 1, "tp is 1, expected 2, the number of GPUs"),
        ((9,), 1, "device index: got 9, expected 0 to 3"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            _C.DecoderBuilder(core, "auto", 1, emulated(*gpus), None, ranks)
        assert str(refusal.value) == expected


def test_a_fault_of_a_model_is_that_of_its_ranks(config: Path) -> None:
    def fault(*indices: int, **changes: int) -> str:
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        core = describe(config, weights=False, gpu=True).to_core()
        return _C.model_fault(core, emulated(*indices))

    assert fault(0) == fault(0, 1) == fault(3, 3, 3, 3) == ""
    assert fault(0, 1, 2) == ("tp is 3, but layer 0 has 4 heads; expected 1, 2 or 4 for this model")
    assert fault(0, 4) == "device index: got 4, expected 0 to 3"
    expected = "layers[0].k_dim is 20, expected a multiple of 8 up to 256 on a GPU"
    assert fault(0, head_dim=20) == fault(0, 1) == expected


def test_memory_counts_all_ranks(config: Path, open_engine: Open) -> None:
    """With more ranks than KV heads each rank has a KV head in its pages."""
    sizes, weights = [], []
    for tp in (1, 2, 4):
        engine = open_engine(config, load_format="dummy", tp=tp)
        sizes.append(sum(group.page_bytes for group in engine.stats().groups))
        weights.append(engine.weight_bytes)
        assert engine.stats().cache_bytes <= 32 << 20
    assert sizes[1] == sizes[0]
    assert sizes[2] == 2 * sizes[0]
    assert weights[0] <= weights[1] <= weights[2]
