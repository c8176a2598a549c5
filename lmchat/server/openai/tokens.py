"""`/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi import Body as BodyOf
from pydantic import Field
from starlette.responses import JSONResponse

from lmchat.aio.threads import shared
from lmchat.server.dialects.limits import check_counted
from lmchat.server.dialects.messages import Messages, plain_messages, template_variables
from lmchat.server.dialects.models import check_model
from lmchat.server.dialects.sampling import OpenAIRoute
from lmchat.server.errors import HttpError, refusal, unsupported
from lmchat.server.http.body import Body
from lmchat.server.http.json_answer import json_answer
from lmchat.server.openai.examples import DETOKENIZE, TOKENIZE
from lmchat.server.state import owner_of, state_of
from lmchat.text.tokenizer import Tokenizer
from turbomind.shown import shown

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)


class TokenizeBody(Body):
    """The body of `/tokenize`: a prompt, or messages."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"tools": ([],)}

    model: str | None = None
    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation.")
    add_special_tokens: bool | None = Field(
        None, description="Whether a text gets the tokenizer's own tokens. Default: true."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether the start of the next reply follows. Default: true."
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 18, fail_fast=True)
    ]


@router.post("/tokenize")
async def tokenize(
    request: Request, body: Annotated[TokenizeBody, BodyOf(openapi_examples=TOKENIZE)]
) -> JSONResponse:
    """Returns the tokens of a text, or of a conversation as the chat template renders it."""
    state = state_of(request)
    check_model(state, body.model)
    tokenizer = state.engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "expected one of prompt and messages", param="prompt")
    if body.messages is None:
        special = body.add_special_tokens is not False
        check_counted(state.limits, body.prompt)
        ids = await shared.run(tokenizer.encode, body.prompt or "", add_special_tokens=special)
    else:
        if body.add_special_tokens:
            raise unsupported("add_special_tokens", "the chat template has them")
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise refusal("add_generation_prompt", "true", "false with continue_final_message")
        messages = await plain_messages(body.messages, state)
        check_counted(state.limits, messages)
        ids = await state.engine.chat_token_ids(
            messages,
            owner=owner_of(request),
            template_variables=template_variables(body.chat_template_kwargs),
            continue_final_message=continues,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
        )
    spelled = None
    if body.return_token_strs:
        spelled = await shared.run(_spelled, tokenizer, ids)
    found = {
        "count": len(ids),
        "max_model_len": state.engine.max_context,
        "tokens": ids,
        "token_strs": spelled,
    }
    return await json_answer(found)


@router.post("/detokenize")
async def detokenize(
    request: Request, body: Annotated[DetokenizeBody, BodyOf(openapi_examples=DETOKENIZE)]
) -> JSONResponse:
    """Returns the text of some tokens, special ones spelled out."""
    state = state_of(request)
    check_model(state, body.model)
    size = state.engine.sync.core.vocab_size
    for i, token in enumerate(body.tokens):
        if token >= size:
            raise refusal(f"tokens[{i}]", shown(token), f"a token id below {size}")
    text = await shared.run(state.engine.tokenizer.raw, body.tokens)
    return await json_answer({"prompt": text})


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_bytes(i).decode(errors="replace") for i in ids]
