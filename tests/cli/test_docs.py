"""`docs/cli.md`: its generated parts are those of the program."""

import re

import pytest
from assets import ROOT

from lmchat.cli import docs

PAGE = ROOT / "docs" / "cli.md"


def test_the_page_shows_the_current_commands_and_settings():
    text = PAGE.read_text(encoding="utf-8")
    assert docs.rewrite(text) == text, "docs/cli.md is out of date: run make docs"


def test_help_texts_have_a_fixed_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    wide = docs.help_texts()
    monkeypatch.setenv("COLUMNS", "40")
    assert docs.help_texts() == wide
    paragraphs = re.sub(r"(?m)^.*(?:--set NAME|lmchat ).*$", "", wide)
    assert max(map(len, paragraphs.splitlines())) <= docs.WIDTH


def test_every_command_has_a_help_text():
    shown = re.findall(r"^### `(.*)`$", docs.help_texts(), re.M)
    assert {"lmchat chat", "lmchat info", "lmchat sessions list", "lmchat bench verbs"} <= {*shown}
    assert all("Usage: " in part for part in docs.help_texts().split("### ")[1:])


def test_a_page_without_markers_is_refused():
    with pytest.raises(SystemExit, match="markers not found"):
        docs.rewrite("# A page")
