"""The tools of `make check` and of pre-commit have the same versions."""

import re

from assets import ROOT

HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
PINS = dict(
    line.split("==")
    for line in (ROOT / "requirements" / "check.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def test_pre_commit_pins_the_versions_of_make_check():
    revisions = dict(re.findall(r"repo: https://\S+/(\S+)\n    rev: v(\S+)", HOOKS))
    assert revisions == {
        "ruff-pre-commit": PINS["ruff"],
        "mirrors-clang-format": PINS["clang-format"],
    }


def test_every_tool_of_make_check_is_a_hook():
    hooks = set(re.findall(r"- id: (\S+)", HOOKS))
    assert hooks == {*PINS, "ruff-format"}
