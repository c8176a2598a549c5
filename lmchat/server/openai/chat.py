"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi import Body as BodyOf
from pydantic import Field
from starlette.responses import Response

from lmchat.generation.reply import Reply
from lmchat.generation.settings import StatelessSettings
from lmchat.server.dialects.messages import Messages, plain_messages, template_variables
from lmchat.server.dialects.models import check_model
from lmchat.server.dialects.results import (
    TokenNames,
    all_choices,
    finish_reason,
    new_id,
)
from lmchat.server.dialects.sampling import FIELDS, OpenAIRoute, SamplingBody, in_words
from lmchat.server.errors import refusal
from lmchat.server.http.body import name_fields
from lmchat.server.http.parameters import SESSION_HEADER, IdempotencyKey, SessionName
from lmchat.server.openai.chunks import ChatChunks, compact, names_of
from lmchat.server.openai.durable import EntryStream, session_turn
from lmchat.server.openai.envelope import envelope_of
from lmchat.server.openai.examples import CHAT
from lmchat.server.openai.replying import Fields, Parts, Stream, answer, streamed, whole
from lmchat.server.retries.receipt import Receipt
from lmchat.server.state import owner_of, state_of
from turbomind.shown import shown

router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)


class ChatFields(SamplingBody):
    """The fields of a chat completion that are not those of messages."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingBody.NEUTRAL,
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
    }

    max_completion_tokens: Annotated[
        Annotated[int, Field(ge=1, lt=1 << 31)] | None, in_words("max_new_tokens")
    ] = Field(None, description="Longest reply, in tokens. It comes before max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[Annotated[int, Field(ge=0)] | None, in_words("logprobs")] = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Whether the reply continues the last message, an assistant's."
    )

    def fields(self) -> Mapping[str, str]:
        """Returns the fields of settings that have other names in Python."""
        if self.max_completion_tokens is None:
            return FIELDS
        return {**FIELDS, "max_new_tokens": "max_completion_tokens"}

    def longest(self) -> int | None:
        """Returns the longest reply, in tokens; None: the model's default."""
        return self.max_completion_tokens or self.max_tokens

    def logprobs_wanted(self) -> int | None:
        """Returns the number of alternatives per token; None: no log-probabilities at all."""
        top = self.top_logprobs or 0
        if top and not self.logprobs:
            raise refusal("top_logprobs", shown(top), "logprobs to be true with it")
        return top if self.logprobs else None

    def continues(self) -> bool:
        """Returns whether the reply continues the last message.

        Raises:
            HttpError: `add_generation_prompt` does not fit.
        """
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is continues:
            raise refusal(
                "add_generation_prompt",
                shown(continues).lower(),
                f"{str(not continues).lower()} while continue_final_message is "
                f"{str(continues).lower()}",
            )
        return continues


class ChatBody(ChatFields):
    """The body of a chat completion."""

    messages: Messages
    session: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Id or name of a durable session, which is created if it is missing."
    )


@router.post("/chat/completions")
async def chat_completions(
    request: Request,
    body: Annotated[ChatBody, BodyOf(openapi_examples=CHAT)],
    session_name: SessionName = None,
    key: IdempotencyKey = None,
) -> Response:
    """Answers a conversation, as OpenAI's and vLLM's route of this name. With a session, an
    `Idempotency-Key` names its turn."""
    state, owner = state_of(request), owner_of(request)
    name_fields(request, body.fields())
    check_model(state, body.model)
    settings = body.settings(state.limits)
    messages = await plain_messages(body.messages, state)
    variables = template_variables(body.chat_template_kwargs)
    continues = body.continues()
    session = body.session or session_name
    if session is not None:
        entry = await session_turn(
            state, owner, session, messages, continues, variables, settings, key
        )
        assert entry.session is not None
        headers = {SESSION_HEADER: entry.session.id}
        try:
            response = await _answer(request, body, settings, EntryStream(entry), headers)
            return Receipt(response, entry)
        except BaseException:
            entry.leave()
            raise
    state.engine.sync.check_capacity(owner)
    stream = state.engine.stream_chat(
        messages,
        owner=owner,
        template_variables=variables,
        continue_final_message=continues,
        **settings,
    )
    return await _answer(request, body, settings, stream, {})


async def _answer(
    request: Request,
    body: ChatBody,
    settings: StatelessSettings,
    stream: Stream,
    headers: dict[str, str],
) -> Response:
    state = state_of(request)
    parts = Parts([stream], body.choices)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = envelope_of(state, new_id("chatcmpl", body.request_id), kind)
    names = names_of(
        state.engine.tokenizer,
        body.choices,
        body.skip_special_tokens is False,
        settings.get("logprobs"),
    )
    if body.stream:
        chunks = ChatChunks(envelope, body.include_usage, names)
        return await streamed(
            request,
            parts,
            chunks,
            choices=body.choices,
            progress=bool(body.return_progress),
            headers=headers,
        )
    replies = await whole(request, parts)
    choices = [
        chat_choice(i, reply, names[i] if names else None)
        for i, reply in enumerate(all_choices(replies))
    ]
    return await answer(envelope, choices, replies, headers, in_thread=names is not None)


def chat_choice(index: int, reply: Reply, names: TokenNames | None = None) -> Fields:
    """Returns the fields of one choice of a chat completion, as `answer()` takes them.

    Args:
        index: its index.
        reply: the choice.
        names: spells its tokens; None: without log-probabilities.
    """
    message = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning

    def logprobs() -> str:
        if names is None or len(reply.logprobs) < len(reply.token_ids):  # a stored reply has none
            return "null"
        entries = zip(reply.token_ids, reply.logprobs, strict=True)
        found = (compact(names.chat([token], [one])[0]) for token, one in entries)
        return f'{{"content":[{",".join(found)}],"refusal":null}}'

    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(reply),
    }
