"""The modules of turbomind import each other in one direction only."""

import ast
from pathlib import Path

import turbomind

ROOT = Path(turbomind.__file__).parent


def module_name(path: Path) -> str:
    parts = ("turbomind", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imported_names(path: Path) -> set[str]:
    """Returns every dotted name that a file imports, also for type checking only."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imports_of_modules() -> dict[str, set[str]]:
    """Returns for each module of turbomind the modules of turbomind that it imports."""
    files = {module_name(path): path for path in ROOT.rglob("*.py")}
    modules = {*files, "turbomind._C"}

    def nearest(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    found = {m: {nearest(name) for name in imported_names(path)} for m, path in files.items()}
    return {module: others - {"", module} for module, others in found.items()}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_no_module_imports_itself_through_others():
    graph = imports_of_modules()
    assert len(graph) > 20
    assert [module for module in graph if module in reachable(graph, module)] == []


def test_no_package_imports_a_package_that_imports_it():
    graph: dict[str, set[str]] = {}
    for module, others in imports_of_modules().items():
        package = ".".join(module.split(".")[:2])
        graph.setdefault(package, set()).update(".".join(name.split(".")[:2]) for name in others)
    graph = {package: others - {package} for package, others in graph.items()}
    assert [package for package in graph if package in reachable(graph, package)] == []


def test_no_module_imports_from_the_public_package():
    assert [
        module for module, others in imports_of_modules().items() if "turbomind" in others
    ] == []
