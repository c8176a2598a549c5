"""A conversation as a file: Markdown to read, JSON for programs, an archive to be imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest

from ..terminal.texts import counted

if TYPE_CHECKING:
    import lmchat
    from lmchat.store.records import SessionRecord

_HEADINGS = {"system": "System", "user": "User", "assistant": "Assistant"}
_TEXTS = (".md", ".json")


@dataclass(frozen=True)
class Talk:
    """What a text file has of a session: the current conversation."""

    name: str
    title: str
    history: str
    settings: Mapping[str, Any]
    template_variables: Mapping[str, Any]
    turns: Sequence[lmchat.Turn]
    token_ids: Sequence[int]

    @classmethod
    def of_session(cls, session: lmchat.Session) -> Talk:
        """Of one that an engine has open."""
        return cls(
            session.name,
            session.title,
            session.history,
            session.settings,
            session.template_variables,
            session.turns,
            session.token_ids,
        )

    @classmethod
    def of_record(cls, record: SessionRecord) -> Talk:
        """Of one in a store."""
        return cls(
            record.name,
            record.title,
            record.history,
            record.settings,
            record.template_variables,
            record.tree.path(record.leaf),
            record.tree.token_ids(record.leaf),
        )


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
    if target.suffix != ".zip" and not is_text(target):
        raise InvalidRequest(f"file is {path!r}, expected a name that ends in .md, .json or .zip")
    check_ending(target, pages)
    if target.exists() and not force:
        raise InvalidRequest(f"{path} exists; /export {path} --force replaces it")
    if target.suffix == ".zip":
        done = session.export(target, pages, force=force, say=say)
        also = f", {counted(done.pages, 'page')}" if pages else ""
        say(f"{target}: {counted(done.turns, 'message')} of all branches{also} written")
        return
    talk = Talk.of_session(session)
    write_text(talk, target, force)
    say(f"{target}: {counted(len(talk.turns), 'message')} written")


def is_text(file: Path) -> bool:
    """Whether its ending stands for the current conversation as a text."""
    return file.suffix in _TEXTS


def check_ending(file: Path, pages: bool) -> None:
    """InvalidRequest where a text file is to have `pages`."""
    if pages and is_text(file):
        raise InvalidRequest(
            f"file is {str(file)!r} with --pages, expected a name that ends in .zip"
        )


def write_text(talk: Talk, file: Path, force: bool) -> Path:
    """Writes a .md or .json file, whole or not at all; returns its whole path. InvalidRequest for a
    file that exists (without `force`) and one that cannot be written."""
    from lmchat.archive.archive import replacing

    target = file.expanduser()
    text = as_markdown(talk) if target.suffix == ".md" else as_json(talk)
    data = text.encode("utf-8", "replace")
    replacing(target, force, lambda opened: opened.write(data))
    return target


def as_markdown(talk: Talk) -> str:
    """The messages under headings; reasoning is quoted."""
    parts = [f"# {talk.title or talk.name}"]
    for turn in talk.turns:
        parts.append(f"## {_HEADINGS.get(turn.role, turn.role)}")
        if turn.reasoning:
            parts.append("\n".join(f"> {line}".rstrip() for line in turn.reasoning.split("\n")))
        parts.append(turn.text)
    return "\n\n".join(parts).rstrip() + "\n"


def as_json(talk: Talk) -> str:
    """The messages with their token ids, usage and timings, and the session's settings."""
    found: dict[str, Any] = {
        "session": talk.name,
        "history": talk.history,
        "settings": dict(talk.settings),
        "template_variables": dict(talk.template_variables),
        "turns": [_turn(turn) for turn in talk.turns],
        "token_ids": list(talk.token_ids),
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
