"""The folders of `cli/` import each other in one direction, without cycles."""

import ast
from graphlib import TopologicalSorter

from assets import ROOT

CLI = ROOT / "cli"
ALLOWED = {
    "terminal": set(),
    "sessions": {"terminal"},
    "chat": {"terminal", "sessions"},
    "bench": {"terminal"},
    "serve": set(),
    "deploy": {"serve", "terminal"},
}
"""Folder -> the other folders that its modules may import; all may import the top level."""


def module_imports():
    """Returns module -> imported modules of `cli`, also of imports in functions and for types."""
    found = {}
    for path in CLI.rglob("*.py"):
        module = path.relative_to(CLI).with_suffix("").parts
        imported = found.setdefault("/".join(module), set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = [*module[: len(module) - node.level], *(node.module or "").split(".")]
                base = [name for name in base if name]
                for name in (alias.name for alias in node.names):
                    target = "/".join([*base, name])
                    exists = (CLI / f"{target}.py").exists()
                    imported.add(target if exists else "/".join(base) or "__init__")
    return found


def test_folders_import_only_the_allowed_ones():
    for module, imported in module_imports().items():
        folder = module.partition("/")[0] if "/" in module else None
        if folder is None:
            continue  # the top level puts the commands together
        used = {other.partition("/")[0] for other in imported if "/" in other} - {folder}
        assert used <= ALLOWED[folder], module


def test_no_module_imports_itself_indirectly():
    graph = module_imports()
    assert "chat/repl" in graph["chat/command"]
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_folder_holds_more_than_twenty_files():
    for folder in [CLI, *(CLI / name for name in ALLOWED)]:
        assert len(list(folder.glob("*.py"))) <= 20
