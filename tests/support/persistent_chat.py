"""Fixtures: chats with their own data directory, in terminals and in scripts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from assets import ROOT
from chat_models import endless_chat_model
from command import ENVIRONMENT, LMCHAT
from stores import stored_session
from terminal import Terminal

from lmchat.store.turns import Turn

OPTIONS = ["--cache-memory", "32MiB", "--threads", "1"]


@pytest.fixture(scope="module", name="model")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a model that never ends a reply by itself."""
    path = tmp_path_factory.mktemp("models") / "endless"
    return str(endless_chat_model(path, context=60_000))


@pytest.fixture(name="data_dir")
def made_data_dir(tmp_path: Path) -> Path:
    """Returns a data directory that does not exist yet."""
    return tmp_path / "data"


@pytest.fixture(name="start")
def made_start(model: str, data_dir: Path) -> Callable[..., Terminal]:
    """Returns a function that starts a chat in a pseudo-terminal."""

    def one(
        *options: str, about: tuple[str, ...] = (model,), columns: int = 100, rows: int = 30
    ) -> Terminal:
        env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(data_dir)}
        command = [*LMCHAT, "chat", *about, *OPTIONS, *options]
        return Terminal(command, columns=columns, rows=rows, env=env)

    return one


@pytest.fixture(name="script")
def made_script(data_dir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a chat as a script."""

    def one(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**ENVIRONMENT, "LMCHAT_HOME": str(data_dir)}
        command = [*LMCHAT, "chat", *arguments, *OPTIONS]
        return subprocess.run(
            command, input="", capture_output=True, encoding="utf-8", env=env, timeout=120
        )

    return one


def reply_of(data_dir: Path, name: str = "chat-1") -> Turn:
    """Returns the last stored turn of a session."""
    record = stored_session(data_dir, name)
    return record.tree.get(record.leaf)
