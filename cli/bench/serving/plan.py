"""The options of `lmchat bench serve`, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lmchat.errors import InvalidRequest

KEY_VARIABLES = ("LMCHAT_API_KEY", "OPENAI_API_KEY")
MOST_RATE = 1000.0
FIRST_SECONDS = 10.0  # of the default warm-up
TOKEN_SECONDS = 0.05  # per token of a reply, in the default warm-up of conversations


@dataclass(frozen=True)
class Plan:
    """Parameters of the load; the options of the command explain them."""

    url: str
    rates: tuple[float, ...] = (1.0,)
    duration: float = 60.0
    warmup: float | None = None
    requests: int | None = None
    turns: int = 1
    think: float = 10.0
    sessions: bool = False
    arrivals: str = "poisson"
    trace: str | None = None
    questions: str | None = None
    tokenizer: str | None = None
    message_tokens: int | None = None
    reply_tokens: int | None = None
    longest_message: int | None = None
    longest_reply: int | None = None
    endpoint: str = "chat"
    model: str | None = None
    temperature: float | None = 0.0
    timeout: float = 120.0
    ttft_limit: float = 1.0
    tpot_limit: float = 0.15
    null_seconds: float = 5.0
    seed: int = 0
    text_seed: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest if a value is wrong or values contradict each other."""
        _one_of("endpoint", self.endpoint, ("chat", "completions"))
        _one_of("arrivals", self.arrivals, ("poisson", "trace"))
        if self.arrivals == "trace" and self.trace is None:
            raise InvalidRequest("--arrivals is 'trace', expected --trace FILE with it")
        if self.trace is not None and self.turns > 1:
            raise InvalidRequest(
                f"--turns is {self.turns} with --trace, expected 1: a trace has whole prompts"
            )
        sources = {
            "--trace": self.trace,
            "--questions": self.questions,
            "--message-tokens": self.message_tokens,
        }
        given = [name for name, value in sources.items() if value is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"{' and '.join(given)} are given, expected one: each sets the message lengths"
            )
        if self.tokenizer is not None and self.questions is None:
            raise InvalidRequest("--tokenizer is given without --questions, expected both")
        if self.sessions and self.endpoint != "chat":
            raise InvalidRequest(
                "--sessions is given with --endpoint completions, expected chat: "
                "only chat completions select a session"
            )

    def warmup_seconds(self, reply_tokens: float) -> float:
        """Returns the seconds before the measured window.

        Conversations need about the time of one of them until turns come at the wanted rate.

        Args:
            reply_tokens: Mean tokens of a reply.
        """
        if self.warmup is not None:
            return self.warmup
        return FIRST_SECONDS + (self.turns - 1) * (self.think + TOKEN_SECONDS * reply_tokens)


def parse_rates(text: str) -> tuple[float, ...]:
    """Returns the rates of --rates, in ascending order.

    Raises:
        InvalidRequest: The text is not a list of rates.
    """
    try:
        rates = sorted(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = []
    # A comparison with NaN is false.
    if not rates or not all(0 < rate <= MOST_RATE for rate in rates):
        raise InvalidRequest(
            f"--rates is {text!r}, expected numbers above 0 and up to {MOST_RATE:g} with commas "
            "between"
        )
    return tuple(rates)


def api_key(given: str | None) -> str | None:
    """Returns the key of the option, else that of the first environment variable that is set."""
    if given is not None:
        return given
    return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequest(f"--{name} is {value!r}, expected {' or '.join(allowed)}")
