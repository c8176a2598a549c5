"""Folders: no include of cpp/ points up, no Python modules import each other in a circle, and no
folder grows beyond what a reader takes in at a glance.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the lowest layer to the highest: a folder includes from itself and from folders before it.
LAYERS = [
    "core",
    "cpu",
    "cuda",
    "cache",
    "linear",
    "ops",
    "sampling",
    "cost",
    "model",
    "tiers",
    "ceilings",
    "engine",
    "bindings",
]
# C++ tests may include every layer, and bindings/testing.cc binds parts of them for Python tests.
ABOVE_ALL = "tests"
# The same for the folders of cpp/model, whose own files are the lowest.
MODEL_LAYERS = ["", "parallel", "device", "mixers", "decoder"]

MOST_FILES = 20
# A kernel, its header and its dispatch are files of their own there, so these folders are larger.
LARGE_FOLDERS = {"cpp/cuda", "cpp/ops", "cpp/linear"}

PACKAGES = {"turbomind": "turbomind", "lmchat": "lmchat", "lmchat.cli": "cli"}


def includes() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / "cpp").rglob("*")):
        if path.suffix in {".h", ".cc", ".cu"}:
            for included in re.findall(
                r'^\s*#\s*include "([^"]+)"', path.read_text(), re.MULTILINE
            ):
                yield path, included


def level(folder: str) -> int:
    return len(LAYERS) if folder == ABOVE_ALL else LAYERS.index(folder)


def test_every_folder_of_cpp_is_a_layer() -> None:
    folders = {path.name for path in (ROOT / "cpp").iterdir() if path.is_dir()}
    assert folders == {*LAYERS, ABOVE_ALL}


def test_no_include_points_to_a_higher_layer() -> None:
    upward = set()
    for path, included in includes():
        folder, target = path.relative_to(ROOT / "cpp").parts[0], included.split("/")[0]
        if path == ROOT / "cpp/bindings/testing.cc":
            continue
        assert target in {*LAYERS, ABOVE_ALL}, f"{path}: {included} is in no layer"
        if level(target) > level(folder):
            upward.add((str(path.relative_to(ROOT)), included))
    assert not upward


def test_no_include_within_the_model_points_to_a_higher_folder() -> None:
    model = ROOT / "cpp" / "model"
    assert {path.name for path in model.iterdir() if path.is_dir()} == {*MODEL_LAYERS[1:]}
    upward = set()
    for path, included in includes():
        if not (path.is_relative_to(model) and included.startswith("model/")):
            continue
        folder = "/".join(path.relative_to(model).parts[:-1])
        target = "/".join(included.split("/")[1:-1])
        assert target in MODEL_LAYERS, f"{path}: {included} is in no folder of the model"
        if MODEL_LAYERS.index(target) > MODEL_LAYERS.index(folder):
            upward.add((str(path.relative_to(ROOT)), included))
    assert not upward


def source_folders() -> list[Path]:
    tops = [ROOT / name for name in ("cpp", "lmchat", "cli", "turbomind", "tests")]
    folders = [*tops, *(path for top in tops for path in top.rglob("*") if path.is_dir())]
    return [path for path in folders if "__pycache__" not in path.parts]


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    sources = {".py", ".pyi", ".h", ".cc", ".cu"}
    counts = {
        str(folder.relative_to(ROOT)): sum(path.suffix in sources for path in folder.iterdir())
        for folder in source_folders()
    }
    large = {name: n for name, n in counts.items() if n > MOST_FILES and name not in LARGE_FOLDERS}
    assert not large


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        # The extension turbomind._C is known by its stub.
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]:
            parts = list(path.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports of a module, those inside functions included and those under
    `if TYPE_CHECKING` not.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports_of(ast.Module([other], []))
        else:
            yield from imports_of(node)


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules among `known` that module `name` imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    if path.suffix == ".pyi":
        return found
    for node in imports_of(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*up, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            found.add(full if full in known else base)
    return {other for other in found if other in known and other != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of two or more modules (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[-len(component) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def test_no_python_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    assert len(known) > 50
    assert not circles({name: imported(name, path, known) for name, path in known.items()})


def test_the_search_for_circles_finds_one() -> None:
    graph = defaultdict(set, {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()})
    assert circles(graph) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import lmchat.store", {"lmchat.store"}),
        ("from lmchat import store", {"lmchat.store"}),
        ("from . import store", {"lmchat.store"}),
        ("if TYPE_CHECKING:\n    import lmchat.store", set()),
        ("def f():\n    import lmchat.store", {"lmchat.store"}),
        ("try:\n    import lmchat.store\nexcept ImportError:\n    pass", {"lmchat.store"}),
    ],
)
def test_imports_are_found_but_for_those_of_type_checkers(
    tmp_path: Path, source: str, expected: set[str]
) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    known = {"lmchat": path, "lmchat.store": path, "lmchat.module": path}
    assert imported("lmchat.module", path, known) == expected
