"""Lets the tests run from a checkout where lmchat is not installed.

There it imports `cli/` as `lmchat.cli`, as `package-dir` in pyproject.toml maps it.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent

if importlib.util.find_spec("lmchat.cli") is None:
    spec = importlib.util.spec_from_file_location("lmchat.cli", ROOT / "cli" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["lmchat.cli"] = package
    spec.loader.exec_module(package)
