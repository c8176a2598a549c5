"""Measures the TTFT turn by turn, with cached context and with recomputed context."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import turbomind
from turbomind import Engine, Handle
from turbomind.errors import InvalidRequest
from turbomind.loading.loader import ModelInfo

from ..terminal.tables import ReportPrinter, figures
from . import kv_tiers_bench, kv_tiers_view
from .measure import GREEDY, first_token

if TYPE_CHECKING:
    import lmchat
    from lmchat.text.tokenizer import Tokenizer

WORDS = "the lamp by the quiet river keeps its light until the last boat has come home "
COMPARED = 2  # turn that the last one is compared with: the first one with a context


@dataclass(frozen=True)
class Plan:
    """Parameters of `bench turns`.

    Attributes:
        turns: Turns of a conversation.
        new_tokens: Tokens of each question.
        reply_tokens: Tokens of each reply.
        repeat: Number of conversations.
        context: Restored context, in tokens; None: that of the last turn; 0: not measured.
        resumes: Turns that check the TTFT predictions.
        folder: Folder of the pages; None: temporary files.
    """

    turns: int
    new_tokens: int
    reply_tokens: int
    repeat: int
    context: int | None = None
    resumes: int = 0
    folder: str | None = None

    def check(self, max_context: int) -> None:
        """Raises InvalidRequest when the conversation would not fit in `max_context` tokens."""
        longest = self.turns * (self.new_tokens + self.reply_tokens)
        if longest > max_context:
            raise InvalidRequest(
                f"a conversation of {longest} tokens, expected at most {max_context}: lower "
                "--turns, or raise --max-context-tokens or --cache-memory"
            )
        if self.restored is not None:
            self.restored.check(max_context)

    @property
    def restored(self) -> kv_tiers_bench.Plan | None:
        """Parameters of the measurement by tier; None if it is skipped."""
        context = self.context
        if context is None:
            context = (self.turns - 1) * (self.new_tokens + self.reply_tokens)
        if context == 0:
            return None
        return kv_tiers_bench.Plan(context, self.new_tokens, self.repeat, self.resumes, self.folder)


@dataclass(frozen=True)
class First:
    """First token of a turn.

    Attributes:
        prompt: Token ids of the prompt.
        new: Tokens that were computed.
        seconds: TTFT.
        python: Seconds of templating and tokenization.
    """

    prompt: list[int]
    new: int
    seconds: float
    python: float


class Conversation(Protocol):
    """One conversation that grows by equal turns."""

    def first(self) -> First:
        """Asks the next question and waits for the first token."""

    def rest(self) -> None:
        """Generates the rest of the reply."""

    def close(self) -> None:
        """Releases all resources."""


class TokenConversation:
    """A conversation of random token ids, on an engine handle."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self._handle: Handle = engine.open()
        self._random = np.random.default_rng(0)

    def first(self) -> First:
        """Asks the next question and waits for the first token."""
        vocab = self._engine.info.description.vocab
        self._handle.append(self._random.integers(0, vocab, self._plan.new_tokens).tolist())
        prompt = self._handle.token_ids
        seconds, done = first_token(lambda: self._handle.generate(max_new_tokens=1, **GREEDY))
        return First(prompt, len(prompt) - done.reused_tokens, seconds, 0.0)

    def rest(self) -> None:
        """Generates the rest of the reply."""
        if self._plan.reply_tokens > 1:
            left = self._plan.reply_tokens - 1
            self._handle.generate(max_new_tokens=left, **GREEDY).result()

    def close(self) -> None:
        """Releases all resources."""
        self._handle.close()


class TextConversation:
    """A session with the same question in each turn."""

    def __init__(self, engine: lmchat.ChatEngine, plan: Plan) -> None:
        self._plan = plan
        self._session = engine.session(history="append", settings=GREEDY)
        self._text = words_of(engine.tokenizer, plan.new_tokens)

    def first(self) -> First:
        """Asks the next question and waits for the first token."""
        reply = self._session.send(self._text, max_new_tokens=1)
        if reply.error is not None:
            raise reply.error
        prompt = self._session.token_ids[: -len(reply.token_ids)]
        new = reply.usage.prompt_tokens - reply.usage.cached_tokens
        return First(prompt, new, reply.timings.ttft, reply.timings.prepare)

    def rest(self) -> None:
        """Generates the rest of the reply."""
        if self._plan.reply_tokens > 1:
            self._session.continue_(max_new_tokens=self._plan.reply_tokens - 1)

    def close(self) -> None:
        """Releases all resources."""
        self._session.delete()


def words_of(tokenizer: Tokenizer, tokens: int) -> str:
    """Repeats WORDS up to at least `tokens` tokens."""
    letters = 1
    while True:
        text = (WORDS * -(-letters // len(WORDS)))[:letters]
        if len(tokenizer.encode(text, add_special_tokens=False)) >= tokens:
            return text
        letters += 1


@dataclass
class Turns:
    """Measured seconds of one turn, one entry per round."""

    turn: int
    history: int = 0
    new: int = 0
    cached: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    python: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns the medians with their samples."""
        cached, recomputed = statistics.median(self.cached), statistics.median(self.recomputed)
        return {
            "turn": self.turn,
            "history_tokens": self.history,
            "new_tokens": self.new,
            "cached_seconds": cached,
            "attention_seconds": statistics.median(self.attention),
            "recomputed_seconds": recomputed,
            "recomputed_over_cached": recomputed / cached,
            "python_seconds": statistics.median(self.python),
            "samples": {
                name: getattr(self, name) for name in ("cached", "attention", "recomputed")
            },
        }


def run(source: str | os.PathLike[str], plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Runs the measurement and returns a JSON-able report; times in seconds."""
    info = turbomind.plan(source, **options).model
    plan.check(info.description.max_context)
    with _opened(info, plan, options) as (core, start):
        plan.check(core.max_context)
        rows = _measure(core, start, plan)
        report = {
            "model": str(info.path),
            "architecture": info.description.architecture,
            "dtype": core.info.dtype,
            "kv_dtype": core.info.kv_dtype,
            "device": core.device,
            "isa": core.isa,
            "threads": core.threads,
            "plan": asdict(plan),
        }
    turns = [row.row() for row in rows]
    report |= {"turns": turns, "growth": growth(turns), "python": _python(info, plan)}
    if plan.restored is not None:
        report["restored"] = kv_tiers_bench.measure(info, plan.restored, options)
    return report


def _python(info: ModelInfo, plan: Plan) -> dict[str, Any]:
    """Measures templating and tokenization after a long history; empty without a tokenizer."""
    from lmchat.text.model_text import has_tokenizer, read_text

    if not has_tokenizer(info):
        return {}
    from lmchat.text.prompt import PromptBuilder

    from .template_bench import HISTORY_TOKENS, python_seconds

    text = read_text(info)
    tokenizer, builder = text.tokenizer, PromptBuilder(text.tokenizer, text.template)
    seconds = python_seconds(builder, tokenizer, words_of(tokenizer, plan.new_tokens))
    return {"history_tokens": HISTORY_TOKENS, "seconds_by_history_rule": seconds}


def growth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the last turn with turn COMPARED, both without attention."""
    early, late = (
        rows[i]["cached_seconds"] - rows[i]["attention_seconds"] for i in (COMPARED - 1, -1)
    )
    return {
        "turns": [rows[COMPARED - 1]["turn"], rows[-1]["turn"]],
        "seconds_without_attention": [early, late],
        "ratio": late / early,
    }


@contextmanager
def _opened(
    info: ModelInfo, plan: Plan, options: dict[str, Any]
) -> Iterator[tuple[Engine, Callable[[], Conversation]]]:
    """Opens the engine; yields it and a function that starts a conversation."""
    from lmchat.text.model_text import has_tokenizer

    if has_tokenizer(info):
        import lmchat

        with lmchat.ChatEngine(info.path, store="memory", **options) as chat:
            yield chat.core, lambda: TextConversation(chat, plan)
    else:
        with Engine(info.path, **options) as core:
            yield core, lambda: TokenConversation(core, plan)


def _measure(core: Engine, start: Callable[[], Conversation], plan: Plan) -> list[Turns]:
    rows = [Turns(turn) for turn in range(1, plan.turns + 1)]
    again(core, [0] * plan.new_tokens)  # warm-up
    for _ in range(plan.repeat):
        core.evict()  # pages of the previous round
        conversation = start()
        try:
            for row in rows:
                _measure_turn(core, conversation, row)
        finally:
            conversation.close()
    return rows


def _measure_turn(core: Engine, conversation: Conversation, row: Turns) -> None:
    core.profile(True)
    first = conversation.first()
    row.attention.append(core.stats().ops["attention"]["ns"] / 1e9)
    core.profile(False)
    row.history, row.new = len(first.prompt) - first.new, first.new
    row.cached.append(first.seconds)
    row.python.append(first.python)
    row.recomputed.append(again(core, first.prompt))
    conversation.rest()


def again(core: Engine, prompt: list[int]) -> float:
    """Returns the TTFT, in seconds, without cached KV of the prompt."""
    core.evict()  # pages of an earlier call
    # Another salt shares no pages with the conversation.
    seconds, _ = first_token(lambda: core.stream(prompt, max_new_tokens=1, salt="again", **GREEDY))
    return seconds


def _machine(report: dict[str, Any]) -> str:
    if report["device"] != "cpu":
        return str(report["device"])
    return f"{report['isa']}, {report['threads']} threads"


def show(report: dict[str, Any]) -> None:
    """Prints the table of a report."""
    printer = ReportPrinter()
    plan = report["plan"]
    printer.print(
        f"{report['model']}: {report['architecture']}, {report['dtype']}, KV {report['kv_dtype']}, "
        f"{_machine(report)}; medians of {plan['repeat']}"
    )
    names = (
        "turn",
        "history",
        "new",
        "TTFT cached",
        "attention",
        "python",
        "TTFT recomputed",
        "ratio",
    )
    table = figures("TTFT in ms", *names)
    for row in report["turns"]:
        table.add_row(
            str(row["turn"]),
            f"{row['history_tokens']:,}",
            str(row["new_tokens"]),
            *(f"{row[f'{key}_seconds'] * 1e3:.1f}" for key in ("cached", "attention")),
            f"{row['python_seconds'] * 1e3:.2f}",
            f"{row['recomputed_seconds'] * 1e3:.1f}",
            f"{row['recomputed_over_cached']:.1f}",
        )
    printer.print(table)
    (first, last), ratio = report["growth"]["turns"], report["growth"]["ratio"]
    printer.print(f"TTFT cached without attention, turn {last} over turn {first}: {ratio:.2f}")
    if report["python"]:
        rules = report["python"]["seconds_by_history_rule"]
        times = ", ".join(f"{value * 1e3:.2f} ms ({rule})" for rule, value in rules.items())
        tokens = report["python"]["history_tokens"]
        printer.print(f"templating and tokenizing a turn after {tokens:,} tokens: {times}")
    if "restored" in report:
        kv_tiers_view.show(printer, report["restored"])
