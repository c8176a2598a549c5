"""Phase `suite`: the part of the Python test suite that tests a device most, run on it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from .settings import Settings
from .shell import run

# Seconds at the end of the phase: pytest is interrupted and prints its counts, then it is killed,
# then the phase is.
MARGIN, LAST_WORDS = 4.0, 5.0
STOPPED = 124  # `timeout` ends with it
# Whole models against transformers come early: batch-invariant results may still be wrong.
# Paths are relative to tests/.
FILES = (
    "turbomind/test_parity.py::test_default_and_deterministic_logits_are_those_of_transformers",
    "lmchat/sessions/test_handle_advance.py",
    "turbomind/test_parity.py::test_every_family_has_the_logits_of_transformers",
    "turbomind/test_parity.py::test_prompts_that_end_at_page_borders",
    "turbomind/test_identity.py", "turbomind/test_tiers.py", "turbomind/test_sampler.py",
    "lmchat/kv/test_session_pages.py", "turbomind/test_engine_api.py",
)  # fmt: skip
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)")
PROGRESS = re.compile(r"^([.FEsxX]+)(?: *\[ *\d+%\])?$", re.MULTILINE)
NO_PACKAGE = re.compile(
    r"^E   ModuleNotFoundError: No module named '(?!lmchat|turbomind)([\w.]+)'", re.M
)
LETTERS = {".": "passed", "F": "failed", "E": "errors", "s": "skipped", "x": "xfailed"}


def counts_of(output: str) -> dict[str, int]:
    """Returns counts from pytest's last line, or, if it was killed, from its progress letters."""
    last = output.strip().splitlines()[-1:] or [""]
    if found := COUNTS.findall(last[0]):
        return {name: int(count) for count, name in found}
    letters = "".join(PROGRESS.findall(output))
    return {name: letters.count(c) for c, name in LETTERS.items() if c in letters}


def plugin_options() -> list[str]:
    """Returns pytest options: the plugin that pyproject.toml configures, or none without it."""
    if importlib.util.find_spec("pytest_timeout"):
        return ["-p", "pytest_timeout"]
    return ["-o", "addopts=-ra --import-mode=importlib"]


def run_phase(settings: Settings) -> dict[str, Any]:
    """Runs pytest and counts its results; reaching the time limit is no failure, nor is a file of
    tests that needs a package which this machine lacks.
    """
    package = Path(settings.package)
    if "--device" not in (package / "tests" / "conftest.py").read_text():
        return {"not_available": "the suite has no option --device"}
    files = [name for name in FILES if (package / "tests" / name.partition("::")[0]).exists()]
    seconds = max(settings.seconds - MARGIN, 2.0)
    command = [  # in the foreground: pytest gets one signal, a second one would stop its summary
        "timeout", "--foreground", "--signal=INT", f"{max(seconds - LAST_WORDS, 1.0):.1f}",
        sys.executable, "-m", "pytest", "-q", "-x" if settings.tiny else "--maxfail=25",
        "--continue-on-collection-errors", *plugin_options(), "-p", "no:cacheprovider",
        "-W", "default", "--device", settings.device,
        *[f"tests/{name}" for name in (files[:1] if settings.tiny else files)],
    ]  # fmt: skip
    env = {
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no other installed plugins
    }
    log = Path(settings.work) / "suite.log"
    done = run(command, seconds, env=env, cwd=package, log=log)
    status = "timed out" if done.code == STOPPED else done.status
    counts = counts_of(done.output)
    lacking = NO_PACKAGE.findall(done.output)
    bad = sum(counts.get(name, 0) for name in ("failed", "error", "errors")) - len(lacking)
    stopped = status == "timed out" and counts.get("passed", 0) > 0
    fine = done.ok or stopped or (lacking and counts.get("passed", 0) > 0)
    error = f"{bad} of the tests failed" if bad else "" if fine else status
    note = f"no package {', '.join(sorted({*lacking}))}: {len(lacking)} of the files did not run"
    return {
        "files": files, "status": status, "counts": counts, "tail": done.tail, "error": error,
        **({"note": note} if lacking else {}),
    }  # fmt: skip
