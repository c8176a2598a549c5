"""`lmchat bench` on a GPU, emulated: figures beside the ceilings of the same device."""

import json

import pytest
from checkpoints import write_tiny
from command import lmchat

from turbomind.config import facts
from turbomind.loading.loader import describe

EMULATED = ["--device", "cuda_emulated"]


def report(*arguments):
    done = lmchat("bench", *arguments, *EMULATED, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ceilings_are_those_of_the_gpu():
    found = report("ceilings")
    assert found["device"] == "cuda_emulated"
    assert "emulat" in found["name"]
    assert found["isa"] is found["threads"] is None
    assert min(found["read"], found["copy"], found["tiles"]) > 0
    table = lmchat("bench", "ceilings", *EMULATED).stdout
    assert [word in table for word in ("read", "copy", "tiles", "GB/s", "TFLOP/s")] == [True] * 5
    done = lmchat("bench", "ceilings", *EMULATED, "--threads", "2")
    assert done.returncode == 2
    assert "device is 'cuda_emulated': add --device cpu" in done.stderr


def test_engine_on_a_gpu_beside_its_ceilings(tmp_path):
    folder = write_tiny(tmp_path)
    short = ["--batch", "2", "--context", "70", "--prefill", "9", "--steps", "4", "--repeat", "1"]
    found = report("engine", str(folder), *short, "--cache-memory", "2MiB")
    limits = found["ceilings"]
    assert limits["device"] == "cuda_emulated"
    info = describe(folder, gpu=True)
    (prefill,), (decode,) = found["prefill"], found["decode"]
    assert prefill["of_tiles"] == pytest.approx(
        facts.prefill_flops(info.description, 9) / prefill["seconds"] / limits["tiles"]
    )
    assert decode["of_read"] == pytest.approx(
        (decode["weight_bytes"] + decode["kv_bytes"]) / decode["step_seconds"] / limits["read"]
    )
    for kind in ("prefill", "decode"):
        ops = {row["op"]: row for row in found["ops"][kind]}
        assert {"qkv", "rope_kv", "attention", "gate_up", "down", "head"} <= ops.keys()
        assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in ops.values())
    # Two prompts of 9 tokens, of which token i sees i + 1.
    layers = info.description.layers
    width = sum(4 * layer.heads * layer.head_dim for layer in layers)
    attention = next(row for row in found["ops"]["prefill"] if row["op"] == "attention")
    assert attention["flops"] == 2 * (9 * 10 // 2) * width


def test_products_are_measured_on_the_cpu_only(tmp_path):
    done = lmchat("bench", "engine", str(write_tiny(tmp_path)), *EMULATED, "--products")
    assert done.returncode == 2
    assert "--products are measured on the CPU only, device is 'cuda_emulated'" in done.stderr
