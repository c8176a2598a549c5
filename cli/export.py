"""A conversation as a file: Markdown to read, JSON for programs, an archive to be imported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest

from .words import counted

if TYPE_CHECKING:
    import lmchat

_HEADINGS = {"system": "System", "user": "User", "assistant": "Assistant"}


def write(
    session: lmchat.Session,
    path: str,
    *,
    force: bool = False,
    pages: bool = False,
    say: Callable[[str], None],
) -> None:
    """Writes the current branch to a .md or .json file, or the session to a .zip, with its `pages`
    of keys and values where asked for. `say` is told what was done, and what was left out.

    Raises InvalidRequest for another ending, a file that exists (without `force`) and one that
    cannot be written.
    """
    target = Path(path).expanduser()
    if target.suffix not in (".md", ".json", ".zip"):
        raise InvalidRequest(f"file is {path!r}, expected a name that ends in .md, .json or .zip")
    if pages and target.suffix != ".zip":
        raise InvalidRequest(f"file is {path!r} with --pages, expected a name that ends in .zip")
    try:
        if target.suffix == ".zip":
            if target.exists() and not force:
                raise FileExistsError
            done = session.export(target, pages, force=force, say=say)
            count = f"{done.turns} messages of all branches"
            also = f", {counted(done.pages, 'page')}" if pages else ""
            say(f"{target}: {count}{also} written")
            return
        text = as_markdown(session) if target.suffix == ".md" else as_json(session)
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidRequest(f"{path} exists; /export {path} --force replaces it") from None
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written: {os.strerror(error.errno or 0)}"
        ) from error
    say(f"{target}: {len(session.turns)} messages written")


def as_markdown(session: lmchat.Session) -> str:
    """The messages under headings; reasoning is quoted."""
    parts = [f"# {session.title or session.name}"]
    for turn in session.turns:
        parts.append(f"## {_HEADINGS.get(turn.role, turn.role)}")
        if turn.reasoning:
            parts.append("\n".join(f"> {line}".rstrip() for line in turn.reasoning.split("\n")))
        parts.append(turn.text)
    return "\n\n".join(parts).rstrip() + "\n"


def as_json(session: lmchat.Session) -> str:
    """The messages with their token ids, usage and timings, and the session's settings."""
    found: dict[str, Any] = {
        "session": session.name,
        "history": session.history,
        "settings": session.settings,
        "template_variables": session.template_variables,
        "turns": [_turn(turn) for turn in session.turns],
        "token_ids": session.token_ids,
    }
    return json.dumps(found, indent=2, ensure_ascii=False, default=str) + "\n"


def _turn(turn: lmchat.Turn) -> dict[str, Any]:
    found: dict[str, Any] = {
        "role": turn.role,
        "text": turn.text,
        "token_ids": list(turn.token_ids),
    }
    if turn.role == "assistant":
        found |= {
            "reasoning": turn.reasoning,
            "finish_reason": turn.finish_reason,
            "usage": asdict(turn.usage),
            "timings": asdict(turn.timings),
            "settings": dict(turn.settings),
        }
    return found
