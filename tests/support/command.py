"""Runs `lmchat` in a new process, installed or from a bare checkout."""

import os
import subprocess
import sys
from collections.abc import Mapping

from assets import ROOT

# conftest.py maps cli/ to lmchat.cli if the package is not installed.
LMCHAT = [sys.executable, "-c", "import conftest; from lmchat.cli.main import main; main()"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def lmchat(
    *arguments: str, text: str = "", env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns the process; `text` is its stdin."""
    return subprocess.run(
        [*LMCHAT, *arguments],
        input=text,
        capture_output=True,
        encoding="utf-8",
        env=env,
        timeout=300,
    )
