"""Folders: each says what is in it, and none, and no file, grows beyond what a reader takes in."""

import ast
import os
from pathlib import Path

from assets import ROOT

TOPS = (
    "benchmarks",
    "cli",
    "cpp",
    "examples",
    "lmchat",
    "tests",
    "tools",
    "training",
    "turbomind",
    "webui",
)
SUFFIXES = {".cc", ".css", ".cu", ".h", ".html", ".js", ".py", ".pyi"}

MOST_FILES = 20  # of one folder
MOST_LINES = 600  # of one file

LARGE_FOLDERS = {
    "benchmarks": "each benchmark is a command that its README names",
    "cpp/cuda": "two implementations of a GPU, the real one and the emulator",
    "cpp/linear": "a kernel, its header and its dispatch are files of their own",
    "cpp/ops": "a kernel, its header and its dispatch are files of their own",
    "tools/gpu": "a phase of gpu_check.py is a file of its own",
}
"""Folders with more files -> why."""

LARGE_FILES = {
    "cpp/tests/engine/engine_checks.h": "checks of one engine that several drivers run",
    "cpp/tests/ops/attention_test_main.cc": "cases of one op on the CPU",
    "cpp/tests/ops/cuda_attention_test_main.cc": "cases of one op on a GPU",
    "tests/lmchat/generation/test_admission.py": "cases of one queue over one scripted engine",
    "tests/support/checkpoints.py": "writers of tiny checkpoints, one for each family",
}
"""Files with more lines -> why."""


def source_folders() -> dict[str, list[Path]]:
    """Returns folder -> its source files, for all that have any."""
    found = {}
    for top in TOPS:
        for folder, inner, _ in os.walk(ROOT / top):
            inner[:] = [name for name in inner if not name.startswith((".", "__"))]
            if files := [path for path in Path(folder).iterdir() if path.suffix in SUFFIXES]:
                found[str(Path(folder).relative_to(ROOT))] = files
    return found


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    large = {name for name, files in source_folders().items() if len(files) > MOST_FILES}
    assert large == {*LARGE_FOLDERS}


def test_no_file_has_more_lines_than_a_reader_takes_in() -> None:
    paths = [path for files in source_folders().values() for path in files]
    large = {path for path in paths if path.read_bytes().count(b"\n") > MOST_LINES}
    assert {str(path.relative_to(ROOT)) for path in large} == {*LARGE_FILES}


def statement(folder: str) -> str:
    """Returns what a folder says of itself: its README, or the first lines of its package."""
    readme, package = ROOT / folder / "README.md", ROOT / folder / "__init__.py"
    if readme.exists():
        return readme.read_text()
    return (package.exists() and ast.get_docstring(ast.parse(package.read_text()))) or ""


def test_every_folder_says_what_is_in_it_and_what_is_not() -> None:
    # Folders of tests mirror those of the sources; the page's package describes its static files.
    described_above = ("tests/", "cpp/tests/", "webui/static")
    folders = [name for name in source_folders() if not name.startswith(described_above)]
    silent = [name for name in folders if "\n\nNot here: " not in statement(name)]
    assert silent == []
