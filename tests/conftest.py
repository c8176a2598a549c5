"""Fixtures all tests share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import command
import pytest

import lmchat
import turbomind

_HOME = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()


@pytest.fixture(scope="session", params=["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """The devices that engine tests run on."""
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    """No test touches the user's own sessions."""
    config.stash[_HOME] = tempfile.TemporaryDirectory(prefix="lmchat-", ignore_cleanup_errors=True)
    os.environ["LMCHAT_HOME"] = command.ENVIRONMENT["LMCHAT_HOME"] = config.stash[_HOME].name


def pytest_unconfigure(config: pytest.Config) -> None:
    """They end with the run."""
    config.stash[_HOME].cleanup()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every test has a home of its own, and so have the processes that it starts."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("LMCHAT_HOME", str(path))
    monkeypatch.setitem(command.ENVIRONMENT, "LMCHAT_HOME", str(path))
    return path


@pytest.fixture(scope="module", params=["memory", "disk"])
def store_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Engines of a module that uses it are opened on each kind of store."""
    kind = str(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lmchat.ChatEngine.__init__.__kwdefaults__, "store", kind)
        patch.setitem(lmchat.AsyncChatEngine.__init__.__kwdefaults__, "store", kind)
        yield kind


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Zoo:
    """Small random checkpoints of every family with their reference models, made on demand."""
    return checkpoints.Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def open_engine(device: str) -> Iterator[Callable[..., turbomind.Engine]]:
    """Opens engines with settings for small models; closed, with balanced books, at the end."""
    engines: list[turbomind.Engine] = []

    def open_one(path: Path | str, **options: Any) -> turbomind.Engine:
        defaults = {"device": device, "threads": 2, "cache_memory": "32MiB"}
        engines.append(turbomind.Engine(path, **{**defaults, **options}))
        return engines[-1]

    yield open_one
    for engine in engines:
        with contextlib.suppress(turbomind.EngineClosed):
            engine.check_invariants()
        engine.close()
