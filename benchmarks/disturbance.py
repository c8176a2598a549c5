"""Tells whether other work uses the CPUs of a measurement: a calibration loop, and /proc.

A stopped peer that is not stopped, a kernel thread or a neighbour on the host makes the runtime
that happens to be measured look slow. Before each measurement the loop must reach nearly the best
speed that it has had; during the measurement the CPU time of everything else is counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SLOWEST = 0.9  # of the best speed of the loop: below it the machine is not quiet
MOST_FOREIGN = 0.1  # CPUs that everything else may use during a measurement
WAIT_SECONDS, ATTEMPTS = 2.0, 15
CALIBRATION_SECONDS = 0.05
TICK = os.sysconf("SC_CLK_TCK")
# Fields of a CPU's line in /proc/stat: all of user, nice, system, irq, softirq and steal is busy.
BUSY_FIELDS = (1, 2, 3, 6, 7, 8)


@dataclass(frozen=True)
class Process:
    """CPU seconds of one process and of its children that have ended."""

    group: int
    name: str
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """CPU seconds used so far: by all together on some CPUs, and by each process."""

    at: float
    busy: float
    processes: dict[int, Process]


@dataclass(frozen=True)
class Load:
    """CPUs that others used on average between two snapshots; `busiest` names processes."""

    cpus: float
    busiest: dict[str, float] = field(default_factory=dict)


def process_of(stat: str) -> Process:
    """Reads the text of /proc/PID/stat, whose second field may hold spaces and parentheses."""
    head, _, tail = stat.rpartition(")")
    fields = tail.split()  # from the state, the third field, on
    return Process(
        group=int(fields[2]),
        name=head.partition("(")[2],
        seconds=sum(map(int, fields[11:15])) / TICK,
    )


def snapshot(cpus: Collection[int], root: Path = Path("/proc")) -> Snapshot:
    wanted = {f"cpu{cpu}" for cpu in cpus}
    lines = [line.split() for line in (root / "stat").read_text().splitlines()]
    busy = sum(int(line[i]) for line in lines if line[0] in wanted for i in BUSY_FIELDS)
    processes = {}
    for folder in root.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            processes[int(folder.name)] = process_of((folder / "stat").read_text())
        except OSError:
            continue  # it has ended
    return Snapshot(time.monotonic(), busy / TICK, processes)


def load_between(before: Snapshot, after: Snapshot, own: Collection[int]) -> Load:
    """Returns what processes outside the process groups `own`, and the kernel, have used."""
    seconds = max(after.at - before.at, 1e-9)
    used: dict[str, float] = {}
    ours = 0.0
    for pid, process in after.processes.items():
        earlier = before.processes.get(pid)
        delta = process.seconds - (earlier.seconds if earlier else 0)
        if process.group in own:
            ours += delta
        elif delta > 0:
            label = f"{process.name} ({pid})"
            used[label] = round(delta / seconds, 3)
    busiest = dict(sorted(used.items(), key=lambda item: -item[1])[:3])
    return Load(max(0.0, (after.busy - before.busy - ours) / seconds), busiest)


class Watch:
    """Waits for a quiet machine before measurements and records what disturbed them.

    Args:
        cpus: The CPUs of the measurements.
        calibrate: Runs a fixed loop on these CPUs and returns its speed.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        cpus: Collection[int],
        calibrate: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cpus = cpus
        self.calibrate = calibrate
        self.sleep = sleep
        self.best = max(calibrate() for _ in range(5))
        self.records: list[dict[str, Any]] = []

    def wait(self, label: str) -> None:
        """Returns once the loop is nearly as quick as ever; after ATTEMPTS, records why not."""
        lowest, attempts = 1.0, 0
        load = Load(0.0)
        while True:
            before = snapshot(self.cpus)
            speed = self.calibrate()
            self.best = max(self.best, speed)
            if speed >= SLOWEST * self.best or attempts == ATTEMPTS:
                break
            attempts += 1
            lowest = min(lowest, speed / self.best)
            self.sleep(WAIT_SECONDS)
            load = load_between(before, snapshot(self.cpus), {os.getpgrp()})
        if attempts:
            quiet = speed >= SLOWEST * self.best
            self.record(label, "before", load, loop=round(lowest, 3), waited=attempts, quiet=quiet)

    def measure(
        self, label: str, group: int, action: Callable[[], Any], repeatable: bool = True
    ) -> Any:
        """Returns action(), called on a quiet machine, and once more when others used the CPUs.

        Args:
            label: What is measured, for the record.
            group: The process group that is measured.
            action: The measurement.
            repeatable: Whether a second call measures the same.
        """
        for last in (False, True) if repeatable else (True,):
            self.wait(label)
            before = snapshot(self.cpus)
            answer = action()
            load = load_between(before, snapshot(self.cpus), {group, os.getpgrp()})
            if load.cpus <= MOST_FOREIGN:
                break
            self.record(label, "during", load, kept=last)
        return answer

    def record(self, label: str, when: str, load: Load, **facts: Any) -> None:
        self.records.append({"measurement": label, "when": when, **asdict(load), **facts})


def lines_of(records: list[dict[str, Any]]) -> list[str]:
    """Returns the report's lines about disturbances that a figure contains."""
    lines = []
    for record in records:
        busiest = ", ".join(f"{name} {cpus:.2f}" for name, cpus in record["busiest"].items())
        if record["when"] == "during" and record["kept"]:
            what = f"others used {record['cpus']:.2f} CPUs"
        elif record["when"] == "before" and not record["quiet"]:
            what = f"the calibration loop ran at {record['loop']:.0%} of its best"
        else:
            continue
        lines.append(f"- {record['measurement']}: {what} ({busiest or 'no process seen'})")
    if lines:
        lines = ["Disturbed measurements among these figures:", "", *lines]
    return lines
