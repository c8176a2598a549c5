"""Phase `results` of tools/gpu_check.py: it accepts right results and notices wrong ones."""

import json
import os
import types
import weakref
from dataclasses import replace

import numpy as np
import pytest
from assets import ROOT
from gpu import end_to_end, reference, results
from gpu.settings import Settings

from turbomind import Engine


def settings(work, device="cuda_emulated") -> Settings:
    return Settings(device, True, str(work), str(work), str(ROOT), str(work), "test", [1], 100.0)


def verdicts(found: dict) -> dict[str, bool]:
    return {check["check"]: check["ok"] for check in found["checks"]}


def test_results_of_the_emulator_are_right(tmp_path, monkeypatch):
    """Also with other sequences in the KV cache; the environment is as it was afterwards."""
    monkeypatch.setattr(results, "TINY", results.Plan((5, 70), 4, 70, 1 << 15, 64, 4))
    monkeypatch.setenv("TM_CUDA_GRAPHS", "1")
    opened: list[weakref.ref] = []
    real_open = results.Checks._open

    def open_alone(*options):
        assert not any(engine() for engine in opened), "two engines do not fit a GPU's memory"
        engine = real_open(*options)
        opened.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(results.Checks, "_open", open_alone)
    found = results.run_phase(settings(tmp_path), "tiny")
    assert json.loads((tmp_path / "results-tiny.json").read_text()) == found
    assert found["error"] == ""
    assert all(verdicts(found).values())
    assert {
        "alone, overlap and graphs on and off",
        "batched and alone",
        "beyond 2 GiB of KV",
        "batched, overlap on and off",
        "batched, graphs on and off",
        "default, alone: the best tokens",
        "default, overlap and graphs on and off",
    } <= verdicts(found).keys()
    engines = found["engines"]
    assert engines["plain"]["steps_overlapped"] == 0 < engines["default"]["steps_overlapped"]
    assert "TM_CUDA_GRAPHS is 0" in engines["deterministic, no graphs"]["library_note"]
    assert all(figure["ms"] > 0 for figure in found["figures"])
    assert [figure["engine"] for figure in found["figures"]] == [*engines]
    assert os.environ["TM_CUDA_GRAPHS"] == "1"
    assert "TM_CUDA_OVERLAP" not in os.environ


def test_a_row_of_logits_is_that_of_torch(tmp_path):
    """Also with biases, an untied head and other frequencies; other weights are noticed."""
    pytest.importorskip("torch")
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 90}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    shape |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
    shape |= {"hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1e4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    ids = np.random.default_rng(1).integers(3, 90, 100).tolist()
    with Engine(path, device="cpu", dtype="float32", load_format="dummy", threads=1) as engine:
        row = engine.logits(ids)[-1]
        right = reference.last_logits(engine.info.description, "cpu", ids)
        wrong = reference.last_logits(engine.info.description, "cpu", ids, seed=1)
    assert results.relative_error(row, right) < 1e-2  # weights are rounded to 16 bits on one side
    assert results.relative_error(row, wrong) > 0.5
    assert results.relative_error(row * np.nan, right) == float("inf")


def test_wrong_tokens_and_logits_fail_the_phase(tmp_path):
    checks = results.Checks(settings(tmp_path), "tiny")
    checks.same("equal", [[1, 2], [3, 4]], [[1, 2], [3, 4]])
    assert checks.result["error"] == ""
    checks.same("different", [[1, 2], [3, 4]], [[1, 2], [3, 5]])
    row = np.linspace(-1, 1, 128, dtype=np.float32)
    checks.close("near", row * 1.01, row)
    checks.close("far", row * 1.05, row)
    assert verdicts(checks.result) == {
        "equal": True,
        "different": False,
        "near": True,
        "far": False,
    }
    assert checks.result["checks"][1] | {"ok": 0} == {
        "check": "different", "ok": 0, "prompt_tokens": 70, "first_difference": 1,
    }  # fmt: skip
    assert checks.result["error"] == "different; far"

    class Exact:
        """Logits whose best token is always 7."""

        def logits(self, ids):
            return np.tile(np.where(np.arange(128) == 7, 3, 0.5).astype(np.float32), (len(ids), 1))

    results.best(checks, "best", Exact(), [[7, 7], [7, 7]])
    results.best(checks, "not the best", Exact(), [[7, 7], [7, 8]])
    assert verdicts(checks.result) | {"best": True, "not the best": False} == verdicts(
        checks.result
    )


def test_engines_that_would_be_late_are_left_out(tmp_path):
    found = results.run_phase(replace(settings(tmp_path), seconds=0.0), "tiny")
    assert found["skipped"] == "no time was left for: no overlap"
    assert [*found["engines"]] == ["plain", "deterministic", "default"]
    assert found["error"] == ""


def test_prompts_that_steps_may_cut_are_not_compared_by_default(tmp_path):
    checks = results.Checks(settings(tmp_path), "tiny")
    assert [len(ids) for ids in checks.prompts] == [5, 70]
    assert checks.in_one_step([[1, 2], [3, 4]]) == [[1, 2], []]


def test_memory_beside_weights_and_cache_is_recorded():
    stats = types.SimpleNamespace(cache_bytes=300)
    engine = types.SimpleNamespace(weight_bytes=500, stats=lambda: stats)
    assert end_to_end.memory_facts(engine, 2000, 1100) == {
        "weights": 500, "cache": 300, "free_after": 1100, "other": 100,
    }  # fmt: skip
    assert end_to_end.memory_facts(engine, None, None) == {"weights": 500, "cache": 300}


def test_figures_are_taken_without_a_host_tier_that_is_refused(tmp_path, monkeypatch):
    """A machine may report less memory than the tier asks for."""
    monkeypatch.setattr(end_to_end, "TINY", replace(end_to_end.TINY, host_memory=1 << 50))
    found = end_to_end.run_phase(settings(tmp_path), "tiny")
    assert found["error"] == ""
    for engine in found["engines"].values():
        assert f"host_memory is {1 << 50}, expected at most" in engine["no_host_tier"]
    turns = [figure["how"] for figure in found["figures"] if figure["figure"] == "turn"]
    assert turns == ["cached", "computed again"]
    assert {f["figure"] for f in found["figures"]} == {"decode", "prefill", "turn", "together"}


@pytest.mark.parametrize(
    ("note", "overlapped", "options", "expected"),
    [
        ("/lib/libcublasLt.so.13", 5, {}, ""),
        ("our own kernels", 5, {"deterministic": True}, ""),
        ("no cuBLASLt: nothing was found", 5, {}, "cuBLASLt was not used"),
        ("/lib/libcublasLt.so.13; cuBLASLt (/lib) does not compute a product of 33 rows", 5, {},
         "cuBLASLt was not used for a product"),
        ("/lib/libcublasLt.so.13; cuBLASLt (/lib) does not compute a product of 33 rows: and the "
         "library is not used any more", 5, {}, "cuBLASLt was not used"),
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
