"""Killed chats lose nothing: a few cases of `tests/stress/session_kill.py` and `kill_cost.py`."""

import subprocess
import sys

import pytest
from assets import ROOT


def stress(name: str, *arguments: str) -> str:
    """Runs a stress test, which must pass, and returns its output."""
    command = [sys.executable, "-m", f"tests.stress.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("kills", "more"), [(30, []), (3, ["--real"])])
def test_a_killed_chat_loses_nothing_that_was_seen(kills, more):
    output = stress("session_kill", "--count", str(kills), "--seed", "3", *more)
    assert f"{kills} kills, seed 3: 0 failures" in output


def test_a_kill_costs_at_most_an_unfinished_page():
    output = stress("kill_cost", "--kills", "10", "--seed", "4", "--settle")
    assert "10 kills, seed 4, 9 turns after one: full pages lost: 0 in 9" in output
