"""The project's lists agree: tools of `make check` and pre-commit, and the fast tests."""

import re
from importlib import metadata

from assets import ROOT
from packaging.specifiers import SpecifierSet

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


def test_the_fast_tests_exist_and_every_folder_has_some():
    names = (ROOT / "tests" / "fast.txt").read_text().split()
    files = {ROOT / name.split("::")[0] for name in names}
    assert all(file.is_file() for file in files)
    folders = {path.parent for path in ROOT.glob("tests/**/test_*.py")}
    assert {file.parent for file in files} == folders


def test_packages_whose_private_parts_are_used_have_an_upper_bound():
    """`lmchat/server/http/protocol.py` changes with them."""
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("uvicorn", "h11"):
        (bounds,) = re.findall(rf'^  "{name}(>=\S+,<\S+)"', project, re.MULTILINE)
        assert metadata.version(name) in SpecifierSet(bounds)
