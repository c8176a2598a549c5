"""Runs phases one after the other and writes a complete record after each."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .bars import add_floors, against_peers, judge
from .kernels import kernel_table, read_records
from .phases import Phase
from .settings import ROOT, Settings, write_json
from .shell import Done, run

SCRIPT = ROOT / "tools" / "gpu_check.py"
LEAST = 3.0  # seconds; a phase with less time left is skipped


def run_phases(
    settings: Settings,
    phases: Sequence[Phase],
    total: float,
    record_path: Path,
    *,
    what: str,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Runs each phase in its own process and writes the record after each.

    A phase that fails does not stop the next.
    """
    settings.save()
    record = new_record(settings, what)
    write_json(record_path, record)  # fails early if the folder cannot be written
    end = time.monotonic() + total
    for phase in phases:
        seconds = min(phase.limit, end - time.monotonic())
        report(f"{phase.name}: at most {max(seconds, 0):.0f} s")
        entry = run_phase(settings, phase, seconds)
        record["phases"].append(entry)
        _derive(record, partial(complete, record), report)
        write_json(record_path, record)
        report(
            f"{phase.name}: {entry['status']} after {entry['seconds']:.1f} s {entry['error']}"[:400]
        )
    record["complete"] = True
    write_json(record_path, record)
    if what == "peers" and not record["quick"]:
        ours = newest_check(record_path.parent)
        _derive(record, lambda: record.update(bars=compare(record, ours)), report)
        write_json(record_path, record)
    return record


def run_phase(settings: Settings, phase: Phase, seconds: float) -> dict[str, Any]:
    """Runs a phase and returns its entry, with the results that it wrote before its end."""
    settings.result_path(phase.name).unlink(missing_ok=True)
    if seconds < LEAST:
        return _entry(phase, Done("skipped", 0.0, ""), {}, "no time is left")
    log = Path(settings.work) / f"{phase.name.replace(':', '-')}.phase.log"
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT), "--phase", phase.name]
    env = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [settings.package, os.environ.get("PYTHONPATH")])
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    command += ["--work", settings.work, "--seconds", f"{seconds:.1f}"]
    done = run(command, seconds, env=env, log=log)
    result = settings.result_of(phase.name)
    error = str(result.pop("error", ""))
    if done.ok and "not_available" in result:
        done = Done("not available", done.seconds, "")
        error = str(result.pop("not_available"))
    elif done.ok and error:
        done = Done("failed", done.seconds, done.output)
    elif not done.ok:
        what = done.status if done.code is None else f"ended with {done.code}: {done.last_line}"
        error = f"{error} {what}".strip()
    return _entry(phase, done, result, error)


def _derive(
    record: dict[str, Any], work: Callable[[], None], report: Callable[[str], None]
) -> None:
    """Computes fields that follow from the record; an error there does not end the run."""
    try:
        work()
    except Exception as error:
        record["bars"] = []
        report(f"cannot judge the figures: {type(error).__name__}: {error}")


def _entry(phase: Phase, done: Done, result: dict[str, Any], error: str) -> dict[str, Any]:
    return {
        "name": phase.name,
        "status": done.status,
        "seconds": round(done.seconds, 2),
        "limit": phase.limit,
        "error": error,
        "log": "" if done.ok else done.tail,
        "result": result,
    }


def new_record(settings: Settings, what: str) -> dict[str, Any]:
    """Returns a record without phases."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "format": "turbomind-gpu-check",
        "version": 1,
        "what": what,
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": settings.commit,
        "device": settings.device,
        "emulated": settings.emulated,
        "quick": settings.tiny,
        "complete": False,
        "kernels": kernel_table({}),
        "bars": [],
        "phases": [],
    }


def complete(record: dict[str, Any]) -> None:
    """Fills in the fields that follow from the phases so far."""
    results = {phase["name"]: phase["result"] for phase in record["phases"]}
    if kernels := results.get("ops", {}).get("kernels"):
        record["kernels"] = kernels
    add_floors(results)
    if not record["quick"]:
        record["bars"] = judge(results)


def newest_check(folder: Path) -> dict[str, Any]:
    """Returns the latest record of ours in a folder, or one without phases."""
    try:
        records = [*read_records(folder).values()]
    except ValueError:  # a file that is no record
        records = []
    checks = [r for r in records if isinstance(r, dict) and r.get("what") == "check"]
    return max(checks, key=lambda record: str(record["date"]), default={"phases": []})


def compare(peers: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """Compares ours with transformers, model by model."""
    own = {phase["name"]: phase["result"] for phase in ours["phases"]}
    lines = []
    for phase in peers["phases"]:
        kind, _, model = phase["name"].partition(":")
        if kind == "peers":
            found = against_peers(own.get(f"end_to_end:{model}", {}), phase["result"])
            lines += [line | {"bar": f"{model}: {line['bar']}"} for line in found]
    return lines


def record_name(record_date: datetime.datetime, commit: str, what: str) -> str:
    """Returns a file name made of date and commit."""
    stamp = record_date.strftime("%Y-%m-%d-%H%M")
    plain = "".join(c if c.isalnum() else "-" for c in commit).strip("-") or "unknown"
    return f"{stamp}-{plain}{'-peers' if what == 'peers' else ''}.json"
