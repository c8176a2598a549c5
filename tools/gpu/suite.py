"""Phase `suite`: the part of the Python test suite that says most about a device, run on it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from .settings import Settings
from .shell import run

SECONDS = 70.0
# Whole models against transformers come early: what is equal in every company may still be wrong.
FILES = (
    "test_advance.py", "test_parity.py::test_every_family", "test_parity.py::test_page_borders",
    "test_identity.py", "test_tiers.py", "test_sampler.py", "test_session_pages.py",
    "test_engine_api.py",
)  # fmt: skip
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)")


def run_phase(settings: Settings) -> dict[str, Any]:
    """Counts of pytest, as far as it came in its time."""
    package = Path(settings.package)
    if "--device" not in (package / "tests" / "conftest.py").read_text():
        return {"not_available": "the suite has no option --device"}
    files = [name for name in FILES if (package / "tests" / name.partition("::")[0]).exists()]
    command = [
        sys.executable, "-m", "pytest", "-q", "-x" if settings.tiny else "--maxfail=25",
        "-p", "no:cacheprovider", "-W", "default", "--device", settings.device,
        *[f"tests/{name}" for name in (files[:1] if settings.tiny else files)],
    ]  # fmt: skip
    env = {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    log = Path(settings.work) / "suite.log"
    done = run(command, SECONDS, env=env, cwd=package, log=log)
    last = done.output.strip().splitlines()[-1:] or [""]
    return {
        "files": files,
        "status": done.status,
        "counts": {name: int(count) for count, name in COUNTS.findall(last[0])},
        "tail": done.tail,
        "error": "" if done.ok else done.status,
    }
