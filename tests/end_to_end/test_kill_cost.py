"""After a kill no more than an unfinished page is computed again: part of `trials/kill_cost.py`."""

import subprocess
import sys

from assets import ROOT


def test_a_kill_costs_at_most_an_unfinished_page():
    command = [sys.executable, "-m", "tests.stress.kill_cost", "--kills", "10", "--seed", "4"]
    done = subprocess.run(
        [*command, "--settle"], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 kills, seed 4, 9 turns behind one: full pages lost: 0 in 9" in done.stdout
