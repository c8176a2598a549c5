"""benchmarks/disturbance.py: what else used the CPUs of a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from assets import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from disturbance import (
    ATTEMPTS,
    Process,
    Snapshot,
    Watch,
    lines_of,
    load_between,
    process_of,
    snapshot,
)

CPUS = sorted(os.sched_getaffinity(0))
SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True) as process:
        yield process
        process.kill()


def shot(at: float, busy: float, **seconds: tuple[int, float]) -> Snapshot:
    processes = {int(k[1:]): Process(g, f"p{g}", s) for k, (g, s) in seconds.items()}
    return Snapshot(at, busy, processes)


def test_only_cpu_time_of_others_counts() -> None:
    before = shot(0, 100, _1=(1, 10), _2=(2, 5), _3=(3, 7))
    after = shot(2, 104, _1=(1, 12.5), _2=(2, 5), _3=(3, 8), _4=(1, 0.5))
    load = load_between(before, after, {1})
    assert load.cpus == pytest.approx((4 - 2.5 - 0.5) / 2)
    assert load.busiest == {"p3 (3)": 0.5}


def test_a_name_may_hold_parentheses_and_spaces() -> None:
    tail = " ".join(["S", "1", "77", *"0" * 8, "300", "100", "50", "50", *"0" * 20])
    process = process_of(f"5 (a ) (b) {tail}")
    assert (process.group, process.name) == (77, "a ) (b")
    assert process.seconds == 500 / os.sysconf("SC_CLK_TCK")


def test_a_running_process_is_named(busy: subprocess.Popen[bytes]) -> None:
    """Waits until the process has used CPU time, so that a loaded machine passes too."""
    before = snapshot(CPUS)
    while busy.pid not in (now := snapshot(CPUS)).processes or (
        now.processes[busy.pid].seconds < 0.3
    ):
        time.sleep(0.05)
    assert any(str(busy.pid) in name for name in load_between(before, now, set()).busiest)
    own = load_between(before, now, {busy.pid})
    assert not any(str(busy.pid) in name for name in own.busiest)


def test_a_slow_loop_delays_the_measurement_until_it_is_quick_again() -> None:
    speeds = iter([1.0] * 5 + [0.5, 0.6, 1.0])
    slept: list[float] = []
    watch = Watch(CPUS, lambda: next(speeds), slept.append)
    watch.wait("prefill")
    assert len(slept) == 2
    (record,) = watch.records
    assert (record["loop"], record["waited"], record["quiet"]) == (0.5, 2, True)
    assert lines_of(watch.records) == []


def test_a_machine_that_stays_slow_is_reported() -> None:
    speeds = iter([1.0] * 5 + [0.5] * (ATTEMPTS + 1))
    watch = Watch(CPUS, lambda: next(speeds), lambda seconds: None)
    watch.wait("prefill")
    assert "prefill: the calibration loop ran at 50% of its best" in lines_of(watch.records)[-1]


def test_a_disturbed_measurement_is_repeated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))

    def loaded(cpus: Any) -> Snapshot:
        now = next(clock)
        return shot(now, 2.0 * now, _9=(9, 0.5 * now))

    monkeypatch.setattr("disturbance.snapshot", loaded)
    watch = Watch(CPUS, lambda: 1.0)
    answers = iter("ab")
    assert watch.measure("prefill", 9, lambda: next(answers)) == "b"
    assert [record["kept"] for record in watch.records] == [False, True]
    assert "others used 1.50 CPUs" in lines_of(watch.records)[-1]
    answers = iter("ab")
    assert watch.measure("turn", 9, lambda: next(answers), repeatable=False) == "a"
