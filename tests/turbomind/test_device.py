"""The device that "auto" chooses, and the suite under `pytest --device`."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from assets import ROOT
from checkpoints import TINY, write_tiny
from command import ENVIRONMENT, lmchat
from devices import FakeGpus

import turbomind
from turbomind import _C, Engine, InvalidRequest, ModelError
from turbomind.config import device as device_module
from turbomind.config.device import (
    DETERMINISTIC_VARIABLE,
    DEVICE_VARIABLE,
    SWITCH_VARIABLES,
    device_name,
    gpu_options,
)
from turbomind.loading.loader import load


@pytest.fixture
def machine(monkeypatch):
    """Sets the machine's GPUs, without environment variables."""

    def set_gpus(status, fault=""):
        gpus = FakeGpus(status, fault)
        gpus.install(monkeypatch)
        return gpus

    yield set_gpus
    device_module._tried.cache_clear()


@pytest.fixture
def emulated_gpu(machine, monkeypatch):
    """A machine with a GPU, which is the emulated one: "auto" takes it."""
    machine("1 CUDA device")
    gpu = _C.GpuOptions("emulated", 0, False, [])
    monkeypatch.setattr(
        device_module, "_options", lambda device, *_: [] if device == "cpu" else [gpu]
    )


def chosen(*arguments, **options):
    return device_name(gpu_options(*arguments, **options))


def test_auto_is_a_gpu_that_works(machine, caplog):
    gpus = machine("2 CUDA devices")
    assert [chosen() for _ in range(3)] == ["cuda:0"] * 3
    assert gpus.tried == [0]
    assert chosen("cpu") == "cpu"
    assert chosen("cuda:1") == "cuda:1"
    assert chosen("cuda_emulated") == "cuda_emulated"
    assert caplog.records == []


def test_auto_without_a_gpu_is_the_cpu(machine, caplog):
    gpus = machine("no CUDA device: no driver")
    assert chosen() == "cpu"
    assert device_module.gpu_fault() == "no CUDA device: no driver"
    assert (gpus.tried, caplog.records) == ([], [])
    with pytest.raises(
        InvalidRequest, match="^device is 'cuda', expected .*: no CUDA device: no driver$"
    ):
        chosen("cuda")


def test_a_gpu_that_does_not_work_is_logged_once(machine, caplog):
    machine("2 CUDA devices", "out of order")
    with caplog.at_level(logging.WARNING):
        assert [chosen() for _ in range(3)] == ["cpu"] * 3
    [record] = caplog.records
    assert record.getMessage() == (
        "2 CUDA devices, but cuda:0 does not work, so the CPU computes: out of order"
    )
    assert chosen("cuda") == "cuda:0"  # by name: opening it raises the error


@pytest.mark.parametrize(
    "options", [{"isa": "portable"}, {"dtype": "float32"}, {"kv_dtype": "float32"}]
)
def test_auto_is_the_cpu_for_what_only_a_cpu_has(options, machine, monkeypatch):
    gpus = machine("1 CUDA device")
    assert chosen(**options) == "cpu"
    assert gpus.tried == []
    assert chosen("cuda", **options) == "cuda:0"  # by name: loading raises the error
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    assert chosen(**options) == "cuda:0"
    assert chosen("auto", dtype="float16", kv_dtype="bfloat16") == "cuda:0"


def test_the_environment_variable_replaces_auto(machine, monkeypatch):
    gpus = machine("3 CUDA devices")
    for value, device in (("cpu", "cpu"), ("cuda:2", "cuda:2"), ("cuda_emulated",) * 2):
        monkeypatch.setenv(DEVICE_VARIABLE, value)
        assert (chosen(), chosen("cpu"), chosen("cuda")) == (device, "cpu", "cuda:0")
    assert gpus.tried == []
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
    with pytest.raises(InvalidRequest, match=f"{DEVICE_VARIABLE} is 'cuda', .*: no CUDA device"):
        chosen()


def test_deterministic_comes_from_the_option_or_its_variable(machine, monkeypatch):
    machine("1 CUDA device")
    for value, wanted in ((None, False), ("", False), ("0", False), ("1", True)):
        if value is not None:
            monkeypatch.setenv(DETERMINISTIC_VARIABLE, value)
        found = [gpu_options("cuda", asked)[0].deterministic for asked in (None, False, True)]
        assert found == [wanted, False, True]
    monkeypatch.setenv(DETERMINISTIC_VARIABLE, "yes")
    with pytest.raises(InvalidRequest, match=f"{DETERMINISTIC_VARIABLE} is 'yes', expected 0 or 1"):
        gpu_options("cpu")
    with pytest.raises(InvalidRequest, match="deterministic is 1, expected True, False or None"):
        gpu_options("cpu", 1)


def test_an_engine_reports_its_device(machine, monkeypatch, tmp_path):
    machine("no CUDA device: no driver")
    folder = write_tiny(tmp_path)
    with Engine(folder, threads=1, cache_memory="1MiB") as engine:
        assert (engine.device, engine.info.dtype) == ("cpu", "float32")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda_emulated")
    with Engine(folder, threads=1, cache_memory="1MiB") as engine:
        assert (engine.device, engine.info.dtype) == ("cuda_emulated", "bfloat16")
        assert engine.numerics_fingerprint.startswith("emulated")


def test_a_numerics_fingerprint_identifies_instruction_set_revision_and_build(machine, tmp_path):
    """Another process of the same build has the same fingerprint."""
    machine("no CUDA device: no driver")
    folder = write_tiny(tmp_path)
    with Engine(folder, threads=1, cache_memory="1MiB") as engine:
        found = engine.numerics_fingerprint
        assert re.fullmatch(rf"cpu/{engine.isa}/\d+-[0-9a-f]{{8}}", found)
    script = (
        f"from turbomind import Engine; e = Engine({str(folder)!r}, device='cpu', threads=1); "
        "print(e.numerics_fingerprint)"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert again.stdout.strip() == found


@pytest.fixture
def model(tmp_path):
    """Makes a folder with the tiny config and the given changes."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(TINY | changes))
        return tmp_path / "config.json"

    return write


SMALL = {"threads": 1, "cache_memory": "1MiB", "load_format": "dummy"}


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({"head_dim": 20}, {}, r"layers\[0\].k_dim is 20, expected a multiple of 8"),
        ({}, {"cache_memory": "1.5GiB"}, "the device's free memory"),
        ({}, {"prefill_chunk": 70000, "max_batch_size": 999}, "at most 65535 on a GPU"),
    ],
)
def test_auto_is_the_cpu_for_a_model_that_the_gpu_does_not_take(
    changes, options, why, emulated_gpu, model, caplog, monkeypatch
):
    """What is known before the weights are read does not read them for the GPU."""
    asked = {**SMALL, **options}
    loads = []
    monkeypatch.setattr(
        "turbomind.engine.plan.load", lambda *a, **k: loads.append(1) or load(*a, **k)
    )
    with caplog.at_level(logging.WARNING), Engine(model(**changes), **asked) as engine:
        assert (engine.device, engine.info.dtype) == ("cpu", "float32")
        assert len(engine.generate([1, 2, 3], max_new_tokens=2, ignore_eos=True).token_ids) == 2
        assert re.search(why, engine.device_note)
    assert len(loads) == (2 if "prefill_chunk" in options else 1)
    [record] = caplog.records
    assert record.getMessage() == f"{engine.device_note}; the CPU computes"
    assert engine.device_note.startswith("cuda_emulated does not take the model: ")
    with pytest.raises((ModelError, InvalidRequest), match=why):
        Engine(model(**changes), device="cuda_emulated", **asked)


def test_auto_stays_on_a_gpu_that_takes_the_model(emulated_gpu, model, monkeypatch, caplog):
    with Engine(model(), **SMALL) as engine:
        assert (engine.device, engine.device_note) == ("cuda_emulated", None)
    wrong = {**SMALL, "cache_memory": 1000}  # wrong on both devices: the CPU's error is raised
    with pytest.raises(InvalidRequest, match="cache_memory is 1000 bytes, expected at least one"):
        Engine(model(), **wrong)
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")  # the variable names it
    with pytest.raises(ModelError, match="k_dim is 20"):
        Engine(model(head_dim=20), **SMALL)
    assert caplog.records == []


def test_info_reports_why_a_gpu_refuses_a_model(emulated_gpu, model, monkeypatch):
    from cli.info import plan_facts

    def found(device, **changes):
        facts = plan_facts(turbomind.plan(model(**changes), device=device), 0)
        return facts["dtype"], facts["gpu_fault"]

    assert found("auto") == ("bfloat16", None)
    fault = "layers[0].k_dim is 20, expected a multiple of 8 up to 256 on a GPU"
    refusal = f"cuda_emulated does not take the model: {fault}"
    assert found("auto", head_dim=20) == ("float32", refusal)
    assert found("cuda_emulated", head_dim=20) == ("bfloat16", f"cuda_emulated: {fault}")
    assert found("cpu", head_dim=20) == ("float32", None)
    large = found("cuda_emulated", intermediate_size=1 << 20, num_hidden_layers=8)[1]
    assert re.fullmatch(r"cuda_emulated: the weights need \d+ bytes as bfloat16, it has \d+", large)


def test_library_folders_are_those_of_wheels_then_toolkits(tmp_path):
    (tmp_path / "libcublasLt.so.13").write_text("not a library")
    note = _C.cublaslt_note([str(tmp_path)])
    if not note.startswith("/"):  # where no cuBLASLt is installed
        assert note.startswith(f"no cuBLASLt: {tmp_path}/libcublasLt.so.13: ")
        assert note.count("no cuBLASLt") == 1


# Attention results of two widths, 48 and 80 columns, take turns in the same work memory.
TWO_HEAD_WIDTHS = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 40,
    "head_dim": 24,
    "global_head_dim": 40,
    "hidden_size_per_layer_input": 0,
    "rope_theta": None,
    "hidden_act": None,
}


@pytest.mark.parametrize("changes", [{}, TWO_HEAD_WIDTHS], ids=["tiny", "two_head_widths"])
def test_a_warm_up_changes_no_tokens_and_is_logged(changes, model, caplog):
    """The tokens are those of an engine without warm-up; a warm-up is logged. It attends to pages
    that nobody wrote, which hold NaN here, and leaves nothing of them in work memory."""
    small = {**SMALL, "device": "cuda_emulated", "max_context_tokens": 100, "prefill_chunk": 32}
    tokens = []
    with caplog.at_level(logging.INFO, "turbomind"):
        for warm_up in (None, True):
            with Engine(model(**changes), **small, max_batch_size=2, warm_up=warm_up) as engine:
                done = engine.generate(range(50), max_new_tokens=4, temperature=0, ignore_eos=True)
                tokens.append(done.token_ids)
                assert engine.stats().tokens_decoded == 4
                assert engine.library_note.startswith("our own kernels")
    assert tokens[0] == tokens[1]
    [record] = caplog.records
    message = r"warmed up in [\d.]+ s: (\d+) of (\d+) kinds of steps"  # a slow machine runs fewer
    assert re.fullmatch(message, record.getMessage())
    with pytest.raises(InvalidRequest, match="warm_up is 1, expected True, False or None"):
        Engine(model(**changes), **small, warm_up=1)


def test_an_engine_on_a_gpu_is_closed_before_the_driver_goes(model):
    """The engine is not closed and cannot be collected, and a request still runs."""
    code = (
        "import atexit, sys\n"
        "ends = ('cancelled', 'length')\n"
        "atexit.register(lambda: print(engine._closed, stream.result().finish_reason in ends))\n"
        "from turbomind import Engine\n"
        f"engine = Engine({str(model())!r}, device='cuda_emulated', **{SMALL!r})\n"
        "engine.itself = engine\n"
        "stream = engine.stream([1, 2], ignore_eos=True)\n"
        "next(iter(stream))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True True\n", "", 0)


@pytest.mark.parametrize("name", SWITCH_VARIABLES)
def test_unknown_values_of_switches_are_refused(name, model, emulated_gpu, monkeypatch):
    """Also where "auto" would take the CPU instead of a GPU that does not open."""
    monkeypatch.setenv(name, "no")
    default = SWITCH_VARIABLES[name]
    expected = rf"{name} is 'no', expected 0 \(off\) or 1 \(on\); the default is {default}"
    for device in ("auto", "cuda_emulated"):
        with pytest.raises(InvalidRequest, match=expected):
            Engine(model(), device=device, **SMALL)
    for value in ("0", "1"):
        monkeypatch.setenv(name, value)
        with Engine(model(), device="cuda_emulated", **SMALL) as engine:
            assert (f"{name} is {value}" in engine.library_note) == (value != default)


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


def test_info_reports_the_device_and_the_reason(tmp_path):
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
    """Runs the suite in its own process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Returns the number of tests that "passed", "skipped" ..."""
    *_, last = done.stdout.strip().splitlines()
    return {
        word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last.split(" in ")[0])
    }


API = "tests/turbomind/test_engine_api.py"
IDENTITY = "tests/turbomind/test_identity.py"
OTHER_WEIGHTS = f"{IDENTITY}::test_chunks_and_threads_do_not_change_results_of_other_weights"


def test_the_suite_runs_on_an_emulated_gpu():
    """Runs a few tests of engines, handles, pages and sessions; those of the CPU are skipped."""
    done = suite(
        "--device=cuda_emulated",
        "tests/turbomind/test_engine_api.py::test_a_handle_keeps_its_tokens_between_requests",
        "tests/turbomind/test_engine_api.py::test_info_describes_the_model",
        "tests/lmchat/sessions/test_handle_advance.py::test_advance_does_all_or_nothing",
        "tests/turbomind/test_bad_input.py::test_logits_that_are_not_finite_end_the_request_only",
        "tests/turbomind/test_tiers.py::test_residence_reports_the_prefix_of_each_tier",
        "tests/turbomind/test_tiers.py::test_sessions_that_exceed_the_device_move_through_tiers",
        OTHER_WEIGHTS,
        "tests/lmchat/kv/test_session_pages.py::test_after_a_restart_the_past_is_loaded",
        f"--deselect={OTHER_WEIGHTS}[llama-float16]",
        f"--deselect={OTHER_WEIGHTS}[mixed_windows-float16]",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done) == {"passed": 7, "skipped": 2, "deselected": 2}
    assert "of the CPU: a GPU has no float32" in done.stdout


@pytest.mark.skipif(not _C.cuda_status().startswith("no CUDA"), reason="there is a GPU")
def test_the_suite_fails_without_the_gpu_it_was_given():
    """Tests that compute, in this process or a child, are skipped with the reason."""
    done = suite(
        "--device=cuda",
        "tests/turbomind/test_engine_api.py::test_a_handle_keeps_its_tokens_between_requests",
        f"{API}::test_ctrl_c_ends_a_blocking_call_and_the_engine_continues",
        "tests/turbomind/test_engine_api.py::test_sizes_are_parsed_and_cores_counted",
        "tests/lmchat/kv/test_session_pages.py::test_warm_brings_it_up",
        "tests/lmchat/test_bundled.py::test_json_without_a_name",
        "tests/turbomind/loading/test_checkpoint.py::test_superfluous_tensors_are_refused",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done) == {"passed": 1, "skipped": 5}
    assert _C.cuda_status() in done.stdout
