"""The body of a request for a response, and the settings in it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from lmchat.server.config import Limits
from lmchat.server.dialects import sampling
from lmchat.server.dialects.limits import check_limits
from lmchat.server.dialects.messages import template_variables
from lmchat.server.dialects.sampling import SamplingFields, in_words
from lmchat.server.errors import HttpError, in_field, refusal
from lmchat.server.http.body import Body
from lmchat.server.responses import ids
from lmchat.store.protocol import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE
from turbomind.settings import MAX_INT
from turbomind.shown import shown

_LOGPROBS = "message.output_text.logprobs"
FIELDS = {
    **sampling.FIELDS,
    "max_new_tokens": "max_output_tokens",
    "system": "instructions",
    "text": "input",
    "messages": "input",
    "before": "input",
    "overflow": "truncation",
}
"""The fields of arguments and settings that have other names in Python."""
_HARMLESS = frozenset(
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Values of `include` for outputs that no response has."""

Metadata = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),
]


def with_example(example: dict[str, Any]) -> ConfigDict:
    """Returns the configuration of a body with an example for the OpenAPI page."""
    return ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [example]})


class PromptBody(Body):
    """The fields that make a prompt."""

    model_config = with_example({"input": "What is a page table?"})

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "max_tool_calls", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
            "prompt_cache_retention", "safety_identifier", "service_tier", "user",
        }
    )  # fmt: skip
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("auto", "none"),
        "text": (
            {},
            {"format": {"type": "text"}},
            {"format": {"type": "text"}, "verbosity": "medium"},
            {"verbosity": "medium"},
        ),
        "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
        "context_management": ([],),
        "stream_options": ({}, {"include_obfuscation": False}),
    }

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    truncation: str = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation_id(self) -> str | None:
        """Returns the id of the conversation's session, or None without a conversation.

        Raises:
            HttpError: it is no id, or a previous response is named too.
        """
        given = self.conversation
        if given is None:
            return None
        if self.previous_response_id is not None:
            raise HttpError(
                400,
                "both conversation and previous_response_id have values, expected one of them",
                param="conversation",
            )
        found = given.get("id") if isinstance(given, dict) else given
        if not isinstance(found, str):
            raise refusal("conversation", shown(given), "an id, or an object with it")
        with in_field("conversation"):
            return ids.session_of(found)


class ResponseBody(PromptBody, SamplingFields):
    """The body of `POST /v1/responses`."""

    model_config = with_example({"input": "What is a page table?", "max_output_tokens": 64})

    background: bool = False
    include: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    max_output_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_INT)] | None, in_words("max_new_tokens")
    ] = None
    metadata: Metadata | None = None
    store: bool = True
    stream: bool = False
    top_logprobs: Annotated[Annotated[int, Field(ge=0)] | None, in_words("logprobs")] = None

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are part of the output."""
        return _LOGPROBS in self.include or bool(self.top_logprobs)

    def check(self, limits: Limits) -> None:
        """Refuses combinations and values that no response can have.

        Raises:
            HttpError: names the field.
        """
        for one in self.include:
            if one != _LOGPROBS and one not in _HARMLESS:
                raise refusal("include", shown(self.include), f"{_LOGPROBS!r} at most")
        if self.background and not self.store:
            raise refusal("store", "false", "true with background")
        if self.conversation is not None and not self.store:
            raise refusal("store", "false", "true with a conversation")
        if self.truncation not in ("auto", "disabled"):
            raise refusal("truncation", shown(self.truncation), "'disabled' or 'auto'")
        if self.truncation == "auto" and not self.store:
            raise refusal("truncation", "'auto'", "'disabled' with store false")
        check_limits(self.settings(), limits, FIELDS)
        template_variables(self.chat_template_kwargs)

    def settings(self) -> dict[str, Any]:
        """Returns the generation settings, without those that are not given.

        Raises:
            HttpError: a value of `logit_bias` or `stop` is wrong.
        """
        found = {
            **self.sampling(),
            "max_new_tokens": self.max_output_tokens,
            "logprobs": (self.top_logprobs or 0) if self.has_logprobs else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def compared(self) -> dict[str, Any]:
        """Returns what two equal requests have in common: what the model gets and what changes the
        reply."""
        return {
            "conversation": self.conversation_id(),
            "settings": self.settings(),
            **{
                name: getattr(self, name)
                for name in ("input", "instructions", "previous_response_id", "truncation",
                             "chat_template_kwargs", "background")
            },
        }  # fmt: skip

    def echo(self) -> dict[str, Any]:
        """Returns the fields that the response repeats and that are stored with its turn."""
        found = {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "metadata": self.metadata,
            "background": self.background or None,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_logprobs": self.top_logprobs,
            "truncation": None if self.truncation == "disabled" else self.truncation,
        }
        return {name: value for name, value in found.items() if value is not None}
