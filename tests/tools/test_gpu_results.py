"""tools/gpu_check.py notices engines that fell back."""

import types

import pytest
from assets import ROOT
from gpu import end_to_end
from gpu.settings import Settings


def settings(work, device="cuda_emulated") -> Settings:
    return Settings(device, True, str(work), str(work), str(ROOT), str(work), "test", [1], 100.0)


@pytest.mark.parametrize(
    ("note", "overlapped", "options", "expected"),
    [
        ("/lib/libcublasLt.so.13", 5, {}, ""),
        ("our own kernels", 5, {"deterministic": True}, ""),
        ("no cuBLASLt: nothing was found", 5, {}, "cuBLASLt was not used"),
        ("/lib/libcublasLt.so.13; cuBLASLt (/lib) does not compute a product of 33 rows", 5, {},
         "cuBLASLt was not used"),
        ("/lib/libcublasLt.so.13; steps of some kinds are not captured: no memory", 5, {},
         "steps were not captured"),
        ("/lib/libcublasLt.so.13", 0, {}, "no step overlapped another one"),
        ("our own kernels; TM_CUDA_OVERLAP is 0", 0,
         {"deterministic": True, "off": ("overlap",)}, ""),
        ("our own kernels; TM_CUDA_GRAPHS is 0", 5, {"deterministic": True}, "graphs is off"),
        ("our own kernels", 5, {"deterministic": True, "off": ("graphs",)}, "graphs is on"),
    ],
)  # fmt: skip
def test_an_engine_that_fell_back_is_noticed(tmp_path, note, overlapped, options, expected):
    stats = types.SimpleNamespace(steps=9, steps_overlapped=overlapped, tokens_decoded=20)
    engine = types.SimpleNamespace(
        library_note=note, stats=lambda: stats, warmed_up=(12, 14, 1.2345)
    )
    real = settings(tmp_path, "cuda")
    facts, error = end_to_end.engine_facts(engine, real, **{"deterministic": False, **options})
    assert error == (f"{expected} ({note})" if expected else "")
    assert facts == {
        "library_note": note,
        "warmed_up": {"done": 12, "of": 14, "seconds": 1.23},
        "steps": 9,
        "steps_overlapped": overlapped,
    }
