"""Every relative link, anchor and written path in the project's Markdown leads somewhere."""

import re
import subprocess

import pytest
from assets import ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages():
    """Returns the Markdown files of the checkout, or of the source tree outside a repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found = listed.stdout.split() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.md")]
    skipped = ("build/", ".venv/", "benchmarks/.peers/")
    return sorted(p for p in found if not p.startswith(skipped) and (ROOT / p).exists())


def anchors(text):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", pages())
def test_every_link_resolves(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path) if path else ROOT / page
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())
        ):
            wrong.append(target)
    assert wrong == []


def test_a_missing_target_and_a_missing_anchor_are_noticed():
    assert "the-verbs" in anchors("# The verbs\n")
    assert LINK.findall("[a](b.md#c) ![p](p.svg)") == ["b.md#c", "p.svg"]


EXAMPLES = ("<format>", "silu", "<family>")  # recipes for contributors create files of these names


def written_paths(text):
    """Returns the paths of the repository that stand in code spans, braces expanded."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}  # made by builds
    spans = (span.split("::")[0] for span in re.findall(r"`([^`\s]+)`", text))
    paths = [path for span in spans if span.split("/")[0] in tops for path in expanded(span)]
    return [path for path in paths if not any(word in path for word in EXAMPLES)]


def expanded(path):
    """Returns the paths that a path with alternatives in braces stands for."""
    found = re.fullmatch(r"(.*?)\{([^{}]*)\}(.*)", path)
    if found is None:
        return [path]
    return [p for choice in found[2].split(",") for p in expanded(found[1] + choice + found[3])]


NO_PATHS = ("CHANGELOG.md",)  # it has former names too


@pytest.mark.parametrize("page", [p for p in pages() if p not in NO_PATHS and "results/" not in p])
def test_every_written_path_exists(page):
    paths = written_paths((ROOT / page).read_text(encoding="utf-8"))
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []


def test_written_paths_are_found():
    text = "`cpp/ops/a_{cpu,cuda}.cc` `tests/x.py::test_y` `a/b` `make`"
    expected = ["cpp/ops/a_cpu.cc", "cpp/ops/a_cuda.cc", "tests/x.py"]
    assert written_paths(text) == expected
