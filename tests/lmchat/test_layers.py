"""The folders of lmchat form layers: a module imports only its own layer and lower ones."""

import ast
from pathlib import Path

import pytest

import lmchat

LAYERS = (
    "errors",
    "text",
    "store",
    "kv",
    "generation",
    "sessions",
    "conversations",
    "stateless",
    "archive",
    "engine",
    "aio",
    "client",
    "server",
    "deploy",
)
"""Layers from the lowest to the highest. Other modules are helpers of any layer."""

PLAIN_DATA = "lmchat.store.turns"
"""Turns are values without behaviour; templates render them, so `text` imports them too."""

ROOT = Path(lmchat.__file__).parent


def layer_of(module: str) -> int | None:
    """Returns the number of a module's layer, None for a helper."""
    parts = module.split(".")
    if parts[0] != "lmchat" or len(parts) == 1:
        return None
    name = parts[1]
    return LAYERS.index(name) if name in LAYERS else None


def imports(path: Path) -> list[str]:
    """Returns the modules that are imported when the file is, not those for type checkers or within
    functions."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_a_higher_layer(path):
    module = ".".join(("lmchat", *path.relative_to(ROOT).with_suffix("").parts))
    own = layer_of(module)
    if own is None:
        return
    for name in imports(path):
        other = layer_of(name)
        assert other is None or other <= own or name == PLAIN_DATA, f"{module} imports {name}"


def test_modules_of_the_store_import_each_other_in_one_direction():
    graph = {
        f"lmchat.store.{path.stem}": [
            name for name in imports(path) if name.startswith("lmchat.store.")
        ]
        for path in (ROOT / "store").glob("*.py")
    }
    done: set[str] = set()
    while ready := [
        name for name in graph if name not in done and done.issuperset({*graph[name]} & {*graph})
    ]:
        done.update(ready)
    assert not graph.keys() - done
