"""tools/gpu_check.py in emulation: the record follows the schema, also if phases fail."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import gpu_check
import pytest
from assets import ROOT
from driver_builds import CMAKE, JOBS, PATH, PLAIN, locked
from gpu import bars, bench, building, end_to_end, kernels, machine, ops, runner, shell, suite
from gpu.phases import CHECK, PEERS, REST, Phase, phases_of, seconds_of
from gpu.settings import Settings, load_settings

from lmchat.archive.schema import Schema
from turbomind import _C

SCRIPT = ROOT / "tools" / "gpu_check.py"
pytestmark = pytest.mark.timeout(1800)  # the first build of the drivers


def schema() -> Schema:
    return Schema(json.loads((kernels.RECORDS / "schema.json").read_text()))


# Slow, and run by tests/cpp/test_drivers.py: here only their command lines are tested.
SLOW = ("cuda_attention_test", "cuda_linear_test", "cuda_sample_test")


@pytest.fixture
def drivers(built, tmp_path) -> Path:
    """A folder with the built programs, and stand-ins for slow ones."""
    folder = tmp_path / "drivers"
    folder.mkdir()
    for name in ("fake_cublaslt", *kernels.drivers()):
        (folder / name).symlink_to(built / name)
    for name in SLOW:
        stand_in(folder / name, '[ "$*" = "--seed 5" ]')
    return folder


def stand_in(path: Path, script: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder of the plain drivers, which tests/cpp/test_drivers.py uses too."""
    if CMAKE is None:
        pytest.skip("cmake is not installed")
    configure = ["cmake", "-S", str(ROOT), "-B", str(PLAIN), "-DTM_BUILD_TESTS=ON"]
    if not (PLAIN / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja", "-DTM_BUILD_PYTHON=OFF"]
    build = ["cmake", "--build", str(PLAIN), "--parallel", JOBS, "--target", *kernels.drivers()]
    with locked(PLAIN):
        for command in (configure, build):
            done = subprocess.run(
                command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return PLAIN


def settings(work: Path) -> Settings:
    return Settings("cuda_emulated", True, str(work), str(work), str(ROOT), str(work), "test", [1])


def check(work: Path, *options: str) -> tuple[int, dict, str]:
    """Runs the script. Returns its exit status, record and output."""
    command = [sys.executable, str(SCRIPT), "--device", "cuda_emulated", "--work", str(work)]
    command += ["--out", str(work / "out"), "--commit", "0123abcd", "--seeds", "5", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    records = list((work / "out").glob("*.json"))
    assert len(records) == 1, done.stdout[-4000:] + done.stderr[-4000:]
    return done.returncode, json.loads(records[0].read_text()), done.stdout


def test_a_whole_run_writes_a_valid_record(drivers, tmp_path):
    only = "environment,build,ceilings,ops,speed,end_to_end:tiny,results:tiny,sanitizer"
    code, record, output = check(
        tmp_path, "--package", str(ROOT), "--drivers", str(drivers), "--only", only
    )
    schema().check(record)
    states = {phase["name"]: phase["status"] for phase in record["phases"]}
    assert states.pop("sanitizer") == "not available"
    assert set(states.values()) == {"ok"}, output
    assert code == 0
    assert record["complete"]
    assert record["emulated"]
    assert record["bars"] == []  # figures of an emulator are not judged
    assert all(kernel["passed"] for kernel in record["kernels"].values())
    found = {phase["name"]: phase["result"] for phase in record["phases"]}
    assert {run["seed"] for run in found["ops"]["runs"]} == {5}
    assert {"copy_bytes_per_s", "read_bytes_per_s"} < found["ceilings"]["limits"].keys()
    ops = {figure["op"] for figure in found["speed"]["figures"]}
    assert ops == {
        "attention_decode", "attention_prefill", "copy_pages", "embedding", "gather", "linear",
        "rms_norm", "rope_write_kv", "sample", "scaled_add", "softcap",
    }  # fmt: skip
    for figure in found["speed"]["figures"]:
        assert figure["ms"] > 0, figure
        assert figure["bytes"] > 0, figure
    check_end_to_end(found["end_to_end:tiny"])
    assert all(each["ok"] for each in found["results:tiny"]["checks"])
    assert "results tiny: 16 of 16 checks are right" in output
    assert "kernel files that passed" in output


def test_peers_write_a_record_on_tiny_shapes(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch's threads would wait for each other
    only = "environment,peers:tiny"
    code, record, output = check(
        tmp_path, "--package", str(ROOT), "--drivers", str(tmp_path), "--peers", "--only", only
    )
    schema().check(record)
    assert (code, record["what"]) == (0, "peers"), output
    found = record["phases"][1]["result"]
    assert [figure["figure"] for figure in found["figures"]] == [
        "decode", "decode", "prefill", "prefill", "turn", "turn", "together",
    ]  # fmt: skip
    assert all(figure["ms"] > 0 for figure in found["figures"])
    assert found["fallback"] == ""  # transformers has a static cache


def check_end_to_end(found: dict) -> None:
    for facts in found["engines"].values():
        assert facts["library_note"] == "our own kernels"
        assert facts["steps_overlapped"] > 0
    figures = {}
    for figure in found["figures"]:
        figures.setdefault(figure["figure"], []).append(figure)
    assert [figure["tokens"] for figure in figures["prefill"]] == [5, 70]
    decoded = [(f["batch"], f["deterministic"]) for f in figures["decode"]]
    assert decoded == [(1, False), (2, False), (1, True), (2, True)]
    assert figures["together"][0]["tokens_per_s"] > 0
    turns = {figure["how"]: figure for figure in figures["turn"]}
    assert turns["cached"]["reused_tokens"] == 70
    assert turns["cached"]["loaded_tokens"] == 0
    assert turns["from the host"]["loaded_tokens"] >= 64
    assert turns["computed again"]["reused_tokens"] == 0


def test_a_kernel_passes_with_every_seed_or_not_at_all(tmp_path):
    folder = tmp_path / "drivers"
    folder.mkdir()
    for name in kernels.drivers():
        stand_in(folder / name, "exit 0")
    stand_in(folder / "cuda_rope_test", 'echo "head 3 differs"; [ "$2" != 7 ]')
    stand_in(folder / "cuda_sample_test", "exit 1")
    (folder / "cuda_cublaslt_test").unlink()
    command = ["--package", str(ROOT), "--drivers", str(folder), "--only", "ops"]
    code, record, output = check(tmp_path, *command, "--seeds", "6,7")
    schema().check(record)
    assert code == 1
    assert [name for name, kernel in record["kernels"].items() if not kernel["passed"]] == [
        "cpp/linear/linear_cuda.cu", "cpp/ops/rope_kv_cuda.cu", "cpp/ops/sample_cuda.cu",
    ]  # fmt: skip
    runs = record["phases"][0]["result"]["runs"]
    rope = {run["seed"]: run["status"] for run in runs if run["driver"] == "cuda_rope_test"}
    assert rope == {6: "ok", 7: "failed"}
    assert "cuda_rope_test seed 7: failed: head 3 differs" in output


def test_without_programs_every_phase_is_still_tried(tmp_path):
    """Nothing is built, so the package has no extension."""
    empty = tmp_path / "empty"
    building.copy_package(empty, empty)
    # An editable install would provide its own.
    (empty / "turbomind" / "_C.py").write_text("raise ImportError('not built')\n")
    only = "environment,ceilings,ops,end_to_end:tiny"
    code, record, _ = check(
        tmp_path, "--package", str(empty), "--drivers", str(empty), "--only", only
    )
    schema().check(record)
    assert code == 1
    states = {phase["name"]: phase["status"] for phase in record["phases"]}
    assert states == {
        "environment": "ok", "ceilings": "failed", "ops": "failed", "end_to_end:tiny": "failed",
    }  # fmt: skip
    assert not any(kernel["passed"] for kernel in record["kernels"].values())
    assert all(phase["error"] for phase in record["phases"] if phase["status"] == "failed")


def test_without_a_gpu_its_phases_are_not_available(tmp_path):
    if not machine.no_gpu():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPT), "--package", str(ROOT), "--drivers", str(tmp_path)]
    command += [
        "--work",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--only",
        "build,ops,speed",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    (path,) = (tmp_path / "out").glob("*.json")
    phases = json.loads(path.read_text())["phases"]
    assert done.returncode == 0
    assert [(phase["name"], phase["status"]) for phase in phases] == [
        ("build", "ok"), ("ops", "not available"), ("speed", "not available"),
    ]  # fmt: skip
    assert all(phase["error"].startswith("no GPU: ") for phase in phases[1:])


def test_the_driver_reports_if_there_is_a_gpu(monkeypatch):
    class Driver:
        codes = (0, 0)
        count = 1

        def cuInit(self, flags):
            return self.codes[0]

        def cuDeviceGetCount(self, to):
            to._obj.value = self.count
            return self.codes[1]

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Driver())
    assert machine.no_gpu() == ""
    monkeypatch.setattr(Driver, "codes", (999, 0))  # the phases report more
    assert machine.no_gpu() == ""
    monkeypatch.setattr(Driver, "codes", (machine.NO_DEVICE, 0))
    assert machine.no_gpu() == "no GPU: the driver has found none"
    monkeypatch.setattr(Driver, "codes", (0, 0))
    monkeypatch.setattr(Driver, "count", 0)
    assert machine.no_gpu() == "no GPU: the driver has found none"


FAKE = """
import json, subprocess, sys, time
from pathlib import Path
name = sys.argv[sys.argv.index("--phase") + 1]
work = Path(sys.argv[sys.argv.index("--work") + 1])
record = work / "record.json"
before = len(json.loads(record.read_text())["phases"]) if record.exists() else 0
result = {"so_far": 1, "phases_before": before}
(work / f"{name}.json").write_text(json.dumps(result))
if name == "fails":
    sys.exit("it does not work")
if name == "dies":
    import os; os.kill(os.getpid(), 11)
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (work / "child").write_text(str(child.pid))
    time.sleep(600)
if name == "garbled":
    (work / f"{name}.json").write_text("{")
if name == "sad":
    (work / f"{name}.json").write_text(json.dumps({**result, "error": "half of it"}))
"""


def test_no_phase_stops_the_next(tmp_path, monkeypatch):
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(runner, "SCRIPT", fake)
    monkeypatch.setattr(runner, "LEAST", 0.5)
    output: list[str] = []
    names = ["fails", "dies", "hangs", "garbled", "sad", "good"]
    phases = [Phase(name, 2.0 if name == "hangs" else 60) for name in names]
    path = tmp_path / "record.json"
    record = runner.run_phases(
        settings(tmp_path), phases, 100, path, what="check", report=output.append
    )
    schema().check(record)
    assert json.loads(path.read_text()) == record
    found = {phase["name"]: phase for phase in record["phases"]}
    assert [phase["status"] for phase in record["phases"]] == [
        "failed", "failed", "timed out", "ok", "failed", "ok",
    ]  # fmt: skip
    assert "it does not work" in found["fails"]["log"]
    assert found["hangs"]["result"]["so_far"] == 1  # results before the end count
    assert found["garbled"]["result"] == {}
    assert found["sad"]["error"] == "half of it"
    # The record was complete before each phase.
    assert [found[name]["result"].get("phases_before") for name in ("fails", "sad", "good")] == [
        0, 4, 5,
    ]  # fmt: skip
    assert not alive(int((tmp_path / "child").read_text()))
    late = runner.run_phases(settings(tmp_path), phases[-1:], 0.1, path, what="check", report=print)
    assert late["phases"][0]["status"] == "skipped"
    schema().check(late)


def test_sigterm_ends_the_running_phase_and_what_it_started(tmp_path):
    """The phase is in a session of its own, and so is each program that it has started."""
    empty = tmp_path / "drivers"
    empty.mkdir()
    pids = tmp_path / "pids"
    stand_in(empty / "cuda_rope_test", f'echo $$ $PPID >>"{pids}"; exec sleep 600')
    command = [sys.executable, str(SCRIPT), "--device", "cuda_emulated", "--only", "ops"]
    command += ["--work", str(tmp_path), "--out", str(tmp_path / "out"), "--commit", "0"]
    command += ["--package", str(ROOT), "--drivers", str(empty)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        program, phase = map(int, pids.read_text().split())
        assert not alive(program)
        assert not alive(phase)
    finally:
        process.kill()


def alive(pid: int) -> bool:
    """Returns whether a process runs and is no zombie."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_limits_of_phases_fit_the_whole():
    """The sum of the limits may be larger: a slow phase shortens those after it."""
    assert seconds_of(rest=False) <= 540
    for phases in (CHECK, PEERS, REST):
        assert all(10 <= phase.limit <= 240 for phase in phases)
    names = [phase.name for phase in phases_of(peers=False, tiny=False)]
    telling = ["results:llama-3.2-1b", "end_to_end:llama-3-8b", "ops", "speed"]
    assert [name for name in names if name in telling] == telling
    assert not {"suite", "sanitizer"} & set(names)


def test_the_rest_is_added_with_its_time():
    for tiny in (False, True):
        names = [phase.name for phase in phases_of(peers=False, tiny=tiny, rest=True)]
        assert names[-2:] == ["suite", "sanitizer"]
        assert names[:-2] == [phase.name for phase in phases_of(peers=False, tiny=tiny)]
    assert seconds_of(rest=True) == seconds_of(rest=False) + sum(phase.limit for phase in REST)
    assert gpu_check.parse([]).seconds == seconds_of(rest=False)
    assert gpu_check.parse(["--rest"]).seconds == seconds_of(rest=True)
    assert gpu_check.parse(["--rest", "--seconds", "60"]).seconds == 60


def test_wrong_arguments_are_refused(tmp_path):
    for options, expected in (
        (["--only", "nothing"], "--only: got nothing, expected names of environment"),
        (["--package", "x"], "--package and --drivers go together"),
        (["--device", "tpu"], "invalid choice"),
    ):
        command = [sys.executable, str(SCRIPT), "--work", str(tmp_path), "--build", str(tmp_path)]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 2
        assert expected in done.stderr


def test_settings_reach_the_phases(tmp_path):
    before = settings(tmp_path)
    before.save()
    assert load_settings(tmp_path) == before


def test_a_missing_program_is_not_available():
    done = shell.run(["/nowhere/at-all"], 5)
    assert (done.status, done.ok) == ("not available", False)


def test_a_sanitizer_that_refuses_the_device_is_not_available(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setattr(ops, "find_program", lambda name: str(tool))
    real = Settings("cuda", True, str(tmp_path), str(tmp_path), str(ROOT), str(tmp_path), "x", [1])
    stand_in(tool, 'echo "========= Error: Device not supported. Please refer to"; exit 1')
    assert "Device not supported" in ops.run_sanitizer(real)["not_available"]
    stand_in(tool, '[ "$2" != racecheck ] || exit 9')
    assert ops.run_sanitizer(real)["error"] == "not ok: racecheck"


def test_the_files_of_the_suite_exist():
    for name in suite.FILES:
        file, _, function = name.partition("::")
        assert f"def {function or 'test_'}" in (ROOT / "tests" / file).read_text()


SLOW_TESTS = """
import os, pytest, signal, time
def test_good(): pass
def test_bad(): assert 1 + 1 == 3
@pytest.mark.skip(reason="no")
def test_skipped(): pass
def test_slow():
    os.kill(os.getppid(), signal.SIGALRM)  # as if the time of `timeout` were over
    time.sleep(600)
"""


def test_a_suite_that_is_stopped_keeps_its_counts(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(
        'def pytest_addoption(parser): parser.addoption("--device")\n'
    )
    (tmp_path / "tests" / "test_it.py").write_text(SLOW_TESTS)
    (tmp_path / "tests" / "test_other.py").write_text("import no_such_package")
    monkeypatch.setattr(suite, "FILES", ("test_it.py",))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts faster
    in_time = Settings("cuda", False, *[str(tmp_path)] * 4, "x", [1], 100.0)
    found = suite.run_phase(in_time)
    assert found["counts"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert (found["status"], found["error"]) == ("timed out", "1 of the tests failed")
    assert "assert (1 + 1) == 3" in found["tail"]
    good = SLOW_TESTS.replace("== 3", "== 2")
    (tmp_path / "tests" / "test_it.py").write_text(good)
    found = suite.run_phase(in_time)
    assert (found["status"], found["error"]) == ("timed out", "")
    assert found["counts"] == {"passed": 2, "skipped": 1}
    # A file that needs a package that is not there does not keep the others from running.
    monkeypatch.setattr(suite, "FILES", ("test_other.py", "test_it.py"))
    found = suite.run_phase(in_time)
    assert (found["counts"]["passed"], found["error"]) == (2, "")
    assert found["note"] == "no package no_such_package: 1 of the files did not run"
    (tmp_path / "tests" / "test_other.py").write_text("import lmchat.no_such_module")
    assert suite.run_phase(in_time)["error"] == "1 of the tests failed"
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    assert suite.plugin_options() == ["-o", "addopts=-ra --import-mode=importlib"]
    assert suite.counts_of("..s.F [ 50%]\nxE") == {
        "passed": 3, "failed": 1, "errors": 1, "skipped": 1, "xfailed": 1,
    }  # fmt: skip


def test_figures_are_judged_by_bars_and_floors():
    decode = {"figure": "decode", "batch": 1, "context": 512, "deterministic": False}
    results = {
        "ceilings": {"limits": {"copy_bytes_per_s": 4e12, "bf16_flop_per_s": 8e14}},
        "end_to_end:llama-3-8b": {
            "figures": [
                decode | {"ms": 5.0, "bytes": 1.6e10},
                decode | {"deterministic": True, "ms": 7.0},
                {"figure": "prefill", "tokens": 2048, "ms": 80.0, "flops": 3.2e13},
                decode | {"batch": 64, "tokens_per_s": 9000.0, "ms": 7.1},
            ]
        },
        "speed": {
            "figures": [
                {"op": "attention_decode", "of_bytes": 0.7, "dims": dict(bars.ATTENTION.fits)}
            ]
        },
    }
    bars.add_floors(results)
    figures = results["end_to_end:llama-3-8b"]["figures"]
    assert figures[0]["floor_ms"] == pytest.approx(4.0)
    assert figures[0]["of_floor"] == pytest.approx(0.8)
    assert figures[2]["floor_ms"] == pytest.approx(40.0)
    verdicts = {line["bar"]: line["verdict"] for line in bars.judge(results)}
    assert verdicts == {
        "llama-3-8b: TPOT, batch 1, context 512": "pass",
        "llama-3-8b: prefill of 2,048": "miss",
        "llama-3-8b: batch 64, context 512": "good",
        bars.ATTENTION.name: "pass",
        "llama-3-8b: deterministic decode over the default, batch 1, context 512": "miss",
    }


def test_bars_of_an_h200_are_scaled_on_other_gpus():
    """Bars scale with the ceiling that bounds the figure; ratios do not."""
    figures = [
        {"figure": "decode", "batch": 1, "context": 512, "deterministic": False, "ms": 8.0},
        {"figure": "decode", "batch": 1, "context": 512, "deterministic": True, "ms": 10.0},
        {"figure": "prefill", "tokens": 2048, "ms": 80.0},
        {"figure": "decode", "batch": 64, "context": 512, "deterministic": False,
         "tokens_per_s": 6000.0},
    ]  # fmt: skip
    half = {"copy_bytes_per_s": 4.3e12 / 2, "bf16_flop_per_s": 8.2e14 / 2}
    results = {
        "ceilings": {"limits": half},
        "end_to_end:llama-3-8b": {"figures": figures},
    }

    def judged(name):
        results["environment"] = {"gpu": {"name": name}}
        return [(line["pass"], line.get("scale"), line["verdict"]) for line in bars.judge(results)]

    ratio = (1.3, None, "good")
    assert judged("NVIDIA H200") == [
        (5.8, None, "miss"), (70, None, "miss"), (8500, None, "miss"), ratio,
    ]  # fmt: skip
    assert judged("NVIDIA H100 80GB HBM3") == [
        (11.6, 2.0, "good"), (140.0, 2.0, "good"), (4250.0, 0.5, "good"), ratio,
    ]  # fmt: skip
    results.pop("ceilings")  # nothing to scale by
    assert judged("NVIDIA H100 80GB HBM3") == judged("NVIDIA H200")


def test_prompts_that_would_take_too_long_are_left_out():
    lab = object.__new__(end_to_end.Lab)
    lab.end, lab.prefill_rate = time.monotonic() + 100, 0.0
    assert lab.too_long(10**9) == ""  # no rate is measured yet
    lab.prefill_rate = 1000.0
    assert lab.too_long(90_000) == ""
    assert lab.too_long(200_000).startswith("200 s for the prompts, ")


def test_equal_figures_are_compared_with_transformers():
    decode = {"figure": "decode", "batch": 1, "context": 512, "deterministic": False}
    together = {"figure": "together", "requests": 256, "prompt": 128, "reply": 128}

    def record(kind, *figures):
        return {"phases": [{"name": f"{kind}:m", "result": {"figures": [*figures]}}]}

    ours = record(
        "end_to_end",
        decode | {"ms": 5.0},
        decode | {"ms": 6.0, "deterministic": True},
        decode | {"batch": 8, "skipped": "no room"},
        together | {"ms": 1000.0},
    )
    peers = record(
        "peers", decode | {"ms": 20.0}, decode | {"batch": 8, "ms": 1.0}, together | {"ms": 2e4}
    )
    lines = {line["bar"]: (line["value"], line["verdict"]) for line in runner.compare(peers, ours)}
    assert lines == {
        "m: decode 1 512: times transformers' speed": (4.0, "good"),
        "m: together 256 128 128: times transformers' speed": (20.0, "miss"),
    }
    assert runner.compare(peers, {"phases": []}) == []


def test_a_rate_needs_a_time():
    figure = bench.derive({"ms": 2.0, "bytes": 6e9, "flops": 0})
    assert figure["gb_per_s"] == pytest.approx(3000)
    assert "gb_per_s" not in bench.derive({"error": "no room"})


def test_the_compilers_report_gives_registers_and_spills(tmp_path):
    (tmp_path / "x_cuda.ptxas").write_text(
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function '_ZN1a1bEv' for 'sm_90a'\n"
        "ptxas info    : Function properties for _ZN1a1bEv\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 46 registers, used 1 barriers\n"
    )
    assert building.compiler_reports(tmp_path) == [
        {
            "kernel": "_ZN1a1bEv",
            "arch": "sm_90a",
            "registers": 46,
            "stack_frame": 8,
            "spilled": 16,
        }
    ]


def test_the_build_takes_an_instruction_set_of_this_processor():
    assert building.best_isa() in {"", "avx2", "avx512", "avx512_bf16", "amx"}
    if building.best_isa():
        assert _C.resolve_isa(building.best_isa()) == building.best_isa()


def test_the_package_holds_python_files_and_the_extension(tmp_path):
    """The package has the checkout's Python files, and the extension if it was built."""
    assert building.copy_package(tmp_path / "nothing", tmp_path / "package") == ""
    assert (tmp_path / "package" / "turbomind" / "engine" / "engine.py").exists()
    assert not list((tmp_path / "package").rglob("*.so"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (tmp_path / f"_C{suffix}").write_text("built")
    path = building.copy_package(tmp_path, tmp_path / "package")
    assert Path(path).read_text() == "built"
