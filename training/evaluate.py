"""Measures a model: `python -m training.evaluate MODEL_FOLDER --dialogues FOLDER`.

recall: held-out chats of the grammar, with the question one to six turns after the fact.
independent: the same in wordings written independently of the grammar. Set A: its failures were
examined while memo was made. Set B: twelve of its facts and its scores were seen. Set C: written
after the last change of the grammar and first scored after the training.
corrected: a fact is stated, corrected and asked for. The answer must have the new value and not the
old one.
openings: replies to the first messages of held-out real dialogues that start no dialogue to train
on.
bits: bits per byte of held-out real dialogues, beside 5-gram models and xz.

The engine is lmchat's. Recall is greedy, and the replies in between are the model's own. Equal
arguments give equal figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmchat import ChatEngine
from training import corpora
from training.evaluation import bits, play, trials
from training.evaluation.matching import LOOP
from training.evaluation.results import Opening, OpeningsResult, RecallResult, Talk, exchange
from training.evaluation.trials import Trial
from training.grammar.chats import Message

COUNT = 500
SEED = 1_000_000_007  # a seed that no chunk of the training has
GOALS = {"recall": 0.9, "independent": 0.7, "corrected": 0.8}

_REPLY_TOKENS = 160  # longest reply in a talk about facts, in tokens
_OPENING_TOKENS = 256
_DIALOGUES = 300  # held-out dialogues of each corpus
_SETS = {"a": "A, failures seen", "b": "B, scores seen", "c": "C, blind"}


class Evaluation:
    """Measures one model. `count` scales the size of all sets; 500 for published figures."""

    def __init__(self, engine: ChatEngine, dialogues: Path, count: int, failures: int) -> None:
        self._engine = engine
        self._dialogues = dialogues
        self._count = count
        self._failures = failures
        self._seen: frozenset[str] | None = None

    def recall(self) -> dict[str, Any]:
        """Measures the recall of facts in the grammar's wordings."""
        chosen = trials.of_grammar(self._count, SEED, self.seen)
        return self._report("grammar", "recall", chosen)

    def independent(self) -> dict[str, Any]:
        """Measures the recall of facts in independent wordings."""
        return {name: self._set(name, "independent", self._count, SEED + 1) for name in _SETS}

    def corrected(self) -> dict[str, Any]:
        """Measures the recall of facts that were corrected."""
        half = -(-self._count // 2)
        chosen = trials.of_grammar(half, SEED + 2, self.seen, corrected=True)
        found = {"grammar": self._report("grammar", "corrected", chosen)}
        return found | {name: self._set(name, "corrected", half, SEED + 3) for name in _SETS}

    def openings(self) -> dict[str, Any]:
        """Measures replies to first messages of real dialogues."""
        known = {_opening(dialogue) for dialogue in corpora.read_all(self._dialogues)}
        held_out = [
            dialogue
            for dialogue in corpora.read_all(self._dialogues, held_out=True)
            if _opening(dialogue) not in known
        ]
        count = min(-(-self._count * 2 // 5), len(held_out))
        chosen = random.Random(SEED).sample(held_out, count)
        messages = [dialogue[0]["content"] for dialogue in chosen]
        print(f"A loop is {LOOP}.")
        ways: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "own settings": {}}
        if self._engine.model_settings.get("temperature") == 0:
            # The model's own settings are the greedy ones.
            ways = {"greedy, its own settings": {"temperature": 0.0}}
            ways["sampled at temperature 1"] = {"do_sample": True}
        return {name: self._open(name, messages, given) for name, given in ways.items()}

    def bits(self) -> dict[str, Any]:
        """Measures bits per byte of held-out dialogues."""
        each = min(_DIALOGUES, max(1, self._count * _DIALOGUES // COUNT))
        training = None if self._count >= COUNT else 50 * self._count
        sample = bits.Sample.draw(self._dialogues, SEED, each, training)
        found = bits.measure(self._engine, sample)
        kept = [dialogue for some in sample.held_out.values() for dialogue in some]
        xz = bits.measure_xz(sample.training, kept)
        learnt = bits.text_bytes(sample.training)
        print(
            f"Per UTF-8 byte of message text; the 5-grams learn from {len(sample.training):,} "
            f"dialogues of {learnt:,} bytes.\nThe model and the 5-gram of its tokens pay for roles "
            "and ends of messages, that of bytes for ends, xz for line feeds."
        )
        print(f"{'':<34}{'bytes':>9}{'model':>9}{'5-gram of tokens':>18}{'of bytes':>10}")
        for name, one in found.items():
            print(
                f"{name:<34}{one.bytes:>9,}{one.model:>9.3f}{one.tokens_5gram:>18.3f}"
                f"{one.bytes_5gram:>10.3f}"
            )
        print(f"xz -9e: alone {xz.alone:.3f}, after the training text {xz.after_training:.3f}")
        by_corpus = {name: dataclasses.asdict(one) for name, one in found.items()}
        return {"corpora": by_corpus, "xz": dataclasses.asdict(xz), "training_bytes": learnt}

    @property
    def seen(self) -> frozenset[str]:
        """Returns the words of the real dialogues that are trained on."""
        if self._seen is None:
            self._seen = trials.seen_words(self._dialogues)
        return self._seen

    def _set(self, name: str, part: str, count: int, seed: int) -> dict[str, Any]:
        wordings = trials.read_wordings(name)
        corrected = part == "corrected"
        chosen = trials.of_wordings(wordings, count, seed, self.seen, corrected=corrected)
        return self._report(f"wordings {_SETS[name]}", part, chosen, secret=name != "a")

    def _report(
        self, name: str, part: str, chosen: Sequence[Trial], *, secret: bool = False
    ) -> dict[str, Any]:
        told = play.talks(
            self._engine,
            [trial.users for trial in chosen],
            temperature=0.0,
            max_new_tokens=_REPLY_TOKENS,
        )
        talks = [
            Talk(trial, tuple(reply.text for reply in replies))
            for trial, replies in zip(chosen, told, strict=True)
        ]
        result = RecallResult(name, GOALS[part], talks, secret)
        print("\n".join(result.lines()))
        for talk in result.failures[: self._failures]:
            print(f"\n{talk.transcript()}")
        return result.as_json()

    def _open(self, name: str, messages: list[str], settings: dict[str, Any]) -> dict[str, Any]:
        replies = play.talks(
            self._engine,
            [[message] for message in messages],
            max_new_tokens=_OPENING_TOKENS,
            seed=SEED,
            **settings,
        )
        openings = [
            # Without a reply if the message alone exceeds the context.
            Opening(message, one.text, one.finish_reason == "stop")
            if (one := next(iter(got), None))
            else Opening(message, "", False)
            for message, got in zip(messages, replies, strict=True)
        ]
        result = OpeningsResult(name, openings)
        print("\n".join(result.lines()))
        for failed in result.failures[: self._failures]:
            print("\n".join(["", *exchange(failed.message, failed.reply)]))
        return result.as_json()


def _opening(dialogue: Sequence[Message]) -> str:
    first = next(message for message in dialogue if message["role"] == "user")
    return first["content"].casefold()


PARTS: dict[str, Callable[[Evaluation], dict[str, Any]]] = {
    "recall": Evaluation.recall,
    "independent": Evaluation.independent,
    "corrected": Evaluation.corrected,
    "openings": Evaluation.openings,
    "bits": Evaluation.bits,
}
"""The parts of a measurement, in order."""


def parts_of(text: str) -> list[str]:
    """Returns the parts in a comma-separated list, in the order of PARTS.

    Raises:
        ValueError: names an unknown part.
    """
    wanted = [part.strip() for part in text.split(",")]
    for part in wanted:
        if part not in PARTS:
            raise ValueError(f"part {part!r}, expected some of {','.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = _options(arguments)
    found: dict[str, Any] = {"count": options.count}
    with ChatEngine(
        options.model,
        store="memory",
        threads=options.threads,
        max_batch_size=play.AT_ONCE,
        cache_memory="512MiB",
        max_queue=2 * play.AT_ONCE,
    ) as engine:
        evaluation = Evaluation(engine, options.dialogues, options.count, options.failures)
        for part in options.only:
            print(f"== {part}", flush=True)
            begun = time.monotonic()
            found[part] = PARTS[part](evaluation)
            print(f"{part}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        try:
            return parts_of(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}, expected a number of at least 1")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--dialogues", type=Path, required=True, help="folder of the *.jsonl.xz")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument(
        "--only", type=parts, default=list(PARTS), help=f"some of {','.join(PARTS)}"
    )
    parser.add_argument("--count", type=positive, default=COUNT, help="chats of a set; 500")
    parser.add_argument(
        "--failures", type=int, default=0, help="transcripts of failures to show, never of set B"
    )
    parser.add_argument("--threads", type=positive, help="of the engine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
