"""Bodies of requests for sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS, STATELESS_SETTINGS
from lmchat.server.config import Limits
from lmchat.server.dialects.limits import check_limits, check_variables
from lmchat.server.http.body import Body, JsonRoute, example
from turbomind.params import refuse_unknown, renamed

Metadata = Annotated[dict[str, str], Field(max_length=16)]


def _checked(variables: dict[str, Any]) -> dict[str, Any]:
    check_variables(variables)
    return variables


Variables = Annotated[dict[str, Any], AfterValidator(_checked)]
"""Variables for the chat template, a bounded number."""

MAX_LINGER = 300
"""Longest time that a reply continues without a reader, in seconds."""

MOST_MESSAGES = 1024
Messages = Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)]


FIELDS = {name: f"settings.{name}" for name in STATELESS_SETTINGS}
"""The places of settings in a body."""


class SessionRoute(JsonRoute):
    """A route whose refusals name a setting as `settings.NAME`."""

    FIELDS: ClassVar[Mapping[str, str]] = FIELDS


def check_settings(settings: Mapping[str, Any], limits: Limits, *, stateless: bool = False) -> None:
    """Refuses settings that there are not, and those above the server's limits.

    Args:
        settings: the settings of a body.
        limits: the server's limits.
        stateless: whether they are for a generation without a session.
    """
    unknown = [name for name in settings if name not in STATELESS_SETTINGS]
    try:
        refuse_unknown("setting", unknown, STATELESS_SETTINGS if stateless else SETTINGS)
    except InvalidRequest as error:
        raise renamed(error, lambda name: f"settings.{name}") from error
    check_limits(settings, limits, FIELDS)


class Properties(Body):
    """What can be set of a session."""

    name: str | None = None
    title: str | None = None
    tags: list[str] | None = None
    metadata: Metadata | None = None
    settings: dict[str, Any] | None = None
    template_variables: Variables | None = None
    history: str | None = None
    overflow: str | None = None
    pinned: bool | None = None
    system: str | None = None

    def check(self, limits: Limits) -> None:
        """Refuses settings that there are not, and those above the server's limits."""
        check_settings(self.settings or {}, limits)


class CreateBody(Properties):
    """The body of `POST /v1/sessions`. With `open` an existing session of the name is opened."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"name": "trip", "settings": {"temperature": 0.7}}]},
    )

    open: bool = False


class GenerateBody(Body):
    """What all requests for a reply have."""

    settings: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    detach: bool = False
    linger: Annotated[int | float, Field(ge=0, le=MAX_LINGER)] | None = None
    token_ids: bool = False
    metadata: dict[str, Any] | None = None

    def check(self, limits: Limits) -> None:
        """Refuses settings that there are not, and those above the server's limits."""
        check_settings(self.settings, limits)


class Placed(Body):
    """Where a message stands: after which reply and messages, and under which system prompt."""

    template_variables: Variables | None = None
    after: int | None = None
    before: Messages = Field(default_factory=list)
    system: str | None = None


class TurnBody(GenerateBody, Placed):
    """The body of `POST /v1/sessions/ID/turns`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"text": "What is a page table?", "settings": {"max_new_tokens": 64}}]
        },
    )

    text: str
    overflow: str | None = None
    keep_question: bool = True


class EditBody(GenerateBody):
    """The body of `POST /v1/sessions/ID/edit`."""

    turn: int
    text: str


class StopBody(Body):
    """The body of `POST /v1/sessions/ID/stop`."""

    model_config = example(turn=2)

    turn: int | None = None


class SwitchBody(Body):
    """The body of `POST /v1/sessions/ID/switch`."""

    turn: int
    index: int


class ForkBody(Body):
    """The body of `POST /v1/sessions/ID/fork`."""

    name: str | None = None
    at: int | None = None
    after: int | None = None
    tags: list[str] | None = None


class AppendBody(Body):
    """The body of `POST /v1/sessions/ID/append`."""

    model_config = example(
        messages=[{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]
    )

    messages: Messages
    system: str | None = None


class EditReplyBody(Body):
    """The body of `POST /v1/sessions/ID/edit_reply`."""

    model_config = example(turn=0, text="Hi.")

    turn: int
    text: str


class AnnotateBody(Body):
    """The body of `POST /v1/sessions/ID/annotate`."""

    model_config = example(turn=2, metadata={"rating": 5})

    turn: int
    metadata: dict[str, Any]


class CountBody(Placed):
    """The body of `POST /v1/sessions/ID/count_tokens`."""

    model_config = example(text="What is a page table?")

    text: str


class PinBody(Body):
    """The body of `POST /v1/sessions/ID/pin`."""

    pinned: bool = True
