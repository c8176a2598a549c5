"""The README stays what a newcomer reads: short, with a picture."""

import re

from assets import ROOT

from turbomind.models import FAMILIES

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_at_most_180_lines_and_1100_words():
    assert len(README.splitlines()) <= 180
    assert len(README.split()) <= 1100


def test_the_readme_counts_the_families():
    assert re.findall(r"\| Model families \| (\d+) \|", README) == [str(len(FAMILIES))]


def test_the_readme_shows_the_recorded_chat_above_the_first_heading():
    first = README.partition("\n## ")[0]
    assert "](docs/images/chat.svg)" in first


def test_contributing_fits_on_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60
