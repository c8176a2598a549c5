"""Items: the input of a response as messages, and turns as items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from lmchat.server.errors import HttpError
from lmchat.server.responses import ids
from lmchat.store.turns import Turn

_TEXT_PARTS = ("input_text", "output_text", "text")
PARTS = 4
"""Mean number of parts that a message may have."""

_ROLES = ("user", "assistant", "system", "developer")


@dataclass(frozen=True)
class Input:
    """The input of a response.

    Attributes:
        system: text of system and developer messages before the first other one; empty without.
        messages: the other messages; neighbours of one role are joined by an empty line.
    """

    system: str
    messages: tuple[dict[str, Any], ...]

    @property
    def question(self) -> str:
        """Text of the last message, which must be a user's.

        Raises:
            HttpError: there is none.
        """
        if not self.messages or self.messages[-1]["role"] != "user":
            raise HttpError(400, "input does not end with a user message", param="input")
        return str(self.messages[-1]["content"])


def parse(given: str | list[Any] | None, most: int, param: str = "input") -> Input:
    """Parses an input.

    Args:
        given: a user's text, or a list of items.
        most: largest number of items.
        param: name of the field, for errors.

    Raises:
        HttpError: an item or its place is not supported; the message names it.
    """
    if isinstance(given, str):
        return Input("", ({"role": "user", "content": given},))
    given = given or []
    if len(given) > most:
        raise HttpError(
            400, f"{param} has {len(given)} items, expected at most {most}", param=param
        )
    system: list[str] = []
    roles: list[str] = []
    texts: list[list[str]] = []  # of each message: the texts that it is joined of
    parts = _Parts(most * PARTS)
    for number, item in enumerate(given):
        place = f"{param}[{number}]"
        message = _message(item, place, parts)
        if message is None:
            continue
        if message["role"] in ("system", "developer"):
            if roles:
                raise HttpError(
                    400, f"{place} is a {message['role']} message after others, expected it first"
                )
            system.append(message["content"])
        elif roles and roles[-1] == message["role"]:
            texts[-1].append(message["content"])
        else:
            roles.append(message["role"])
            texts.append([message["content"]])
    messages = zip(roles, map(_paragraphs, texts), strict=True)
    return Input(
        _paragraphs(system), tuple({"role": role, "content": text} for role, text in messages)
    )


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


class _Parts:
    """Counts the parts of contents, of which a request may have so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def add(self, number: int, place: str) -> None:
        self._count += number
        if self._count > self._most:
            raise HttpError(400, f"{place} has too many parts, expected {self._most} in all items")


def _message(item: Any, place: str, parts: _Parts) -> dict[str, Any] | None:
    """Returns the message of an item, or None for one without an effect."""
    if not isinstance(item, dict):
        raise HttpError(400, f"{place} is no object, expected an item", param=place)
    kind = item.get("type") or "message"
    if kind == "reasoning":  # templates leave earlier reasoning out
        return None
    if kind != "message":
        raise HttpError(400, f"{place}.type is {str(kind)[:50]!r}, expected 'message'", param=place)
    for name in item.keys() - {"type", "role", "content", "id", "status", "phase"}:
        raise HttpError(400, f"{place}.{name[:50]} is not supported", param=place)
    role = item.get("role")
    if role not in _ROLES:
        raise HttpError(
            400, f"{place}.role is {str(role)[:50]!r}, expected one of {', '.join(_ROLES)}"
        )
    return {"role": role, "content": _text(item.get("content"), place, parts)}


def _text(content: Any, place: str, parts: _Parts) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HttpError(400, f"{place}.content is neither a text nor a list", param=place)
    parts.add(len(content), place)
    texts: list[str] = []
    for number, part in enumerate(content):
        here = f"{place}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise HttpError(400, f"{here}.type is {str(kind)[:50]!r}, expected a text", param=here)
        if not isinstance(part.get("text"), str):
            raise HttpError(400, f"{here}.text is no text", param=here)
        texts.append(part["text"])
    return "".join(texts)


# --- turns as items --------------------------------------------------------------------------


def of_turns(session_id: str, turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """Returns the items of a conversation, the oldest first."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        if turn.role == "assistant":
            found += of_reply(session_id, turn)
        else:
            found.append(
                {
                    "id": ids.of_turn("msg", session_id, turn.id),
                    "type": "message",
                    "role": turn.role,
                    "status": "completed",
                    "content": [{"type": "input_text", "text": turn.text}],
                }
            )
    return found


def of_reply(session_id: str, reply: Turn) -> list[dict[str, Any]]:
    """Returns the items of a stored reply: its reasoning, if any, and its message."""
    status = "completed" if reply.finish_reason == "stop" else "incomplete"
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        item = reasoning_item(ids.of_turn("rs", session_id, reply.id), reply.reasoning, status)
        found.append(item)
    item_id = ids.of_turn("msg", session_id, reply.id)
    return [*found, message_item(item_id, reply.text, status)]


def reasoning_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """Returns a reasoning item; `text` None: it has not begun."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }


def message_item(
    item_id: str, text: str | None, status: str, logprobs: str | None = None
) -> dict[str, Any]:
    """Returns a message item; `text` None: it has not begun. `logprobs` is a mark of `spliced`."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: str | None = None) -> dict[str, Any]:
    """Returns a part of a message's content. `logprobs` is a mark of `spliced`."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


# --- pages of lists --------------------------------------------------------------------------


def page(request: Request, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a page of a list, by the query's `limit`, `order` and `after`.

    Raises:
        HttpError: a parameter is out of range.
    """
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= 100:
        raise HttpError(400, f"limit is {limit[:20]!r}, expected 1 to 100", param="limit")
    if order not in ("asc", "desc"):
        raise HttpError(400, f"order is {order[:20]!r}, expected 'asc' or 'desc'", param="order")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after:
        at = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise HttpError(400, f"after is {after[:80]!r}, expected the id of an item")
        ordered = ordered[at + 1 :]
    found = ordered[: int(limit)]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else "",
        "last_id": found[-1]["id"] if found else "",
        "has_more": len(ordered) > len(found),
    }
