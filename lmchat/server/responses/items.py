"""Items: the input of a response as messages, and turns as items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from lmchat.server.dialects.limits import Parts
from lmchat.server.errors import HttpError, refusal, unsupported
from lmchat.server.responses import ids
from lmchat.sessions.appended import Said, said_in, texts_of
from lmchat.store.turns import Turn
from turbomind.shown import shown

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")


@dataclass(frozen=True)
class Input:
    """The input of a response.

    Attributes:
        system: text of system and developer messages before the first other one; empty without.
        messages: the other messages; neighbours of one role are joined by an empty line, and
            `parts` has their lengths.
    """

    system: str
    messages: tuple[dict[str, Any], ...]

    def check_question(self) -> None:
        """Raises HttpError unless the last message is a user's."""
        if not self.messages or self.messages[-1]["role"] != "user":
            role = self.messages[-1]["role"] if self.messages else None
            raise refusal("input", f"a list that ends with {role!r}", "a user's message at its end")


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
        raise refusal(param, f"{len(given)} items", f"at most {most}")
    system: list[str] = []
    roles: list[str] = []
    texts: list[list[str]] = []  # of each message: the texts that it is joined of
    parts = Parts(most)
    for number, item in enumerate(given):
        place = f"{param}[{number}]"
        message = _message(item, place, parts)
        if message is None:
            continue
        if message["role"] in ("system", "developer"):
            if roles:
                raise refusal(f"{place}.role", f"{message['role']!r} after others", "it first")
            system.append(message["content"])
        elif roles and roles[-1] == message["role"]:
            texts[-1].append(message["content"])
        else:
            roles.append(message["role"])
            texts.append([message["content"]])
    said = map(message_of, roles, map(Said.of, texts))
    return Input(Said.of(system).text, tuple(said))


def message_of(role: str, said: Said) -> dict[str, Any]:
    """Returns what a role says as a message of `Session.append()`."""
    return {"role": role, "content": said.text, **said.metadata}


def _message(item: Any, place: str, parts: Parts) -> dict[str, Any] | None:
    """Returns the message of an item, or None for one without an effect."""
    if not isinstance(item, dict):
        raise refusal(place, shown(item), "an item")
    kind = item.get("type") or "message"
    if kind == "reasoning":  # templates leave earlier reasoning out
        return None
    if kind != "message":
        raise refusal(f"{place}.type", shown(kind), "'message'")
    for name in item.keys() - {"type", "role", "content", "id", "status", "phase"}:
        raise unsupported(f"{place}.{name[:50]}")
    role = item.get("role")
    if role not in _ROLES:
        raise refusal(f"{place}.role", shown(role), f"one of {', '.join(_ROLES)}")
    return {"role": role, "content": _text(item.get("content"), place, parts)}


def _text(content: Any, place: str, parts: Parts) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refusal(f"{place}.content", shown(content), "a string or a list of parts")
    parts.add(content, f"{place}.content")
    texts: list[str] = []
    for number, part in enumerate(content):
        here = f"{place}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise refusal(f"{here}.type", shown(kind), "'input_text'")
        if not isinstance(part.get("text"), str):
            raise refusal(f"{here}.text", shown(part.get("text")), "a string")
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
            item_id = ids.of_turn("msg", session_id, turn.id)
            found += of_input(item_id, turn.role, said_in(turn))
    return found


def of_input(item_id: str, role: str, said: Said) -> list[dict[str, Any]]:
    """Returns the messages that a text of a user or of the system is joined of."""
    return [
        {
            "id": numbered,
            "type": "message",
            "role": role,
            "status": "completed",
            "content": [{"type": "input_text", "text": text}],
        }
        for numbered, text in _numbered(item_id, said)
    ]


def _numbered(item_id: str, said: Said) -> list[tuple[str, str]]:
    """Returns ids and texts of the messages that a text is joined of."""
    texts = texts_of(said.text, said.parts) or [said.text]
    return [(f"{item_id}_{i}" if i else item_id, text) for i, text in enumerate(texts)]


def of_reply(session_id: str, reply: Turn) -> list[dict[str, Any]]:
    """Returns the items of a stored reply: its reasoning, if any, and its message."""
    status = "completed" if reply.finish_reason == "stop" else "incomplete"
    found: list[dict[str, Any]] = []
    if reply.reasoning:
        item = reasoning_item(ids.of_turn("rs", session_id, reply.id), reply.reasoning, status)
        found.append(item)
    item_id = ids.of_turn("msg", session_id, reply.id)
    messages = _numbered(item_id, said_in(reply))
    return [*found, *(message_item(numbered, text, status) for numbered, text in messages)]


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


class Page(BaseModel):
    """The query of a request for a page of a list."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def page(query: Page, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a page of a list whose oldest item is the first one.

    Raises:
        HttpError: it is to follow an item that the list lacks.
    """
    order, after = query.order, query.after
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after:
        at = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise HttpError(
                400, f"after is {after[:80]!r}, expected the id of an item", param="after"
            )
        ordered = ordered[at + 1 :]
    found = ordered[: query.limit]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else "",
        "last_id": found[-1]["id"] if found else "",
        "has_more": len(ordered) > len(found),
    }
