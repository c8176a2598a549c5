"""Messages that a client sends: their check, and the replies of this process among them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from lmchat.conversations.known_replies import KnownReplies
from lmchat.store.turns import Message
from lmchat.text.conversation import Conversation
from lmchat.text.reasoning import REASONING_FIELDS, ReasoningFormat
from turbomind.params import wrong

_ROLE = re.compile(r"[\w .-]+")
_DEEPEST = 32  # nested values in a message


@dataclass(frozen=True)
class Recognized:
    """A conversation with its known replies. `past` is the digest of the messages before the reply
    to come, and `now` the time that its prompt shows."""

    conversation: Conversation
    past: bytes
    now: datetime


def check_messages(
    messages: Iterable[Mapping[str, Any]], *, continued: bool = False, prompts: bool = True
) -> list[Message]:
    """Returns a copy of messages.

    Args:
        messages: the messages, each with "role" and "content".
        continued: whether the last one is a reply that goes on.
        prompts: whether a reply follows.

    Raises:
        InvalidRequest: there are none, one is no message, or a reply is last that does not go on.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise wrong("messages", messages, "a list of messages")
    found = [_message(i, message) for i, message in enumerate(messages)]
    if not found:
        raise wrong("messages", found, "at least one message", seen="empty")
    is_reply, last = found[-1]["role"] == "assistant", f"messages[{len(found) - 1}]"
    if continued and not is_reply:
        raise wrong(f"{last}.role", found[-1]["role"], "'assistant' with continue_final_message")
    if continued and not found[-1]["content"]:
        raise wrong(f"{last}.content", "", "a string to continue")
    if is_reply and prompts and not continued:
        expected = "another role, or continue_final_message to let the reply continue it"
        raise wrong(f"{last}.role", "assistant", expected)
    return found


def _message(i: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise wrong(f"messages[{i}]", message, "a mapping with 'role' and 'content'")
    found = {key: _plain(f"messages[{i}]", value) for key, value in message.items()}
    if not isinstance(found.get("role"), str) or not all(isinstance(key, str) for key in found):
        raise wrong(f"messages[{i}].role", found.get("role"), "a string")
    if not _ROLE.fullmatch(found["role"]):  # templates write it between the signs of a mark
        expected = "letters, digits, '_', '-', '.' and spaces"
        raise wrong(f"messages[{i}].role", found["role"], expected)
    content = found.setdefault("content", None)
    if content is None and len(found) > 2 and found["role"] == "assistant":
        found["content"] = ""  # of a reply that calls a tool
    elif not isinstance(content, str):
        raise wrong(f"messages[{i}].content", content, "a string")
    for name in REASONING_FIELDS:
        if found.get(name) is None:
            found.pop(name, None)
        elif not isinstance(found[name], str):
            raise wrong(f"messages[{i}].{name}", found[name], "a string")
    return found


def _plain(where: str, value: Any, depth: int = 0) -> Any:
    """Returns a copy of a value as JSON has it."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if depth < _DEEPEST:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: _plain(where, part, depth + 1) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(where, part, depth + 1) for part in value]
    expected = f"strings, numbers, lists and mappings, nested up to {_DEEPEST} deep"
    raise wrong(where, value, expected, seen=f"a mapping with a {type(value).__name__}")


def recognized(
    conversation: Conversation,
    replies: KnownReplies | None,
    owner: str,
    reasoning: ReasoningFormat | None,
    now: datetime,
) -> Recognized:
    """Returns the conversation with the replies in it that are known, and the time that its first
    prompt showed, so that a new day changes no prompt.

    Args:
        conversation: the conversation.
        replies: the known replies, if any are kept.
        owner: the owner.
        reasoning: the model's reasoning format, which a client may have put into a reply's text.
        now: the time, for a new conversation.
    """
    past = hashlib.blake2b(_encoded(sorted(conversation.variables.items())), digest_size=16)
    known = list(conversation.known)
    messages: Sequence[Message] = conversation.messages
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            past.update(_encoded(message))
            continue
        text, thought = _texts(message, reasoning)
        found = replies.find(owner, past.digest, text, thought) if replies is not None else None
        if found is not None:
            known[i] = found.turn
            if found.past == past.digest():
                now = found.now
        if i < len(messages) - 1 or not conversation.continued:
            past.update(_encoded(["assistant", text.strip()]))
    filled = replace(conversation, known=known, now=now)
    return Recognized(filled, past.digest(), now)


def _texts(message: Message, form: ReasoningFormat | None) -> tuple[str, str | None]:
    """Returns a reply's text, and its reasoning if the message has it."""
    text: str = message["content"]
    given = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if given is None and form is not None and form.close in text:
        given, _, text = text.rpartition(form.close)
        given = given.strip().removeprefix(form.open)
    return text, given


def _encoded(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")
