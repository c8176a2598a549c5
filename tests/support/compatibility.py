"""The files of `tests/data/compatibility`, which an earlier lmchat wrote."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

from assets import ROOT
from chat_models import chat_model

FOLDER = ROOT / "tests" / "data" / "compatibility"
OPTIONS: dict[str, Any] = {"threads": 1, "cache_memory": "32MiB", "isa": "portable"}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": {0: -100.0, 2: -100.0}}
SESSIONS = ("journey", "reworded", "side", "trip")


def expected(name: str = "expected.json") -> Any:
    """Returns what the earlier lmchat read from its own files."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def unpack_model(path: Path) -> Path:
    """Writes the model of the recorded sessions: recorded files, and generated weights."""
    chat_model(path)
    for child in path.iterdir():
        if child.name != "model.safetensors":
            child.unlink()
    _unpack("model.tar.xz", path)
    return path


def unpack_data(path: Path) -> Path:
    """Copies the recorded data directory, readable only by its owner."""
    path.mkdir(mode=0o700)
    _unpack("data-directory.tar.xz", path)
    return path


def copy_archive(name: str, folder: Path) -> Path:
    """Copies a recorded archive."""
    return Path(shutil.copy(FOLDER / f"{name}.lmchat", folder))


def session_facts(chat: Any) -> dict[str, Any]:
    """Returns the contents of a session, with the keys of `expected.json`."""
    users = sum(turn.role == "user" for turn in chat.turns)
    return {
        "title": chat.title,
        "system": chat.system,
        "settings": {k: str(v) for k, v in sorted(chat.settings.items())},
        "template_variables": chat.template_variables,
        "tags": list(chat.tags),
        "pinned": chat.pinned,
        "overflow": chat.overflow,
        "history": {"append": "keep"}.get(chat.history, chat.history),
        "notices": list(chat.notices),
        "token_ids": list(chat.token_ids),
        "turns": [[t.id, t.parent, t.role, t.text, t.finish_reason] for t in chat.turns],
        "branches": [len(chat.branches(turn)) for turn in range(users + 1)],
    }


def reply_facts(reply: Any) -> dict[str, Any]:
    """Returns the contents of a reply, with the keys of `expected.json`."""
    names = ("prompt_tokens", "cached_tokens", "loaded_tokens", "foreign_tokens")
    return {
        "token_ids": list(reply.token_ids),
        "notices": list(reply.notices),
        **{name: getattr(reply.usage, name) for name in names},
    }


def _unpack(name: str, folder: Path) -> None:
    with tarfile.open(FOLDER / name) as archive:
        archive.extractall(folder, filter="data")
