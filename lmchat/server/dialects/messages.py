"""Messages of a chat request, and what the engine gets for them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmchat.aio.threads import shared
from lmchat.server.dialects.limits import Parts, check_variables
from lmchat.server.errors import HttpError, bounded, refusal, unsupported
from lmchat.server.http.body import Body
from lmchat.server.state import ServerState
from lmchat.store.turns import Message
from turbomind.shown import shown

Role = Literal["system", "developer", "user", "assistant", "tool"]

_RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "now", "strftime_now")


class ChatMessage(Body):
    """One message. Fields that the server's replies have may be sent back."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations"})
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],)}

    role: Role
    content: Any = Field(None, description="A text, or a list of parts of the type 'text'.")
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")

    def plain(self, at: int, parts: Parts) -> Message:
        """Returns the message as the engine takes it.

        Args:
            at: its index, for errors.
            parts: counts the parts of its content.

        Raises:
            HttpError: the content has parts that are no text, or is missing.
        """
        field = f"messages[{at}].content"
        text = text_of(self.content, field, parts, self.role == "assistant")
        found: Message = {"role": self.role, "content": text}
        thought = self.reasoning_content or self.reasoning
        if thought and self.role != "assistant":
            raise refusal(
                f"messages[{at}].reasoning_content", "set", "it in an assistant message only"
            )
        for name, value in (
            ("reasoning_content", thought),
            ("name", self.name),
            ("tool_call_id", self.tool_call_id),
        ):
            if value:
                found[name] = value
        return found


Messages = Annotated[list[ChatMessage], Field(max_length=1 << 14, fail_fast=True)]
"""The messages of a request. The server's limit is checked afterwards; here the work for a wrong
list is bounded, of whose messages each would be an error of its own."""


def text_of(content: Any, field: str, parts: Parts, may_be_missing: bool = False) -> str:
    """Returns the text of a message's content: a string, or text parts joined by newlines.

    Args:
        content: the content.
        field: its name, for errors.
        parts: counts its parts.
        may_be_missing: whether None is an empty text.

    Raises:
        HttpError: it is something else, such as an image, or the request has too many parts.
    """
    if isinstance(content, str):
        return content
    if content is None and may_be_missing:
        return ""
    if content is None:
        raise HttpError(400, f"{field} is missing", param=field, code="missing_field")
    if not isinstance(content, list):
        raise refusal(field, shown(content), "a string or a list of text parts")
    parts.add(content, field)
    return "\n".join(_part(part, f"{field}[{i}]") for i, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        seen = bounded(shown(kind if isinstance(part, dict) else part), 100)
        raise HttpError(
            400,
            f"{field}.type is {seen}, expected 'text': this server takes text only",
            param=f"{field}.type",
            code="unsupported_field",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise refusal(f"{field}.text", shown(text), "a string")
    return text


async def plain_messages(messages: list[ChatMessage], state: ServerState) -> list[Message]:
    """Returns the messages as the engine takes them. The role "developer" is "system" for a chat
    template that does not have it.

    Raises:
        HttpError: there are none or too many, or one is refused.
    """
    most = state.limits.messages
    if not 1 <= len(messages) <= most:
        raise refusal("messages", f"{len(messages)} messages", f"1 to {most}")
    parts = Parts(most)
    found = [message.plain(i, parts) for i, message in enumerate(messages)]
    asked = [message for message in found if message["role"] == "developer"]
    # The first use renders the template some times.
    if asked and not (await shared.run(lambda: state.engine.template_info)).developer:
        for message in asked:
            message["role"] = "system"
    return found


def template_variables(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the variables that `chat_template_kwargs` sets.

    Raises:
        HttpError: one has a name that the server sets itself, or they are too many.
    """
    for name in given or ():
        if name in _RESERVED:
            raise unsupported(f"chat_template_kwargs.{name}", "the server sets this variable")
    check_variables(given, "chat_template_kwargs")
    return given
