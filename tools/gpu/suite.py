"""Phase `suite`: the part of the Python test suite that says most about a device, run on it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from .settings import Settings
from .shell import run

# Of the phase's time: pytest is interrupted, and has said how far it came, before it is killed,
# and that before the phase is.
MARGIN, LAST_WORDS = 4.0, 5.0
STOPPED = 124  # `timeout` ends with it
# Whole models against transformers come early: what is equal in every company may still be wrong.
FILES = (
    "test_parity.py::test_default_and_deterministic", "test_advance.py",
    "test_parity.py::test_every_family", "test_parity.py::test_page_borders",
    "test_identity.py", "test_tiers.py", "test_sampler.py", "test_session_pages.py",
    "test_engine_api.py",
)  # fmt: skip
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)")
PROGRESS = re.compile(r"^([.FEsxX]+)(?: *\[ *\d+%\])?$", re.MULTILINE)
LETTERS = {".": "passed", "F": "failed", "E": "errors", "s": "skipped", "x": "xfailed"}


def counts_of(output: str) -> dict[str, int]:
    """From pytest's last line, or, if it was killed, from the letters of the tests it has run."""
    last = output.strip().splitlines()[-1:] or [""]
    if found := COUNTS.findall(last[0]):
        return {name: int(count) for count, name in found}
    letters = "".join(PROGRESS.findall(output))
    return {name: letters.count(c) for c, name in LETTERS.items() if c in letters}


def plugin_options() -> list[str]:
    """The one plugin whose options pyproject.toml sets; without it nothing is strict about them."""
    if importlib.util.find_spec("pytest_timeout"):
        return ["-p", "pytest_timeout"]
    return ["-o", "addopts=-ra --import-mode=importlib"]


def run_phase(settings: Settings) -> dict[str, Any]:
    """Counts of pytest, as far as it came in its time: being stopped is no failure."""
    package = Path(settings.package)
    if "--device" not in (package / "tests" / "conftest.py").read_text():
        return {"not_available": "the suite has no option --device"}
    files = [name for name in FILES if (package / "tests" / name.partition("::")[0]).exists()]
    seconds = max(settings.seconds - MARGIN, 2.0)
    command = [  # in the foreground: pytest gets one signal, a second one would stop its summary
        "timeout", "--foreground", "--signal=INT", f"{max(seconds - LAST_WORDS, 1.0):.1f}",
        sys.executable, "-m", "pytest", "-q", "-x" if settings.tiny else "--maxfail=25",
        *plugin_options(), "-p", "no:cacheprovider", "-W", "default", "--device", settings.device,
        *[f"tests/{name}" for name in (files[:1] if settings.tiny else files)],
    ]  # fmt: skip
    env = {
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of whatever else is installed
    }
    log = Path(settings.work) / "suite.log"
    done = run(command, seconds, env=env, cwd=package, log=log)
    status = "timed out" if done.code == STOPPED else done.status
    counts = counts_of(done.output)
    bad = sum(counts.get(name, 0) for name in ("failed", "error", "errors"))
    stopped = status == "timed out" and counts.get("passed", 0) > 0
    error = f"{bad} of the tests failed" if bad else "" if done.ok or stopped else status
    return {"files": files, "status": status, "counts": counts, "tail": done.tail, "error": error}
