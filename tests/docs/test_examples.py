"""Every script in examples/ runs with the small model that ships and prints what it promises."""

import os
import subprocess
import sys

import pytest
from assets import ROOT

PRINTS = {
    "branches.py": "branches of the first question: ['My dog is called Waffles.', 'My dog",
    "chat.py": "> What's my dog's name?",
    "many_sessions.py": "Barbara: ",
    "resume.py": "tokens were cached",
    "stop_and_continue.py": "equal to a reply without a stop: True",
    "token_ids.py": "scores:",
}


def test_every_example_is_listed():
    scripts = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert scripts == sorted(PRINTS)
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in scripts if f"]({name})" not in listed] == []


@pytest.mark.parametrize("script", sorted(PRINTS))
def test_an_example_runs(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert PRINTS[script] in done.stdout
