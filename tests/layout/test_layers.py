"""Layers: imports of Python modules and includes of C++ files point down only."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from assets import ROOT

LAYERS: dict[str, list[str | tuple[str, ...]]] = {
    "": ["cpp", "turbomind", "lmchat"],
    "cpp": [
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
        "tests",
        "bindings.testing",  # binds parts of C++ tests for Python tests
    ],
    "cpp.model": [
        ("build_hash", "config", "launch_kind", "model_memory", "step_inputs", "step_outputs"),
        ("model", "workspace"),
        "parallel",
        "device",
        "mixers",
        "decoder",
    ],
    "turbomind": [
        "closing",
        "_C",
        "errors",
        "shown",
        "near",
        "settings",
        "params",
        "machine",
        "files",
        "models",
        "quant",
        "gguf",
        "loading",
        "config",
        "engine",
        "__init__",
    ],
    "lmchat": [
        ("errors", "figures", "page_size"),
        ("aio.threads", "bundled", "forks"),
        "store.turns",  # turns are values without behaviour, which templates render
        "text",
        "store",
        "public_text",
        "kv",
        "generation",
        "interface",
        "archive",
        "sessions",
        "conversations",
        "stateless",
        "engine",
        "aio",
        "client",
        "__init__",
        "server",
        "deploy",
        "webui",
        "cli",
    ],
    "lmchat.server": [
        ("origins", "root_path"),
        "config",
        "errors",
        ("forecasts", "keyed_locks", "logs", "loop_lag", "metrics", "signals"),
        ("archive_limit", "held_bodies", "session_limit"),
        "state",
        ("health", "unknown_routes"),
        "http",
        "retries",
        "dialects",
        ("inference", "openai", "responses", "sessions"),
        "app",
        "http.process",  # runs the app
        "__init__",
    ],
    "lmchat.cli": [
        ("command_group", "errors", "init", "options", "support_table"),
        "terminal",
        ("info", "output"),
        ("bench", "serve", "sessions"),
        ("chat", "web"),
        "deploy",
        "app",
        ("docs", "main"),
        ("__init__", "__main__"),
    ],
}
"""Package -> its folders and modules from the lowest layer to the highest. One imports from itself
and from those before it. Those of one tuple do not import each other."""

PACKAGES = {
    "turbomind": "turbomind",
    "lmchat": "lmchat",
    "lmchat.cli": "cli",
    "lmchat.webui": "webui",
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        # The extension turbomind._C is known by its stub.
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]:
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def may_point_up_for_types(module: str) -> bool:
    """Whether imports under `if TYPE_CHECKING` do not count."""
    return module.startswith("lmchat.") and not module.startswith(("lmchat.cli", "lmchat.webui"))


def imports_of(tree: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports of a module, also those inside functions.

    `types`: also those under `if TYPE_CHECKING`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            for other in node.orelse:
                yield from imports_of(ast.Module([other], []), types)
        else:
            yield from imports_of(node, types)


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules among `known` that module `name` imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    if path.suffix == ".pyi":
        return found
    for node in imports_of(ast.parse(path.read_text()), not may_point_up_for_types(name)):
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


def includes() -> dict[str, set[str]]:
    """Returns module -> included modules of cpp/. A header and its source are one module."""
    graph = defaultdict(set)
    for path in (ROOT / "cpp").rglob("*"):
        if path.suffix in {".h", ".cc", ".cu"}:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for included in re.findall(
                r'^\s*#\s*include "([^"]+)"', path.read_text(), re.MULTILINE
            ):
                graph[name].add(".".join(("cpp", *Path(included).with_suffix("").parts)))
    return graph


@cache
def graph() -> dict[str, set[str]]:
    """Returns module -> the modules that it imports or includes."""
    known = modules()
    return {name: imported(name, path, known) for name, path in known.items()} | includes()


def layer_of(package: str, module: str) -> tuple[int, str]:
    """Returns the number of a module's layer in its package, and the longest name there that it
    has; -1 if there is none."""
    inside = module.removeprefix(package).removeprefix(".") or "__init__"
    best = (-1, "")
    for number, names in enumerate(LAYERS[package]):
        for name in [names] if isinstance(names, str) else names:
            if f"{inside}.".startswith(f"{name}.") and len(name) > len(best[1]):
                best = (number, name)
    return best


def is_in(package: str, module: str) -> bool:
    return not package or f"{module}.".startswith(f"{package}.")


def test_every_module_is_in_a_layer_and_every_layer_has_one() -> None:
    every = {name for module, others in graph().items() for name in (module, *others)}
    for package, layers in LAYERS.items():
        listed = {
            name for names in layers for name in ([names] if isinstance(names, str) else names)
        }
        inside = {
            module: layer_of(package, module)[1] for module in every if is_in(package, module)
        }
        assert not [module for module, name in inside.items() if not name]
        assert {*inside.values()} == listed


def test_no_module_imports_a_higher_layer() -> None:
    upward = set()
    for package in LAYERS:
        for module, others in graph().items():
            for other in others:
                if is_in(package, module) and is_in(package, other):
                    layer, above = layer_of(package, module), layer_of(package, other)
                    if above[0] > layer[0] or (above[0] == layer[0] and above != layer):
                        upward.add((module, other))
    assert upward == set()


def test_no_python_modules_import_each_other_in_a_circle() -> None:
    python = {name: others for name, others in graph().items() if not name.startswith("cpp.")}
    assert len(python) > 50
    found = circles(python)
    assert found == []


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
