"""Bodies of requests for sessions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from lmchat.server.body import Body
from lmchat.server.config import Limits
from lmchat.server.inference.prompt_settings import check_limits

Metadata = Annotated[dict[str, str], Field(max_length=16)]


class Properties(Body):
    """What can be set of a session."""

    name: str | None = None
    title: str | None = None
    tags: list[str] | None = None
    metadata: Metadata | None = None
    settings: dict[str, Any] | None = None
    template_variables: dict[str, Any] | None = None
    history: str | None = None
    overflow: str | None = None
    pinned: bool | None = None
    system: str | None = None

    def check(self, limits: Limits) -> None:
        """Refuses settings above the server's limits."""
        check_limits(self.settings or {}, limits)


class CreateBody(Properties):
    """The body of `POST /v1/sessions`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"name": "trip", "settings": {"temperature": 0.7}}]},
    )


class GenerateBody(Body):
    """What all requests for a reply have."""

    settings: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    detach: bool = False
    token_ids: bool = False

    def check(self, limits: Limits) -> None:
        """Refuses settings above the server's limits."""
        check_limits(self.settings, limits)


class TurnBody(GenerateBody):
    """The body of `POST /v1/sessions/ID/turns`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"text": "What is a page table?", "settings": {"max_new_tokens": 64}}]
        },
    )

    text: str
    template_variables: dict[str, Any] | None = None


class EditBody(GenerateBody):
    """The body of `POST /v1/sessions/ID/edit`."""

    turn: int
    text: str


class SwitchBody(Body):
    """The body of `POST /v1/sessions/ID/switch`."""

    turn: int
    index: int


class ForkBody(Body):
    """The body of `POST /v1/sessions/ID/fork`."""

    name: str | None = None
    at: int | None = None
    after: int | None = None


class PinBody(Body):
    """The body of `POST /v1/sessions/ID/pin`."""

    pinned: bool = True
