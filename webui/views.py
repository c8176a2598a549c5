"""What the page shows of a session: messages for the Chatbots, and facts for its JavaScript."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from lmchat.aio.session import AsyncSession
from lmchat.figures import duration, latency, usage_parts
from lmchat.generation.parts import Delta, Progress
from lmchat.generation.state import State
from lmchat.interface.engine import SessionInfo
from lmchat.public_text import public_model
from lmchat.store.turns import Turn

from .markdown import markdown

Message = dict[str, Any]

ENDINGS = {
    "cancelled": "Stopped. Continue resumes it where it stopped.",
    "length": "Cut at the limit of new tokens. Continue extends it.",
    "interrupted": "The process ended during this reply. Continue resumes it where it stopped.",
    "error": "The reply failed. Continue resumes it, Retry starts again.",
}
"""Why a reply is not complete, and what to do, by its finish reason."""
FULL = {
    "drop": "Cut, because the context is full. The next message drops the oldest rounds.",
    "refuse": "Cut, because the context is full. Edit a question, or set Overflow to drop.",
}
"""The same of a reply that has filled the context, by the session's rule for that."""


@dataclass
class Answer:
    """A reply as far as it is generated."""

    text: str = ""
    reasoning: str = ""
    progress: Progress | None = None
    is_running: bool = False
    figures: str = ""
    _begun: tuple[float, int] | None = None  # time and tokens of the first progress

    def take(self, parts: Iterable[Delta | Progress]) -> None:
        """Adds parts of the reply."""
        for part in parts:
            if isinstance(part, Progress):
                self.progress = part
                self._begun = self._begun or (time.monotonic(), part.done)
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                self.text += part.text

    @property
    def status(self) -> str:
        """What a reply without a token waits for."""
        if self.text or self.reasoning:
            return ""
        if self.progress is None or self._begun is None:
            return "Waiting for a slot"
        done, total = self.progress.done, self.progress.total
        text = f"Reading {done:,} of {total:,} tokens"
        seconds, new = time.monotonic() - self._begun[0], done - self._begun[1]
        left = f" · {duration(seconds * (total - done) / new)} left" if new > 0 else ""
        return text + left


@dataclass(frozen=True)
class Round:
    """A question and its reply, which only the last round of a conversation may lack.

    Attributes:
        number: number of the user turn, from 0; -1 for one that was dropped from the prompt.
        question: the user turn.
        answer: the reply.
    """

    number: int
    question: Turn
    answer: Answer | None = None


def rounds(turns: Sequence[Turn], max_context: int, dropped: Sequence[Turn] = ()) -> list[Round]:
    """Returns the rounds of a conversation, with the figures of replies that were generated.

    Args:
        turns: the conversation.
        max_context: most tokens of prompt and reply together.
        dropped: turns that were dropped from its prompt; their rounds come first.
    """
    found = [replace(one, number=-1) for one in rounds(dropped, max_context)] if dropped else []
    above = len(found)
    for turn in turns:
        if turn.role == "user":
            found.append(Round(len(found) - above, turn))
        elif turn.role == "assistant" and len(found) > above:
            answer = Answer(turn.text, turn.reasoning)
            if turn.usage.completion_tokens:
                answer.figures = " · ".join(usage_parts(turn, turn.length, max_context))
            found[-1] = replace(found[-1], answer=answer)
    return found


def messages(one: Round) -> list[Message]:
    """Returns a round as messages of a Chatbot."""
    answer = one.answer
    shown: list[Message] = [{"role": "user", "content": markdown(one.question.text)}]
    if answer is None:
        return shown
    if answer.reasoning.strip():
        thinks = answer.is_running and not answer.text
        title, status = ("Thinking", "pending") if thinks else ("Reasoning", "done")
        about = {"title": title, "status": status}
        content = markdown(answer.reasoning)
        shown.append({"role": "assistant", "content": content, "metadata": about})
    if answer.text or not answer.reasoning.strip():
        nothing = "…" if answer.is_running else "*(empty)*"
        shown.append({"role": "assistant", "content": markdown(answer.text) or nothing})
    return shown


def facts_of(session: AsyncSession | None, found: Sequence[Round], most: int) -> dict[str, Any]:
    """Returns what the page's JavaScript needs to know of a session.

    Args:
        session: the session; None: a new chat.
        found: all rounds of its conversation.
        most: number of the last rounds that are shown.
    """
    return {
        "session": "" if session is None else session.id,
        "title": "New chat",
        "running": False,
        "first": max(0, len(found) - most),
        "rounds": [
            {"number": one.number, "question": one.question.text,
             "reply": one.answer and one.answer.text, "figures": (one.answer or Answer()).figures}
            for one in found[-most:]
        ],
        "ending": False,
        "status": "",
        "unanswered": "",
    }  # fmt: skip


def listed(sessions: Sequence[SessionInfo], costs: Mapping[str, Any], more: bool) -> str:
    """Returns sessions as JSON for the side panel, by day, the pinned ones first.

    Args:
        sessions: the sessions, the last used first.
        costs: by id, the `Forecast` of their next turn.
        more: whether there are further ones.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(sessions, key=lambda one: not one.pinned):
        entry: dict[str, Any] = {"id": one.id, "title": one.title[:200] or one.name}
        entry["detail"] = " · ".join(filter(None, (_cost(one, costs), public_model(one.model))))
        entry["running"] = bool(one.busy) or one.state not in (State.IDLE, State.CLOSED)
        groups.setdefault("Pinned" if one.pinned else _day(one), []).append(entry)
    found = [{"name": name, "sessions": entries} for name, entries in groups.items()]
    return json.dumps({"groups": found, "more": more})


def _day(one: SessionInfo) -> str:
    days = (datetime.now().date() - one.last_used.astimezone().date()).days
    names = {0: "Today", 1: "Yesterday"}
    return names.get(max(0, days)) or ("Last 7 days" if days < 7 else f"{one.last_used:%B %Y}")


def _cost(one: SessionInfo, costs: Mapping[str, Any]) -> str:
    """Returns where the KV of a session is, and the predicted time to the next first token."""
    cost = costs.get(one.id)
    if cost is None or not one.tokens:
        return one.snippet[:200]
    at = cost.residence
    places = ((at.device, "memory"), (at.host, "host memory"), (at.disk, "disk"))
    place = next((name for tokens, name in places if tokens >= one.tokens - 1), "not cached")
    return f"{place} · {latency(cost.ttft)}" if cost.ttft else place
