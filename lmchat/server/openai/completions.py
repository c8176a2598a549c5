"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi import Body as BodyOf
from pydantic import Field
from starlette.responses import Response

from lmchat.aio.threads import shared
from lmchat.engine import ChatEngine
from lmchat.generation.reply import Reply
from lmchat.generation.settings import DefaultLimit
from lmchat.server.config import Limits
from lmchat.server.dialects.models import check_model
from lmchat.server.dialects.results import (
    TokenNames,
    all_choices,
    finish_reason,
    new_id,
)
from lmchat.server.dialects.sampling import FIELDS, OpenAIRoute, SamplingBody, in_words
from lmchat.server.errors import refusal, unsupported
from lmchat.server.openai.chunks import CompletionChunks, compact, names_of
from lmchat.server.openai.envelope import envelope_of
from lmchat.server.openai.examples import COMPLETION
from lmchat.server.openai.replying import Fields, Parts, answer, streamed, whole
from lmchat.server.state import owner_of, state_of
from turbomind.params import token_id_list
from turbomind.shown import shown


class CompletionRoute(OpenAIRoute):
    """A route of completions, which names `logprobs` as Python does."""

    FIELDS: ClassVar[Mapping[str, str]] = {**FIELDS, "logprobs": "logprobs"}


router = APIRouter(prefix="/v1", tags=["openai"], route_class=CompletionRoute)

DEFAULT_TOKENS = 16
"""Longest completion where `max_tokens` is not given, as OpenAI has it."""


class CompletionBody(SamplingBody):
    """The body of a completion."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SamplingBody.NEUTRAL,
        "echo": (False,),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
    }

    prompt: Any = Field(description="A text, a list of texts, token ids, or a list of these.")
    logprobs: Annotated[Annotated[int, Field(ge=0)] | None, in_words("logprobs")] = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether a text gets the tokenizer's own tokens. Default: true."
    )

    def fields(self) -> Mapping[str, str]:
        """Returns the fields of settings that have other names in Python."""
        return CompletionRoute.FIELDS

    def longest(self) -> int:
        """Returns the longest completion, in tokens."""
        return self.max_tokens or DefaultLimit(max(DEFAULT_TOKENS, self.min_tokens or 0))

    def logprobs_wanted(self) -> int | None:
        """Returns the number of alternatives per token; None: no log-probabilities at all."""
        return self.logprobs

    def prompts(self, limits: Limits, max_context: int, vocab: int) -> list[str | list[int]]:
        """Returns the prompts.

        Args:
            limits: the server's limits.
            max_context: largest length of a prompt, in tokens.
            vocab: size of the vocabulary.

        Raises:
            InvalidRequest: a token id is wrong.
            HttpError: there are none or too many, or one is neither a text nor token ids.
        """
        if self.best_of not in (None, self.choices):
            raise unsupported("best_of", "n choices are all that are generated")
        given = self.prompt
        is_one = isinstance(given, str) or (_is_list(given) and type(given[0]) is int)
        found = [given] if is_one else given
        if not isinstance(found, list) or not 1 <= len(found) <= limits.prompts:
            seen = f"{len(found)} prompts" if isinstance(found, list) else shown(found)
            raise refusal(
                "prompt", seen, f"a string, token ids, or a list of 1 to {limits.prompts}"
            )
        for i, prompt in enumerate(found):
            name = "prompt" if is_one else f"prompt[{i}]"
            if _is_list(prompt) and len(prompt) > max_context:
                most = f"at most {max_context}"
                raise refusal(name, f"{len(prompt)} tokens", most, "context_length_exceeded")
            if not (isinstance(prompt, str) or _is_list(prompt)) or not prompt:
                raise refusal(name, shown(prompt), "a string or token ids, not empty")
            if not isinstance(prompt, str):
                token_id_list(prompt, vocab, name)
        return found


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


@router.post("/completions")
async def completions(
    request: Request, body: Annotated[CompletionBody, BodyOf(openapi_examples=COMPLETION)]
) -> Response:
    """Continues prompts without a chat template, as OpenAI's and vLLM's route of this name."""
    state, owner = state_of(request), owner_of(request)
    check_model(state, body.model)
    settings = body.settings(state.limits)
    vocab = state.engine.sync.core.vocab_size
    prompts = body.prompts(state.limits, state.engine.max_context, vocab)
    if len(prompts) * body.choices > state.limits.prompts:
        seen = shown(body.n)
        raise refusal("n", seen, f"at most {state.limits.prompts} choices of all prompts together")
    state.engine.sync.check_capacity(owner)
    if body.add_special_tokens is False:
        prompts = await shared.run(_encoded, state.engine.sync, prompts)
    streams = [state.engine.stream(prompt, owner=owner, **settings) for prompt in prompts]
    parts = Parts(streams, body.choices)
    envelope = envelope_of(state, new_id("cmpl", body.request_id), "text_completion")
    shows_special = body.skip_special_tokens is False
    count = body.choices * len(prompts)
    names = names_of(state.engine.tokenizer, count, shows_special, body.logprobs)
    if body.stream:
        chunks = CompletionChunks(envelope, body.include_usage, names, body.logprobs or 0)
        return await streamed(
            request, parts, chunks, choices=count, progress=bool(body.return_progress)
        )
    replies = await whole(request, parts)
    choices = [
        _choice(i, reply, names[i] if names else None, body.logprobs or 0)
        for i, reply in enumerate(all_choices(replies))
    ]
    return await answer(envelope, choices, replies, in_thread=names is not None)


def _encoded(engine: ChatEngine, prompts: list[str | list[int]]) -> list[str | list[int]]:
    """Returns the prompts as token ids, without the tokenizer's own tokens."""
    found: list[str | list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            engine.tokenizer.check_fits([prompt], engine.max_context)
            prompt = engine.tokenizer.encode(prompt, add_special_tokens=False)
        found.append(prompt)
    return found


def _choice(index: int, reply: Reply, names: TokenNames | None, top: int) -> Fields:
    def logprobs() -> str:
        if names is None:
            return "null"
        return compact(names.completion(reply.token_ids, reply.logprobs, top))

    return {
        "index": index,
        "text": reply.text,
        "logprobs": logprobs,
        "finish_reason": finish_reason(reply),
    }
