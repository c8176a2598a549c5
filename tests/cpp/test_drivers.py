"""The C++ drivers under cpp/tests: each checks itself and exits with 0 when all is well.

engine_fuzz compares random mixes of requests with their solo runs.

The plain build shares the extension's build folder, so it compiles little; sanitizer builds have
folders of their own and only the instruction set that this machine runs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from assets import ROOT

from turbomind import _C

DRIVERS = sorted(p.name.removesuffix("_main.cc") for p in ROOT.glob("cpp/tests/**/*_main.cc"))
TESTS = [d for d in DRIVERS if d.endswith("_test")]  # the others are benches, and engine_fuzz
WITH_THREADS = [
    "event_test",
    "host_tier_test",
    "disk_tier_test",
    "disk_tier_trouble_test",
    "payload_reader_test",
    "page_mover_test",
]
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
JOBS = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
ENVIRONMENT = os.environ | {
    "PATH": PATH,
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
if os.access("/dev/shm", os.W_OK):  # where syncing costs nothing
    ENVIRONMENT["TMPDIR"] = "/dev/shm"
pytestmark = [
    pytest.mark.timeout(3600),  # the first build of a folder compiles the whole core
    pytest.mark.skipif(shutil.which("cmake", path=PATH) is None, reason="cmake is not installed"),
]


def build(folder: Path, drivers: list[str], *options: str) -> Path:
    """Configures and builds `drivers` in `folder`."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DTM_BUILD_TESTS=ON", *options]
    if not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja", "-DTM_BUILD_PYTHON=OFF"]
    for command in (
        configure,
        ["cmake", "--build", str(folder), "--parallel", JOBS, "--target", *drivers],
    ):
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def sanitized(name: str, sanitizers: str, tests: list[str], scratch: Path) -> Path:
    """`tests` and engine_fuzz under sanitizers; skips where the compiler lacks their runtime."""
    source = scratch / "empty.cc"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX", "c++")
    probe = [compiler, f"-fsanitize={sanitizers}", str(source), "-o", str(scratch / "empty")]
    compiled = subprocess.run(probe, capture_output=True).returncode == 0
    if not compiled or subprocess.run([str(scratch / "empty")]).returncode != 0:
        pytest.skip(f"{compiler} has no runtime for -fsanitize={sanitizers}")
    return build(
        ROOT / "build" / name,
        [*tests, "engine_fuzz"],
        f"-DTM_SANITIZE={sanitizers}",
        f"-DTM_ISAS={_C.resolve_isa('auto')}",
    )


def run(folder: Path, driver: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / driver), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1500,
    )


class Runs:
    """Runs of drivers of one build, begun for every test that is to look at one of them: as many
    at a time as there are processors."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path):
        tests = [t for t in request.session.items if request.fixturename in t.fixturenames]
        asked = [t.callspec.params["command"] for t in tests if t.path == request.path]
        asked.sort(key=lambda command: not command.startswith("engine_fuzz"))  # the longest first
        self._pool = ThreadPoolExecutor(int(JOBS))
        self._done = {c: self._pool.submit(run, folder, *c.split()) for c in asked}

    def check(self, command: str) -> None:
        """Waits for its end, which is to be a good one."""
        done = self._done[command].result()
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def fuzz(scripted: int, asynchronous: int, decoder: int) -> list[str]:
    """So many random mixes on each model."""
    mixes = {"scripted": scripted, "async": asynchronous, "decoder": decoder}
    return [f"engine_fuzz {count} --model {model}" for model, count in mixes.items()]


@pytest.fixture(scope="module")
def plain(request):
    shared = ROOT / "build" / f"cmake-py{sys.version_info.major}.{sys.version_info.minor}"
    folder = shared if (shared / "CMakeCache.txt").exists() else ROOT / "build" / "drivers"
    with contextlib.closing(Runs(request, build(folder, DRIVERS))) as runs:
        yield runs


@pytest.fixture(scope="module")
def asan_folder(tmp_path_factory):
    return sanitized("asan", "address,undefined", TESTS, tmp_path_factory.mktemp("asan"))


@pytest.fixture(scope="module")
def asan(request, asan_folder):
    with contextlib.closing(Runs(request, asan_folder)) as runs:
        yield runs


@pytest.fixture(scope="module")
def tsan(request, tmp_path_factory):
    folder = sanitized("tsan", "thread", WITH_THREADS, tmp_path_factory.mktemp("tsan"))
    with contextlib.closing(Runs(request, folder)) as runs:
        yield runs


@pytest.mark.parametrize("command", [d for d in DRIVERS if d != "engine_fuzz"])
def test_driver(plain, command):
    plain.check(command)


@pytest.mark.parametrize("command", fuzz(scripted=100, asynchronous=40, decoder=100))
def test_random_mixes_equal_their_solo_runs(plain, command):
    plain.check(command)


@pytest.mark.parametrize("command", TESTS)
def test_driver_under_address_sanitizer(asan, command):
    asan.check(command)


@pytest.mark.parametrize("access", ["load", "store", "shared-load", "shared-store", "copy"])
def test_a_kernel_outside_of_its_memory_is_caught(asan_folder, access):
    done = run(asan_folder, "cuda_emulator_test", access)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


# Under sanitizers the decoder's arithmetic takes most of the time and is the same in every mix.
@pytest.mark.parametrize("command", fuzz(scripted=100, asynchronous=25, decoder=25))
def test_random_mixes_under_address_sanitizer(asan, command):
    asan.check(command)


@pytest.mark.parametrize("command", fuzz(scripted=100, asynchronous=15, decoder=12))
def test_random_mixes_under_thread_sanitizer(tsan, command):
    tsan.check(command)


@pytest.mark.parametrize("command", WITH_THREADS)
def test_driver_under_thread_sanitizer(tsan, command):
    tsan.check(command)
