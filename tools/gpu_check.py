"""Checks and measures the CUDA backend on this machine's GPU, in at most 9 minutes.

    python tools/gpu_check.py            builds, checks results, measures; writes a record
    python tools/gpu_check.py --rest     then also the test suite and the sanitizers, 4 minutes more
    python tools/gpu_check.py --peers    the same shapes by transformers, into a record of its own
    python tools/gpu_check.py --status   the kernels whose source has no passing record

Needs python3 with numpy, pybind11, cmake and ninja, and nvcc; torch, pytest, transformers and
compute-sanitizer are used if installed. benchmarks/gpu/README.md describes each phase.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from gpu.kernels import RECORDS, STATUS, read_records, status_text
from gpu.machine import commit_name
from gpu.phases import phases_of, run_one, seconds_of
from gpu.runner import record_name, run_phases
from gpu.settings import EMULATED, ROOT, Settings, load_settings, write_json
from gpu.shell import end_with_children_on_sigterm
from gpu.tables import summary


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", EMULATED], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try every phase")
    parser.add_argument("--peers", action="store_true", help="transformers instead of ours")
    parser.add_argument("--rest", action="store_true", help="also suite and sanitizer")
    parser.add_argument("--status", action="store_true", help="print and write STATUS.md")
    parser.add_argument("--out", type=Path, help="folder of the record (benchmarks/gpu)")
    parser.add_argument("--work", type=Path, help="folder of logs (beside the build)")
    parser.add_argument("--build", type=Path, help="CMake's folder (build/gpu_check)")
    parser.add_argument("--package", type=Path, help="folder with a built turbomind: no build")
    parser.add_argument("--drivers", type=Path, help="folder with the built programs: no build")
    parser.add_argument("--commit", help="name of the commit, if git is missing")
    parser.add_argument("--only", help="phases to run, separated by commas")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the kernels' inputs")
    parser.add_argument("--seconds", type=float, help="limit of all phases together")
    parser.add_argument("--phase", help=argparse.SUPPRESS)  # a phase's own process
    found = parser.parse_args(arguments)
    if found.seconds is None:
        found.seconds = seconds_of(rest=found.rest or found.only is not None)
    if (found.package is None) != (found.drivers is None):
        parser.error("--package and --drivers go together")
    return found


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Fills in folders: inside build/, or in a temporary folder if build/ cannot be written."""
    build = arguments.build or ROOT / "build" / "gpu_check"
    try:
        build.mkdir(parents=True, exist_ok=True)
        (build / ".writable").touch()
    except OSError:
        build = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    return Settings(
        device=arguments.device,
        quick=arguments.quick,
        work=str((arguments.work or build / "work").resolve()),
        build=str(build.resolve()),
        package=str((arguments.package or build / "package").resolve()),
        drivers=str((arguments.drivers or build).resolve()),
        commit=arguments.commit or commit_name(),
        seeds=[int(seed) for seed in arguments.seeds.split(",")],
    )


def record_path(arguments: argparse.Namespace, settings: Settings, what: str) -> Path:
    """Returns the path of the record, in the repository only for a whole run on a real GPU."""
    whole = not settings.tiny and arguments.only is None
    folder = arguments.out or (RECORDS if whole else Path(settings.work))
    now = datetime.datetime.now(datetime.timezone.utc)
    return Path(folder) / record_name(now, settings.commit, what)


def main(arguments: list[str] | None = None) -> int:
    """Runs the phases. Returns 0 if every available phase ended well."""
    found = parse(arguments)
    # After PYTHONPATH, which has the built package, and before installed packages.
    named = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path.insert(1 + len(named), str(ROOT))
    if found.status:
        text = status_text(read_records())
        STATUS.write_text(text, encoding="utf-8")
        print(text)
        return 0
    end_with_children_on_sigterm()
    if found.phase:
        settings = replace(load_settings(found.work), seconds=found.seconds)
        write_json(settings.result_path(found.phase), run_one(settings, found.phase))
        return 0
    settings = settings_of(found)
    what = "peers" if found.peers else "check"
    rest = found.rest or found.only is not None  # --only may name any phase
    phases = phases_of(peers=found.peers, tiny=settings.tiny, rest=rest)
    if found.only is not None:
        names = found.only.split(",")
        unknown = set(names) - {phase.name for phase in phases}
        if unknown:
            known = ", ".join(phase.name for phase in phases)
            print(
                f"--only: got {', '.join(sorted(unknown))}, expected names of {known}",
                file=sys.stderr,
            )
            return 2
        phases = tuple(phase for phase in phases if phase.name in names)
    path = record_path(found, settings, what)

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    record = run_phases(settings, phases, found.seconds, path, what=what, report=report)
    print(f"record: {path}", flush=True)
    print(summary(record))
    return int(any(phase["status"] in ("failed", "timed out") for phase in record["phases"]))


if __name__ == "__main__":
    sys.exit(main())
