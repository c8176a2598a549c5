"""Fixtures that all tests share, and the device that the tests run on.

`pytest --device cuda` runs the suite on the first GPU. Engines and the processes that tests start
read it from $TURBOMIND_DEVICE; no test names a device's index. On a GPU they compute with
$TURBOMIND_DETERMINISTIC, which guarantees what tests compare. Tests of the CPU alone are marked
`cpu_only` with the reason. Without a GPU every test that needs one is skipped with the reason.

`pytest --tp 2` cuts the model of every engine over 2 ranks, by $TURBOMIND_TP, on GPUs over the
first two. Tests of one rank are marked `one_rank` with the reason. A test whose model cannot be cut
is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import command
import driver_builds
import hypothesis
import pytest
import stores

import lmchat
import turbomind
from turbomind import _C
from turbomind.config.device import DETERMINISTIC_VARIABLE, DEVICE_VARIABLE, TP_VARIABLE

# How long examples take to make and to run depends on what else the machine does.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

_HOME = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
_MISSING = pytest.StashKey[str]()
_STARTED = pytest.StashKey[list[str]]()
_BUILDS = pytest.StashKey[driver_builds.DriverBuilds]()
_STARTS = ("subprocess.Popen", "os.fork")  # audit events of a process start


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options `--device` and `--tp`."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "cuda_emulated"),
        default="cpu",
        help="where engines compute: cpu (default), cuda, or cuda_emulated, a GPU's kernels run by "
        "the host, some thousand times slower",
    )
    parser.addoption("--tp", type=int, default=1, help="ranks that models are cut over")


def pytest_configure(config: pytest.Config) -> None:
    """Gives tests a data directory of their own, and all engines the same device."""
    config.addinivalue_line("markers", "cpu_only(why): a test of what only the CPU has")
    config.addinivalue_line("markers", "one_rank(why): a test of what only one rank has")
    # Shells let background jobs ignore Ctrl-C, which the processes of tests would inherit.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    device = config.getoption("--device")
    variables = {DEVICE_VARIABLE: device, DETERMINISTIC_VARIABLE: "01"[device != "cpu"]}
    variables[TP_VARIABLE] = str(config.getoption("--tp"))
    config.stash[_HOME] = tempfile.TemporaryDirectory(
        prefix="lmchat-", dir=stores.memory(), ignore_cleanup_errors=True
    )
    variables["LMCHAT_HOME"] = config.stash[_HOME].name
    os.environ.update(variables)
    command.ENVIRONMENT.update(variables)
    status = _C.cuda_status() if device == "cuda" else ""
    config.stash[_MISSING] = status if status.startswith("no CUDA") else ""
    config.stash[_STARTED] = started = []
    if config.stash[_MISSING]:
        sys.addaudithook(lambda event, _: started.append(event) if event in _STARTS else None)
        # Skipped tests end early and leave open what they opened.
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the builds of drivers and removes the data directory."""
    if builds := config.stash.get(_BUILDS, None):
        builds.close()
    config.stash[_HOME].cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs the tests of C++ drivers last. Skips on a GPU the tests of the CPU, and on several ranks
    those of one."""
    items.sort(key=lambda item: "driver_builds" in getattr(item, "fixturenames", ()))
    skipped = {"cpu_only": "of the CPU"} if config.getoption("--device") != "cpu" else {}
    if config.getoption("--tp") != 1:
        skipped["one_rank"] = "of one rank"
    for item in items:
        for name, what in skipped.items():
            for marker in item.iter_markers(name):
                item.add_marker(pytest.mark.skip(reason=f"{what}: {marker.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips a failed test with the reason where the requested GPU is missing, or where the model
    cannot be cut over the requested ranks.

    The engine's error must name the missing GPU, or the test must have started a process, whose
    output it may not show. With a GPU nothing is skipped.
    """
    report = yield
    missing, started = item.config.stash[_MISSING], item.config.stash[_STARTED]
    if report.failed:
        printed = "".join([report.longreprtext, *(text for _, text in report.sections)])
        gpu_is_missing = missing and (started or missing in printed)
        why = missing if gpu_is_missing else uncut(item.config, printed)
        if why:
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, (line or 0) + 1, f"Skipped: {why}")
    if report.when == "teardown":
        started.clear()
    return report


def uncut(config: pytest.Config, printed: str) -> str:
    """Returns the error in what a test printed that its model cannot be cut over the ranks of the
    session; empty for none."""
    ranks = config.getoption("--tp")
    found = re.search(rf"tp is {ranks}, but .*; expected .* for this model", printed)
    return found[0] if found and ranks > 1 else ""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts to build and run the C++ drivers that the chosen tests use, in the background."""
    commands: dict[str, list[str]] = {kind: [] for kind in driver_builds.KINDS}
    names: set[str] = set()
    for item in session.items:
        fixtures = getattr(item, "fixturenames", [])
        if "driver_builds" in fixtures:
            names.update(fixtures)
            command = item.callspec.params.get("command") if hasattr(item, "callspec") else None
            for kind, asked in commands.items():
                if kind in fixtures and command is not None:
                    asked.append(command)
    kinds = [kind for kind in commands if kind in names]
    if kinds and driver_builds.CMAKE and not session.config.option.collectonly:
        session.config.stash[_BUILDS] = driver_builds.DriverBuilds(kinds, commands)


@pytest.fixture(scope="session", name="driver_builds")
def running_driver_builds(request: pytest.FixtureRequest) -> driver_builds.DriverBuilds:
    """The builds of C++ drivers that began with the session."""
    return request.config.stash[_BUILDS]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that engine tests run on."""
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def data_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives every test, and the processes it starts, a data directory of its own."""
    with stores.folder() as path:
        monkeypatch.setenv("LMCHAT_HOME", str(path))
        monkeypatch.setitem(command.ENVIRONMENT, "LMCHAT_HOME", str(path))
        yield path


@pytest.fixture(scope="module", params=["memory", "disk"])
def store_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module once on each kind of store."""
    kind = str(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lmchat.ChatEngine.__init__.__kwdefaults__, "store", kind)
        patch.setitem(lmchat.AsyncChatEngine.__init__.__kwdefaults__, "store", kind)
        yield kind


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Zoo:
    """Small random checkpoints of every family with their reference models, made on demand."""
    return checkpoints.Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def open_engine(device: str) -> Iterator[Callable[..., turbomind.Engine]]:
    """Opens engines with settings for small models; checks and closes them at the end."""
    engines: list[turbomind.Engine] = []

    def open_one(path: Path | str, **options: Any) -> turbomind.Engine:
        defaults = {"device": device, "threads": 2, "cache_memory": "32MiB"}
        engines.append(turbomind.Engine(path, **{**defaults, **options}))
        return engines[-1]

    yield open_one
    for engine in engines:
        with contextlib.suppress(turbomind.EngineClosed):
            engine.check_invariants()
        engine.close()
