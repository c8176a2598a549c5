"""Writes a conversation as Markdown, as JSON, or as an archive that can be imported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import as_json as settings_as_json

from ..terminal.texts import counted
from .conversation import DROPPED

if TYPE_CHECKING:
    import lmchat
    from lmchat.archive import Exported
    from lmchat.store.records import SessionRecord

_HEADINGS = {"system": "System", "user": "User", "assistant": "Assistant"}
_TEXTS = (".md", ".json")


@dataclass(frozen=True)
class Conversation:
    """The current conversation of a session, as the text formats contain it."""

    name: str
    title: str
    history: str
    settings: Mapping[str, Any]
    template_variables: Mapping[str, Any]
    turns: Sequence[lmchat.Turn]
    token_ids: Sequence[int]
    dropped: Sequence[lmchat.Turn]

    @classmethod
    def of_session(cls, session: lmchat.SessionApi) -> Conversation:
        """Returns the conversation of an open session."""
        return cls(
            session.name,
            session.title,
            session.history,
            session.settings,
            session.template_variables,
            session.turns,
            session.token_ids,
            session.dropped,
        )

    @classmethod
    def of_record(cls, record: SessionRecord) -> Conversation:
        """Returns the conversation of a stored session."""
        path = record.tree.path(record.leaf)
        return cls(
            record.name,
            record.title,
            record.history,
            record.settings,
            record.template_variables,
            path,
            record.tree.token_ids(record.leaf),
            record.tree.dropped(path),
        )


def write(
    session: lmchat.SessionApi,
    path: str,
    *,
    force: bool = False,
    pages: bool = False,
    notify: Callable[[str], None],
) -> None:
    """Writes the current conversation to a .md or .json file, or the session to a .zip.

    Args:
        session: The session.
        path: The file; its ending selects the format.
        force: Replace an existing file.
        pages: Include the KV pages in a .zip.
        notify: Called with messages for the user.

    Raises:
        InvalidRequest: The ending is unknown, the file exists, or it cannot be written.
    """
    target = Path(os.path.expanduser(path))
    if target.suffix.lower() != ".zip" and not is_text(target):
        raise InvalidRequest(f"file is {path!r}, expected a name that ends in .md, .json or .zip")
    check_ending(target, pages)
    if target.exists() and not force:
        raise InvalidRequest(f"{path} exists; /export {path} --force replaces it")
    if target.suffix.lower() == ".zip":
        done = session.export(target, pages, force=force, notify=notify)
        also = f", {counted(done.pages, 'page')}" if pages else ""
        notify(f"{target}: {counted(done.turns, 'message')} of all branches{also} written")
        return
    conversation = Conversation.of_session(session)
    write_text(conversation, target, force)
    notify(f"{target}: {counted(len(conversation.turns), 'message')} written")


def is_text(file: Path) -> bool:
    """Returns whether the ending of the file selects a text format."""
    return file.suffix.lower() in _TEXTS


def check_ending(file: Path, pages: bool) -> None:
    """Raises InvalidRequest if `pages` are asked for in a text format."""
    if pages and is_text(file):
        raise InvalidRequest(
            f"file is {str(file)!r} with --pages, expected a name that ends in .zip"
        )


def write_text(conversation: Conversation, file: Path, force: bool) -> Path:
    """Writes a .md or .json file atomically.

    Args:
        conversation: The conversation.
        file: The file; its ending selects the format.
        force: Replace an existing file.

    Returns:
        The path, with the home folder expanded.

    Raises:
        InvalidRequest: The file exists, or it cannot be written.
    """
    from lmchat.archive.archive import replacing

    target = Path(os.path.expanduser(file))
    text = as_markdown(conversation) if target.suffix.lower() == ".md" else as_json(conversation)
    data = text.encode("utf-8", "replace")
    replacing(target, force, lambda opened: opened.write(data))
    return target


def export_record(record: SessionRecord, file: Path, force: bool) -> Exported:
    """Writes the current conversation of a stored session to a .md or .json file.

    Raises:
        InvalidRequest: The file exists, or it cannot be written.
    """
    from lmchat.archive import Exported

    conversation = Conversation.of_record(record)
    target = write_text(conversation, file, force)
    return Exported(str(target), len(conversation.turns), 0, target.stat().st_size)


def as_markdown(conversation: Conversation) -> str:
    """Formats the messages under headings; reasoning is quoted."""
    parts = [f"# {conversation.title or conversation.name}"]
    for turn in conversation.dropped:
        parts += _markdown(turn)
    if conversation.dropped:
        parts.append(f"---\n\n*{DROPPED[0].upper()}{DROPPED[1:]}.*")
    for turn in conversation.turns:
        parts += _markdown(turn)
    return "\n\n".join(parts).rstrip() + "\n"


def _markdown(turn: lmchat.Turn) -> list[str]:
    """Returns the paragraphs of a message."""
    parts = [f"## {_HEADINGS.get(turn.role, turn.role)}"]
    if turn.reasoning:
        parts.append("\n".join(f"> {line}".rstrip() for line in turn.reasoning.split("\n")))
    return [*parts, turn.text]


def as_json(conversation: Conversation) -> str:
    """Formats the messages with token ids, usage and timings, and the session's settings."""
    found: dict[str, Any] = {
        "session": conversation.name,
        "history": conversation.history,
        "settings": settings_as_json(conversation.settings),
        "template_variables": dict(conversation.template_variables),
        **({"dropped": list(map(_turn, conversation.dropped))} if conversation.dropped else {}),
        "turns": [_turn(turn) for turn in conversation.turns],
        "token_ids": list(conversation.token_ids),
    }
    return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


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
            "settings": settings_as_json(turn.settings),
        }
    return found
