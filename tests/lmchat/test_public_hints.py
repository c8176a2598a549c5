"""Type hints of public names, as FastAPI, pydantic and documentation tools evaluate them."""

from __future__ import annotations

import inspect
import subprocess
import sys
import sysconfig
import typing
from pathlib import Path

import pytest

import lmchat
import turbomind


def functions():
    """Yields the names and objects of all public classes, methods, properties and functions."""
    for module in (lmchat, turbomind):
        for name in module.__all__:
            one = getattr(module, name)
            if inspect.isfunction(one):
                yield f"{module.__name__}.{name}", one
            if not inspect.isclass(one) or issubclass(one, BaseException):
                continue
            yield f"{module.__name__}.{name}", one
            for member in dir(one):
                found = inspect.getattr_static(one, member)
                found = getattr(found, "__func__", getattr(found, "fget", found))
                if inspect.isfunction(found) and (member == "__init__" or member[0] != "_"):
                    yield f"{module.__name__}.{name}.{member}", inspect.unwrap(found)


def test_hints_of_public_names_can_be_evaluated():
    failed = {}
    count = 0
    for name, one in functions():
        count += 1
        try:
            typing.get_type_hints(one)
            if inspect.isfunction(one):
                inspect.signature(one, eval_str=True)
        except Exception as error:
            failed[name] = repr(error)
    assert not failed
    assert count > 400


def test_settings_of_verbs_have_their_types():
    hints = typing.get_type_hints(lmchat.Session.send)
    assert typing.get_args(hints["settings"])[0].__annotations__["temperature"] is not None


def test_type_checkers_find_the_installed_package(tmp_path):
    """They read the folders of sys.path, those of .pth files too, and no import hook."""
    if not (Path(sysconfig.get_path("purelib")) / "lmchat_sources.pth").exists():
        pytest.skip("the package was not installed by make")
    code = (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "for name in ('lmchat', 'turbomind'):\n"
        "    [place] = PathFinder.find_spec(name, sys.path).submodule_search_locations\n"
        "    open(place + '/py.typed').close()\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True, timeout=60)
