"""Which device "auto" is, and what `pytest --device` makes of the suite."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from assets import ROOT
from checkpoints import write_tiny
from command import ENVIRONMENT, lmchat

from turbomind import _C, Engine, InvalidRequest
from turbomind import device as device_module
from turbomind.device import DETERMINISTIC_VARIABLE, DEVICE_VARIABLE, device_name, gpu_options


class FakeGpus:
    """What `_C` says of the machine; counts how often a kernel was tried."""

    def __init__(self, status: str, fault: str = "") -> None:
        self.status, self.fault, self.tried = status, fault, 0

    def gpu_fault(self, index: int) -> str:
        assert index == 0
        self.tried += 1
        return self.fault


@pytest.fixture
def machine(monkeypatch):
    """Sets the machine's GPUs; no variable says what to take."""
    monkeypatch.delenv(DEVICE_VARIABLE)
    monkeypatch.delenv(DETERMINISTIC_VARIABLE)

    def set_gpus(status, fault=""):
        gpus = FakeGpus(status, fault)
        monkeypatch.setattr(_C, "cuda_status", lambda: gpus.status)
        monkeypatch.setattr(_C, "gpu_fault", gpus.gpu_fault)
        device_module.gpu_fault.cache_clear()
        return gpus

    yield set_gpus
    device_module.gpu_fault.cache_clear()


def chosen(*arguments, **options):
    return device_name(gpu_options(*arguments, **options))


def test_auto_is_a_gpu_that_works(machine, caplog):
    gpus = machine("1 CUDA device")
    assert [chosen() for _ in range(3)] == ["cuda:0"] * 3
    assert gpus.tried == 1
    assert chosen("cpu") == "cpu"
    assert chosen("cuda:1") == "cuda:1"
    assert chosen("cuda_emulated") == "cuda_emulated"
    assert caplog.records == []


def test_auto_without_a_gpu_is_the_cpu(machine, caplog):
    gpus = machine("no CUDA device: no driver")
    assert chosen() == "cpu"
    assert device_module.gpu_fault() == "no CUDA device: no driver"
    assert (gpus.tried, caplog.records) == (0, [])
    with pytest.raises(InvalidRequest, match="^device is 'cuda': no CUDA device: no driver$"):
        chosen("cuda")


def test_a_gpu_that_does_not_work_is_told_of_once(machine, caplog):
    machine("2 CUDA devices", "out of order")
    with caplog.at_level(logging.WARNING):
        assert [chosen() for _ in range(3)] == ["cpu"] * 3
    [record] = caplog.records
    assert record.getMessage() == (
        "2 CUDA devices, but the first one does not work, so the CPU computes: out of order"
    )
    assert chosen("cuda") == "cuda:0"  # by name: opening it says what is wrong


@pytest.mark.parametrize(
    "options", [{"isa": "portable"}, {"dtype": "float32"}, {"kv_dtype": "float32"}]
)
def test_auto_is_the_cpu_for_what_only_a_cpu_has(options, machine, monkeypatch):
    gpus = machine("1 CUDA device")
    assert chosen(**options) == "cpu"
    assert gpus.tried == 0
    assert chosen("cuda", **options) == "cuda:0"  # by name: the load refuses what it cannot do
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    assert chosen(**options) == "cuda:0"
    assert chosen("auto", dtype="float16", kv_dtype="bfloat16") == "cuda:0"


def test_the_variable_is_what_auto_means(machine, monkeypatch):
    gpus = machine("1 CUDA device")
    for value, device in (("cpu", "cpu"), ("cuda:2", "cuda:2"), ("cuda_emulated",) * 2):
        monkeypatch.setenv(DEVICE_VARIABLE, value)
        assert (chosen(), chosen("cpu"), chosen("cuda")) == (device, "cpu", "cuda:0")
    assert gpus.tried == 0
    for value in ("auto", ""):
        monkeypatch.setenv(DEVICE_VARIABLE, value)
        assert chosen() == "cuda:0"
    for value in ("gpu", "cuda:", "cuda:x", "CPU", "cuda:-1"):
        monkeypatch.setenv(DEVICE_VARIABLE, value)
        expected = (
            f"the environment variable {DEVICE_VARIABLE} is {value!r}, expected 'auto', 'cpu'"
        )
        with pytest.raises(InvalidRequest, match=f"^{re.escape(expected)}"):
            chosen()
    machine("no CUDA device: no driver")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    with pytest.raises(InvalidRequest, match=f"{DEVICE_VARIABLE} is 'cuda': no CUDA device"):
        chosen()


def test_deterministic_and_its_variable(machine, monkeypatch):
    machine("1 CUDA device")
    for value, wanted in ((None, False), ("", False), ("0", False), ("1", True)):
        if value is not None:
            monkeypatch.setenv(DETERMINISTIC_VARIABLE, value)
        found = [gpu_options("cuda", asked).deterministic for asked in (None, False, True)]
        assert found == [wanted, False, True]
    monkeypatch.setenv(DETERMINISTIC_VARIABLE, "yes")
    with pytest.raises(InvalidRequest, match=f"{DETERMINISTIC_VARIABLE} is 'yes', expected 0 or 1"):
        gpu_options("cpu")
    with pytest.raises(InvalidRequest, match="deterministic is 1, expected True, False or None"):
        gpu_options("cpu", 1)


def test_an_engine_says_where_it_computes(machine, monkeypatch, tmp_path):
    machine("no CUDA device: no driver")
    folder = write_tiny(tmp_path)
    with Engine(folder, threads=1, cache_memory="1MiB") as engine:
        assert (engine.device, engine.info.dtype) == ("cpu", "float32")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda_emulated")
    with Engine(folder, threads=1, cache_memory="1MiB") as engine:
        assert (engine.device, engine.info.dtype) == ("cuda_emulated", "bfloat16")
        assert engine.numerics_id.startswith("emulated")


def test_an_import_does_not_start_a_driver():
    code = "import lmchat, turbomind; print('libcuda.so' in open('/proc/self/maps').read())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    assert (done.stdout, done.stderr) == ("False\n", "")


# --- the commands --------------------------------------------------------------------------------


def test_commands_take_a_device(tmp_path):
    from chat_models import chat_model

    model = str(chat_model(tmp_path))
    short = ["-p", "Hi", "--temperature", "0", "--max-new-tokens", "3", "--cache-memory", "2MiB"]
    auto = lmchat("chat", model, *short, env={**ENVIRONMENT, DEVICE_VARIABLE: "cuda_emulated"})
    given = lmchat("chat", model, *short, "--device", "cuda_emulated", "--deterministic")
    assert (auto.returncode, given.returncode) == (0, 0), auto.stderr + given.stderr
    assert auto.stdout == given.stdout
    wrong = lmchat("chat", model, *short, env={**ENVIRONMENT, DEVICE_VARIABLE: "tpu"})
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"lmchat: the environment variable {DEVICE_VARIABLE} is 'tpu'")


def test_info_says_which_device_and_why(monkeypatch, tmp_path):
    import json

    folder = str(write_tiny(tmp_path))
    found = json.loads(lmchat("info", folder, "--device", "cuda_emulated", "--json").stdout)
    assert found["machine"]["device"] == "cuda_emulated"
    assert (found["model"]["dtype"], found["model"]["kv_dtype"]) == ("bfloat16", "bfloat16")
    found = json.loads(lmchat("info", folder, "--device", "cpu", "--json").stdout)
    assert found["machine"]["device"] == "cpu"
    assert found["model"]["dtype"] == "float32"
    assert len(found["machine"]["gpus"]) == sum(d.kind == "cuda" for d in _C.gpu_devices())
    if not found["machine"]["gpus"]:
        assert found["machine"]["gpu_fault"] == _C.cuda_status()
        assert _C.cuda_status() in lmchat("info", "--device", "cpu").stdout


# --- the suite's own option ----------------------------------------------------------------------


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The suite in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """How many tests "passed", "skipped" ..."""
    *_, last = done.stdout.strip().splitlines()
    return {
        word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last.split(" in ")[0])
    }


def test_the_suite_on_an_emulated_gpu():
    """A few tests of engines, handles, pages on disk and sessions; those of the CPU are skipped."""
    done = suite(
        "--device=cuda_emulated",
        "tests/test_engine_api.py::test_handle",
        "tests/test_engine_api.py::test_info",
        "tests/test_advance.py::test_advance",
        "tests/test_bad_input.py::test_logits_that_are_not_finite",
        "tests/test_tiers.py::test_what_is_where",
        "tests/test_tiers.py::test_more_sessions_than_the_device_holds",
        "tests/test_identity.py::test_chunks_and_threads_of_other_weights",
        "tests/test_session_pages.py::test_after_a_restart_the_past_is_loaded",
        "--deselect=tests/test_identity.py::test_chunks_and_threads_of_other_weights[llama-float16]",
        "--deselect=tests/test_identity.py::test_chunks_and_threads_of_other_weights"
        "[mixed_windows-float16]",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done) == {"passed": 7, "skipped": 2, "deselected": 2}
    assert "of the CPU: a GPU has no float32" in done.stdout


@pytest.mark.skipif(not _C.cuda_status().startswith("no CUDA"), reason="there is a GPU")
def test_the_suite_without_the_gpu_that_was_asked_for():
    """Tests that compute, in this process or in one they start, are skipped with the reason."""
    done = suite(
        "--device=cuda",
        "tests/test_engine_api.py::test_handle",
        "tests/test_engine_api.py::test_keyboard_interrupt",
        "tests/test_engine_api.py::test_machine",
        "tests/test_session_pages.py::test_warm_brings_it_up",
        "tests/test_bundled.py::test_json_without_a_name",
        "tests/test_checkpoint.py::test_superfluous_tensors",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done) == {"passed": 1, "skipped": 5}
    assert _C.cuda_status() in done.stdout
