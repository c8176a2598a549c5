"""A chat killed at random moments loses nothing that was seen: part of `trials/session_kill.py`."""

import subprocess
import sys

import pytest
from assets import ROOT


@pytest.mark.parametrize(("trials", "more"), [(30, []), (3, ["--real"])])
def test_a_killed_chat_loses_nothing(trials, more):
    script = ROOT / "tests" / "stress" / "session_kill.py"
    command = [sys.executable, str(script), "--trials", str(trials), "--seed", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{trials} kills, seed 3: 0 failures" in done.stdout
