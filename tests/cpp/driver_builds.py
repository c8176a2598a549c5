"""Builds and runs the C++ drivers under cpp/tests in the background, while Python tests run.

The plain build shares the extension's build folder, so it compiles little. Each sanitizer has a
folder of its own, with the portable code and the instruction set of this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import process_limits
from assets import ROOT

from turbomind import _C

DRIVERS = sorted(p.name.removesuffix("_main.cc") for p in ROOT.glob("cpp/tests/**/*_main.cc"))
TESTS = [d for d in DRIVERS if d.endswith("_test")]  # the others are benchmarks, and engine_fuzz
WITH_THREADS = [
    "event_test",
    "gpu_ranks_test no_allocation",
    "host_tier_test",
    "disk_tier_test",
    "disk_tier_trouble_test",
    "direct_reader_test",
    "emulated_devices_test",
    "group_pages_test",
    "page_mover_test",
    "rank_exchange_test",
    "thread_pool_test",
]
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
CMAKE = shutil.which("cmake", path=PATH)
JOBS = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
EXTENSION_BUILD = ROOT / "build" / f"cmake-py{sys.version_info.major}.{sys.version_info.minor}"
PLAIN = EXTENSION_BUILD if (EXTENSION_BUILD / "CMakeCache.txt").exists() else ROOT / "build/drivers"
ENVIRONMENT = os.environ | {
    "PATH": PATH,
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
if os.access("/dev/shm", os.W_OK):  # where syncing costs nothing
    ENVIRONMENT["TMPDIR"] = "/dev/shm"
SANITIZERS = {"asan": "address,undefined", "tsan": "thread"}
# Kinds of builds, in their order, with drivers that tests run by themselves.
KINDS = {"plain": "event_test", "asan": "cuda_emulator_test", "tsan": "event_test"}
RUN_LIMIT = 1500.0  # seconds of one driver

Done = subprocess.CompletedProcess[str]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a build folder: two builds in it at once would fail."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "tests.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Unavailable(Exception):
    """This kind of build is not possible here; the text is the reason."""


class DriverBuilds:
    """Builds kinds of drivers one after the other, and runs commands of each that is built.

    `kinds` are names of KINDS; `commands` are the command lines to run per kind, whose drivers are
    built. Everything runs at low priority, so that the tests at hand get the processors first.
    """

    def __init__(self, kinds: Iterable[str], commands: dict[str, list[str]]) -> None:
        self._folders: dict[str, Future[Path]] = {kind: Future() for kind in kinds}
        self._done: dict[tuple[str, str], Future[Done]] = {
            (kind, command): Future() for kind in self._folders for command in commands[kind]
        }
        self._running: set[subprocess.Popen[str]] = set()
        self._mutex = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(int(JOBS))
        self._thread = threading.Thread(target=self._build_all, name="driver builds")
        self._thread.start()

    def folder(self, kind: str) -> Path:
        """Returns the folder of a kind's programs once they are built."""
        return self._folders[kind].result()

    def result(self, kind: str, command: str) -> Done:
        """Returns the finished run of one of the commands."""
        self.folder(kind)
        return self._done[kind, command].result()

    def close(self) -> None:
        """Ends what still runs."""
        with self._mutex:
            self._closed = True
            for process in self._running:
                process.terminate()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _build_all(self) -> None:
        for kind, future in self._folders.items():
            try:
                folder = self._build(kind)
            except BaseException as error:  # the tests of this kind raise it
                future.set_exception(error)
                continue
            mine = [command for of, command in self._done if of == kind]
            # The random mixes take the longest.
            for command in sorted(mine, key=lambda c: not c.startswith("engine_fuzz")):
                self._pool.submit(self._run, kind, folder, command)
            future.set_result(folder)

    def _run(self, kind: str, folder: Path, command: str) -> None:
        future = self._done[kind, command]
        try:
            program, *arguments = command.split()
            future.set_result(self._call([str(folder / program), *arguments]))
        except BaseException as error:
            future.set_exception(error)

    def _build(self, kind: str) -> Path:
        options = []
        if sanitizers := SANITIZERS.get(kind):
            self._probe(sanitizers)
            isa = _C.resolve_isa("auto")
            options = [f"-DTM_SANITIZE={sanitizers}", f"-DTM_ISAS={isa}"]
        folder = ROOT / "build" / kind if sanitizers else PLAIN
        configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DTM_BUILD_TESTS=ON", *options]
        if not (folder / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja", "-DTM_BUILD_PYTHON=OFF"]
        asked = {command.split()[0] for of, command in self._done if of == kind}
        targets = ["--parallel", JOBS, "--target", *sorted(asked | {KINDS[kind]})]
        with locked(folder):
            for command in (configure, ["cmake", "--build", str(folder), *targets]):
                done = self._call(command)
                if done.returncode != 0:
                    raise AssertionError(done.stdout[-4000:] + done.stderr[-4000:])
        return folder

    def _probe(self, sanitizers: str) -> None:
        """Raises Unavailable where the compiler lacks the runtime of the sanitizers."""
        compiler = os.environ.get("CXX", "c++")
        with tempfile.TemporaryDirectory() as scratch:
            source, program = Path(scratch, "empty.cc"), Path(scratch, "empty")
            source.write_text("int main() { return 0; }\n")
            build = [compiler, f"-fsanitize={sanitizers}", str(source), "-o", str(program)]
            if self._call(build).returncode != 0 or self._call([str(program)]).returncode != 0:
                raise Unavailable(f"{compiler} has no runtime for -fsanitize={sanitizers}")

    def _call(self, command: list[str]) -> Done:
        with process_limits.starting, self._mutex:
            if self._closed:
                raise RuntimeError("the test session is over")
            process = subprocess.Popen(
                ["nice", "-n", "10", *command],
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running.add(process)
        try:
            out, err = process.communicate(timeout=RUN_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\n{command[0]} ran longer than {RUN_LIMIT:.0f} s"
        finally:
            with self._mutex:
                self._running.discard(process)
        return Done(command, process.returncode, out, err)


def run(folder: Path, driver: str, *arguments: str) -> Done:
    """Runs a driver and returns it finished."""
    command = [str(folder / driver), *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=RUN_LIMIT
    )
