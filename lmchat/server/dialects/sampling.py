"""Fields of a request that decide how tokens are sampled, and their settings here.

The names are OpenAI's and vLLM's, the ranges are OpenAI's where it has the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lmchat.generation.settings import ROWS, StatelessSettings
from lmchat.server.config import Limits
from lmchat.server.dialects.limits import check_limits
from lmchat.server.errors import refusal
from lmchat.server.http.body import Body, JsonRoute
from turbomind.settings import MAX_INT, MAX_SEED
from turbomind.shown import shown

LEAST_TOP_P = 1e-6  # `top_p` 0 is the most likely token alone

_SEEDS = (-(1 << 63), MAX_SEED)


FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "logprobs": "top_logprobs",
    "template_variables": "chat_template_kwargs",
    "system": "messages",
    "text": "messages",
}
"""The fields of arguments and settings that have other names in Python."""


class OpenAIRoute(JsonRoute):
    """A route whose refusals have OpenAI's names."""

    FIELDS: ClassVar[Mapping[str, str]] = FIELDS


class StreamOptions(BaseModel):
    """What a stream has beside the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("continuous_usage_stats") is False:
            return {k: v for k, v in given.items() if k != "continuous_usage_stats"}
        return given


def in_words(name: str, expected: str = "") -> WrapValidator:
    """Returns a validator of a field whose refusals have the words of a setting's row.

    Args:
        name: the setting.
        expected: what the field may be, where its range is another than the setting's.
    """
    words = expected or ROWS[name].expected

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            # An entry of a list has its place, and too many of them are of the right kind.
            if any(one["loc"] or one["type"] == "too_long" for one in error.errors()):
                raise
            raise PydanticCustomError("setting", "{expected}", {"expected": words}) from error

    return WrapValidator(check)


class SamplingFields(Body):
    """The fields of all dialects that decide how tokens are sampled; `sampling()` returns what they
    mean. The names are OpenAI's and vLLM's, the ranges OpenAI's where it has the field.
    """

    temperature: Annotated[
        Annotated[float, Field(ge=0, le=2)] | None, in_words("temperature", "a number from 0 to 2")
    ] = Field(None, description="Default: that of the model's generation_config.json.")
    top_p: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None, in_words("top_p", "a number from 0 to 1")
    ] = None
    top_k: Annotated[
        Annotated[int, Field(ge=-1, lt=1 << 31)] | None,
        in_words("top_k", f"an integer from -1 to {MAX_INT}"),
    ] = Field(None, description="0 or -1: all tokens.")
    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, in_words("min_p")] = None
    presence_penalty: Annotated[
        Annotated[float, Field(ge=-2, le=2)] | None,
        in_words("presence_penalty", "a number from -2 to 2"),
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Field(ge=-2, le=2)] | None,
        in_words("frequency_penalty", "a number from -2 to 2"),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Field(gt=0, le=100)] | None,
        in_words("repetition_penalty", "a number above 0, at most 100"),
    ] = None
    logit_bias: Any = Field(
        None, description="Added to logits, by token id. Numbers from -100 to 100."
    )
    seed: Annotated[
        Annotated[int, Field(ge=_SEEDS[0], le=_SEEDS[1])] | None,
        in_words("seed", f"an integer from {_SEEDS[0]} to {_SEEDS[1]}"),
    ] = None
    stop: Any = Field(
        None, description="A text or a list of texts that end the reply and are cut off."
    )
    stop_token_ids: Annotated[
        Annotated[
            list[Annotated[int, Field(ge=0, lt=1 << 31)]],
            Field(max_length=1 << 14, fail_fast=True),
        ]
        | None,
        in_words("stop_token_ids"),
    ] = None
    ignore_eos: Annotated[bool | None, in_words("ignore_eos")] = None
    min_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MAX_INT)] | None, in_words("min_new_tokens")
    ] = None

    def sampling(self) -> StatelessSettings:
        """Returns the settings that the fields mean; None where they are not given.

        Raises:
            HttpError: a value of `logit_bias` or `stop` is wrong.
        """
        return {
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self._biases(),
            # -1 is vLLM's spelling of none.
            "seed": None if self.seed in (None, -1) else (self.seed or 0) % (1 << 64),
            "stop_strings": stop_strings(self.stop),
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
        }

    def _biases(self) -> dict[int, float] | None:
        given = self.logit_bias
        if given is None:
            return None
        if not isinstance(given, dict):
            raise refusal("logit_bias", shown(given), ROWS["logit_bias"].expected)
        found: dict[int, float] = {}
        for key, bias in given.items():
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not is_number or not -100 <= bias <= 100:
                raise refusal(f"logit_bias.{key:.20}", shown(bias), "a number from -100 to 100")
            if not (key.isascii() and key.isdigit() and len(key) < 11):
                raise refusal(f"logit_bias.{key:.20}", shown(bias), "a token id as its key")
            found[int(key)] = bias
        return found


class SamplingBody(SamplingFields):
    """The fields that chat and completions share. `settings()` returns what they mean.

    Fields that change nothing are ignored, and others are refused unless they have their default
    value.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "service_tier", "session_id", "store", "user",
        }
    )  # fmt: skip
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1, 1.0),
        "priority": (0,),
        "prompt_logprobs": (0,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
    }

    model: str | None = Field(None, description="The model's name in /v1/models.")
    n: Annotated[Annotated[int, Field(ge=1)] | None, in_words("n")] = Field(
        None, description="Number of choices."
    )
    max_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_INT)] | None, in_words("max_new_tokens")
    ] = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = Field(
        None, description="Whether a stream reports the progress of the prompt (llama.cpp)."
    )
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = Field(
        None, description="The end of the reply's id."
    )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """Number of choices."""
        return self.n or 1

    def fields(self) -> Mapping[str, str]:
        """Returns the fields of settings that have other names in Python."""
        return FIELDS

    def longest(self) -> int | None:
        """Returns the longest reply, in tokens; None: the model's default."""
        return self.max_tokens

    def logprobs_wanted(self) -> int | None:
        """Returns the number of alternatives per token; None: no log-probabilities at all."""
        raise NotImplementedError

    def settings(self, limits: Limits) -> StatelessSettings:
        """Returns the settings of the generation.

        Raises:
            HttpError: a field is above its limit.
        """
        found: StatelessSettings = {
            **self.sampling(),
            "max_new_tokens": self.longest(),
            "logprobs": self.logprobs_wanted(),
            "n": self.n if self.choices > 1 else None,
            "skip_special_tokens": False if self.skip_special_tokens is False else None,
        }
        check_limits(found, limits, self.fields())
        return found


def stop_strings(stop: Any) -> list[str] | None:
    """Returns the stop strings of a text or list; None without any.

    Raises:
        HttpError: it is neither, or one is empty.
    """
    texts = [stop] if isinstance(stop, str) else stop
    if texts is None or texts == []:
        return None
    if not isinstance(texts, list):
        raise refusal("stop", shown(stop), "a string or a list of strings")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            field = "stop" if isinstance(stop, str) else f"stop[{i}]"
            raise refusal(field, shown(text), "a string that is not empty")
    return texts
