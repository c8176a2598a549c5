"""Results of trials and of openings: counts, and lines to print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from training.evaluation.matching import contains, is_text, loops, remembers
from training.evaluation.trials import Trial

_WORST_KINDS = 8
_SHOWN = 400  # characters of a message


def exchange(message: str, reply: str) -> list[str]:
    """Returns a message and its reply for printing, truncated."""
    return [f"  > {message[:_SHOWN]}", f"    {reply[:_SHOWN]}"]


@dataclass(frozen=True)
class Share:
    """A share: `passed` of `total`."""

    passed: int
    total: int

    @classmethod
    def of(cls, outcomes: Iterable[bool]) -> Share:
        """Returns the share of true `outcomes`."""
        listed = list(outcomes)
        return cls(sum(listed), len(listed))

    @property
    def rate(self) -> float:
        """The share as a number; 0 for none."""
        return self.passed / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.rate:6.1%} of {self.total}"

    def as_json(self) -> dict[str, float]:
        """Returns it as a JSON value."""
        return {"passed": self.passed, "total": self.total, "rate": round(self.rate, 4)}


@dataclass(frozen=True)
class Talk:
    """A trial, and the replies to the user's messages; fewer if the context was full."""

    trial: Trial
    replies: tuple[str, ...]

    @property
    def answer(self) -> str:
        """Reply to the question; empty if the context was full."""
        return self.replies[-1] if len(self.replies) == len(self.trial.users) else ""

    @property
    def passed(self) -> bool:
        """Whether the answer has the value and none that it replaced."""
        return remembers(self.answer, self.trial.value, self.trial.stale)

    def transcript(self) -> str:
        """Returns the talk and the expected value, for printing."""
        trial = self.trial
        replies = [*self.replies, *[""] * (len(trial.users) - len(self.replies))]
        lines = [f"{trial.kind}: expected {trial.value!r} after {trial.distance}"]
        lines[0] += f", not {', '.join(map(repr, trial.stale))}" if trial.stale else ""
        for said, reply in zip(trial.users, replies, strict=True):
            lines += exchange(said, reply)
        return "\n".join(lines)


@dataclass(frozen=True)
class RecallResult:
    """The outcome of a set of trials."""

    name: str
    goal: float
    talks: Sequence[Talk]
    secret: bool = False  # not to be examined: no kinds, no transcripts

    def by(self, key: Callable[[Trial], Any]) -> dict[Any, Share]:
        """Returns the shares of groups of trials that have the same key."""
        groups: dict[Any, list[bool]] = {}
        for talk in self.talks:
            groups.setdefault(key(talk.trial), []).append(talk.passed)
        return {group: Share.of(groups[group]) for group in sorted(groups)}

    @property
    def share(self) -> Share:
        """Share of all trials that passed."""
        return Share.of(talk.passed for talk in self.talks)

    @property
    def failures(self) -> list[Talk]:
        """Talks that failed; an empty list for a secret set."""
        return [] if self.secret else [talk for talk in self.talks if not talk.passed]

    @property
    def unclosed(self) -> Share:
        """Share without values of closed classes, all of which are in the training data."""
        return Share.of(t.passed for t in self.talks if t.trial.novelty != "closed")

    @property
    def missing(self) -> int:
        """Number of answers without the value."""
        return sum(not contains(talk.answer, talk.trial.value) for talk in self.talks)

    @property
    def stale(self) -> int:
        """Number of answers with a value that was replaced."""
        return sum(any(contains(t.answer, old) for old in t.trial.stale) for t in self.talks)

    def lines(self) -> list[str]:
        """Returns lines to print."""
        novelty, distance = self.by(lambda t: t.novelty), self.by(lambda t: t.distance)
        lines = [
            f"{self.name:<34}{self.share}   (goal {self.goal:.0%})",
            f"    answers without the value: {self.missing}, with a stale one: {self.stale}",
            f"    without closed classes:    {self.unclosed}",
            "    values:   " + "   ".join(f"{key} {share}" for key, share in novelty.items()),
            "    distance: " + "  ".join(f"{key}: {s.rate:.1%}" for key, s in distance.items()),
        ]
        kinds = self.by(lambda t: t.kind)
        worst = sorted(kinds, key=lambda kind: (kinds[kind].rate, -kinds[kind].total))
        worst = [kind for kind in worst if kinds[kind].rate < 1][:_WORST_KINDS]
        if worst and not self.secret:
            said = (f"{kind} {kinds[kind].passed}/{kinds[kind].total}" for kind in worst)
            lines.append("    worst:    " + ", ".join(said))
        return lines

    def as_json(self) -> dict[str, Any]:
        """Returns it as a JSON value."""
        found: dict[str, Any] = {**self.share.as_json(), "goal": self.goal}
        found |= {"missing": self.missing, "stale": self.stale}
        found["without_closed"] = self.unclosed.as_json()
        keys: dict[str, Callable[[Trial], Any]] = {
            "novelty": lambda t: t.novelty,
            "distance": lambda t: t.distance,
        }
        if not self.secret:
            keys["kind"] = lambda t: t.kind
        for name, key in keys.items():
            found[name] = {str(group): s.as_json() for group, s in self.by(key).items()}
        return found


@dataclass(frozen=True)
class Opening:
    """A first message, its reply, and whether the reply ended by itself."""

    message: str
    reply: str
    ended: bool

    @property
    def loops(self) -> bool:
        """Whether the reply loops."""
        return loops(self.reply)

    @property
    def valid(self) -> bool:
        """Whether the reply is valid text and not empty."""
        return is_text(self.reply)


@dataclass(frozen=True)
class OpeningsResult:
    """The replies to first messages, with settings described by `name`."""

    name: str
    openings: Sequence[Opening]

    @property
    def shares(self) -> dict[str, Share]:
        """Shares that ended, did not loop, were text, and were all three."""
        return {
            "ended": Share.of(o.ended for o in self.openings),
            "no loop": Share.of(not o.loops for o in self.openings),
            "valid text": Share.of(o.valid for o in self.openings),
            "all": Share.of(o.ended and not o.loops and o.valid for o in self.openings),
        }

    @property
    def failures(self) -> list[Opening]:
        """Replies that are not all three."""
        return [o for o in self.openings if not o.ended or o.loops or not o.valid]

    def lines(self) -> list[str]:
        """Returns lines to print."""
        shares = "   ".join(f"{name} {share.rate:.1%}" for name, share in self.shares.items())
        return [f"{self.name:<34}{shares}   of {len(self.openings)} (goal: 95% end, no loop)"]

    def as_json(self) -> dict[str, Any]:
        """Returns it as a JSON value."""
        return {name: share.as_json() for name, share in self.shares.items()}
