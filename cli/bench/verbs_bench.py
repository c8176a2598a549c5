"""Measures fork, undo and edit of a long session, until prefill starts."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lmchat
from lmchat.bundled import bundled_model
from lmchat.text.model_text import folder_has_tokenizer
from turbomind import _C, Engine
from turbomind.config.facts import PAGE_TOKENS
from turbomind.errors import InvalidRequest
from turbomind.gguf.file import is_gguf

from ..terminal.tables import ReportPrinter, figures
from .disk import disk_facts, disk_note, fsync_seconds, scratch
from .measure import GREEDY
from .turns_bench import words_of

VERBS = ("fork", "undo", "edit")
ALLOWED = 0.005  # seconds in addition to the fsync
MESSAGE_TOKENS = (8, 240)  # of the questions: turns start anywhere in a page
REPLY_TOKENS = 4
EDITED = "And on a rainy day?"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Plan:
    """Parameters of `bench verbs`.

    Attributes:
        context: Tokens of the session, at least.
        samples: Samples of each operation.
        seed: Seed of the random turns.
        folder: Folder of the session; None: temporary files.
    """

    context: int
    samples: int
    seed: int
    folder: str | None

    def check(self, max_context: int) -> None:
        """Raises InvalidRequest when the session would not fit in `max_context` tokens."""
        longest = self.context + 2 * MESSAGE_TOKENS[1]
        if longest > max_context:
            raise InvalidRequest(
                f"--context: a session of up to {longest} tokens, expected at most {max_context}: "
                "lower it, or raise --max-context-tokens or --cache-memory"
            )


def run(source: str | os.PathLike[str], plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Runs the measurement and returns a JSON-able report; times in seconds."""
    with (
        scratch(plan.folder) as folder,
        _model(source, folder) as model,
        lmchat.ChatEngine(model, store=folder / "store", **options) as chat,
    ):
        plan.check(chat.core.max_context)
        random = np.random.default_rng(plan.seed)
        session = _converse(chat, plan.context, random)
        samples, fsyncs = _sample(session, plan.samples, random, folder)
        fsync = statistics.median(fsyncs)
        return {
            "model": str(source),
            "plan": asdict(plan),
            "tokens": session.length,
            "turns": _turns(session),
            "fsync_seconds": fsync,
            "fsync_samples": fsyncs,
            "allowed_seconds": ALLOWED + fsync,
            "verbs": [_row(verb, samples[verb], fsync) for verb in VERBS],
            "pages": _pages(chat.core, session.token_ids, plan.samples, random),
            **disk_facts(folder),
        }


@contextmanager
def _model(source: str | os.PathLike[str], folder: Path) -> Iterator[str | os.PathLike[str]]:
    """Yields the model; a config.json alone gets the tokenizer of the model that ships."""
    path = Path(source)
    config_path = path / "config.json" if path.is_dir() else path
    if folder_has_tokenizer(path) or is_gguf(path) or not config_path.is_file():
        yield source
        return
    made = folder / "model"
    made.mkdir()
    config = json.loads(config_path.read_text())
    (made / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(bundled_model() / name, made)
    yield made


def _converse(chat: lmchat.ChatEngine, context: int, random: np.random.Generator) -> lmchat.Session:
    """Returns a session with at least two questions, of many lengths, and short replies."""
    session = chat.session("bench", settings={**GREEDY, "max_new_tokens": REPLY_TOKENS})
    while session.length < context or _turns(session) < 2:
        length = int(random.integers(*MESSAGE_TOKENS))
        reply = session.send(words_of(chat.tokenizer, min(length, context)))
        if reply.error is not None:
            raise reply.error
    return session


def _sample(
    session: lmchat.Session, samples: int, random: np.random.Generator, folder: Path
) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the seconds of each operation, and of interleaved fsyncs."""
    found: dict[str, list[float]] = {verb: [] for verb in VERBS}
    fsyncs: list[float] = []
    for _ in range(samples):
        turn = int(random.integers(1, _turns(session)))
        begin = time.perf_counter()
        fork = session.fork(at=turn)
        found["fork"].append(time.perf_counter() - begin)
        found["undo"].append(_timed(fork.undo))
        fork.delete()
        found["edit"].append(_edit(session, turn))
        fsyncs += fsync_seconds(folder, 1)
    return found, fsyncs


def _edit(session: lmchat.Session, turn: int) -> float:
    """Returns the seconds until an edited turn is committed and submitted to the engine.

    A copy is edited, so that the length of the session does not change; its reply is stopped.
    """
    copy = session.fork()
    begin = time.perf_counter()
    copy.start_edit(turn, EDITED)
    seconds = time.perf_counter() - begin
    copy.stop()
    copy.delete()
    return seconds


def _timed(verb: Callable[[], object]) -> float:
    begin = time.perf_counter()
    verb()
    return time.perf_counter() - begin


def _turns(session: lmchat.Session) -> int:
    return sum(turn.role == "user" for turn in session.turns)


def _row(verb: str, seconds: list[float], fsync: float) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "verb": verb,
        "seconds": median,
        "p90": sorted(seconds)[(len(seconds) * 9 - 1) // 10],
        "max": max(seconds),
        "beside_fsync_seconds": median - fsync,
        "within": median <= ALLOWED + fsync,
        "samples": seconds,
    }


def _pages(
    core: Engine, token_ids: list[int], samples: int, random: np.random.Generator
) -> dict[str, Any]:
    """Measures the engine's part: a fork is truncated at any token and continued by one token.

    `copied_pages` is the largest number of pages beyond those of the new tokens; `again_tokens` is
    the largest number of recomputed tokens.
    """
    seconds, copied, again = [], [], []
    groups = len(_C.plan_cache(core.info.description.to_core("bfloat16", core.info.kv_dtype, "")))
    with core.open(salt="verbs") as handle:
        handle.append(token_ids)
        handle.generate(max_new_tokens=1, **GREEDY).result()
        for cut in random.integers(1, len(token_ids), samples).tolist():
            before = core.stats().pages_referenced
            begin = time.perf_counter()
            fork = handle.fork()
            fork.truncate(cut)
            seconds.append(time.perf_counter() - begin)
            new = token_ids[cut - 1 : cut]
            fork.append(new)
            done = fork.generate(max_new_tokens=1, **GREEDY).result()
            opened = -(-(cut + 1) // PAGE_TOKENS) - -(-cut // PAGE_TOKENS)
            added = core.stats().pages_referenced - before
            copied.append(added // groups - opened)
            again.append(done.prompt_tokens - done.reused_tokens - 1)
            fork.close()
    return {
        "seconds": statistics.median(seconds),
        "copied_pages": max(copied),
        "again_tokens": max(again),
        "samples": seconds,
    }


def show(report: dict[str, Any]) -> None:
    """Prints the table of a report."""
    printer = ReportPrinter()
    plan, pages = report["plan"], report["pages"]
    printer.print(
        f"{report['model']}: a session of {report['tokens']:,} tokens in {report['turns']} turns"
    )
    names = ("operation", "median", "P90", "max", "minus fsync", "allowed", "within")
    table = figures(f"ms, {plan['samples']} samples each at random turns", *names)
    for row in report["verbs"]:
        table.add_row(
            row["verb"],
            *(f"{row[key] * 1e3:.2f}" for key in ("seconds", "p90", "max", "beside_fsync_seconds")),
            f"{report['allowed_seconds'] * 1e3:.2f}",
            "yes" if row["within"] else "no",
        )
    printer.print(table)
    printer.print(
        f"fsync: {report['fsync_seconds'] * 1e3:.2f} ms (median, in the same run) on "
        f"{disk_note(report)}"
    )
    printer.print(
        f"in the engine, truncated at any token: {pages['seconds'] * 1e3:.2f} ms, at most "
        f"{pages['copied_pages']} page copied, {pages['again_tokens']} tokens recomputed"
    )
