"""The C++ drivers under cpp/tests: each runs its named cases and exits with 0 when all pass.

engine_fuzz compares random mixes of requests with the same requests alone. The drivers are built
and run in the background from the start of the session (driver_builds.py).
"""

import subprocess
from collections.abc import Callable

import pytest
from driver_builds import (
    CMAKE,
    DRIVERS,
    ENVIRONMENT,
    TESTS,
    WITH_THREADS,
    Done,
    DriverBuilds,
    Unavailable,
    run,
)

pytestmark = [
    pytest.mark.timeout(3600),  # the first build of a folder compiles the whole core
    pytest.mark.skipif(CMAKE is None, reason="cmake is not installed"),
]
Check = Callable[[str], None]


def passes(done: Done) -> None:
    """Asserts that a driver passed, and shows its failed cases first."""
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert done.returncode == 0, "\n".join([*failed, done.stdout[-4000:], done.stderr[-8000:]])


def checker(builds: DriverBuilds, kind: str) -> Check:
    try:
        builds.folder(kind)
    except Unavailable as why:
        pytest.skip(str(why))
    return lambda command: passes(builds.result(kind, command))


def fuzz(scripted: int, asynchronous: int, decoder: int, group: int, gpus: int = 0) -> list[str]:
    """Command lines for so many random mixes on each model."""
    mixes = {"scripted": scripted, "async": asynchronous, "decoder": decoder, "group": group}
    mixes |= {"gpus": gpus} if gpus else {}
    return [f"engine_fuzz {count} --model {model}" for model, count in mixes.items()]


@pytest.fixture(scope="module")
def plain(driver_builds) -> Check:
    return checker(driver_builds, "plain")


@pytest.fixture(scope="module")
def asan(driver_builds) -> Check:
    return checker(driver_builds, "asan")


@pytest.fixture(scope="module")
def tsan(driver_builds) -> Check:
    return checker(driver_builds, "tsan")


@pytest.mark.parametrize("command", [d for d in DRIVERS if d != "engine_fuzz"])
def test_driver(plain, command):
    plain(command)


@pytest.mark.parametrize("command", fuzz(100, 40, 100, group=60, gpus=2))
def test_random_mixes_equal_their_solo_runs(plain, command):
    plain(command)


def test_a_driver_lists_its_cases_and_runs_those_that_are_named(plain, driver_builds):
    folder = driver_builds.folder("plain")
    names = run(folder, "event_test", "--list").stdout.split()
    assert len(names) >= 2
    one = run(folder, "event_test", names[0])
    assert (one.returncode, one.stdout) == (0, f"passed {names[0]}\n")
    wrong = run(folder, "event_test", "no such case")
    assert wrong.returncode == 2
    assert "got no such case" in wrong.stderr


def test_ctest_lists_every_case_of_a_driver(plain, driver_builds):
    folder = driver_builds.folder("plain")
    ctest = ["ctest", "--test-dir", str(folder), "-N", "-R", "event_test"]
    listed = subprocess.run(ctest, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True)
    names = run(folder, "event_test", "--list").stdout.split()
    assert all(f"event_test.{name}\n" in listed.stdout for name in names), listed.stderr


@pytest.mark.parametrize("command", TESTS)
def test_driver_under_address_sanitizer(asan, command):
    asan(command)


@pytest.mark.parametrize("access", ["load", "store", "shared-load", "shared-store", "copy"])
def test_a_kernel_outside_of_its_memory_is_caught(asan, driver_builds, access):
    done = run(driver_builds.folder("asan"), "cuda_emulator_test", "--overrun", access)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


# Under sanitizers the decoder's arithmetic takes most of the time and is the same in every mix.
@pytest.mark.parametrize("command", fuzz(scripted=100, asynchronous=25, decoder=25, group=6))
def test_random_mixes_under_address_sanitizer(asan, command):
    asan(command)


@pytest.mark.parametrize("command", fuzz(scripted=100, asynchronous=15, decoder=12, group=4))
def test_random_mixes_under_thread_sanitizer(tsan, command):
    tsan(command)


@pytest.mark.parametrize("command", WITH_THREADS)
def test_driver_under_thread_sanitizer(tsan, command):
    tsan(command)
