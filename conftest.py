"""Lets the tests run from a checkout where lmchat is not installed.

There it imports `cli/` as `lmchat.cli` and `webui/` as `lmchat.webui`, as `package-dir` in
pyproject.toml maps them.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent

for name, folder in (("lmchat.cli", "cli"), ("lmchat.webui", "webui")):
    if importlib.util.find_spec(name) is None:
        spec = importlib.util.spec_from_file_location(name, ROOT / folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        spec.loader.exec_module(package)
