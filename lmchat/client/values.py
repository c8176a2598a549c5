"""JSON objects of a server as the value types of `lmchat`. Unknown fields are ignored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from lmchat.client.http import error_of
from lmchat.errors import Error
from lmchat.generation.parts import Delta
from lmchat.generation.reply import Reply
from lmchat.generation.settings import MINUS_INFINITY
from lmchat.generation.state import State
from lmchat.interface.engine import SessionInfo
from lmchat.interface.session import Branch
from lmchat.store.turns import Timings, Turn, Usage
from lmchat.text.reasoning import ReasoningFormat, ThinkingSwitch
from lmchat.text.template_class import TemplateInfo
from turbomind import GroupStats, RankStats, Stats, TokenLogprobs
from turbomind.engine.tiers import TierStats

Value = TypeVar("Value")


def known(kind: type[Value], data: Mapping[str, Any]) -> Value:
    """Returns a dataclass of the fields that it has."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})


def settings_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings, with the numbers of `logit_bias` that `as_json` made strings."""
    found = dict(data)
    if isinstance(found.get("logit_bias"), Mapping):
        found["logit_bias"] = {
            int(key): -math.inf if value == MINUS_INFINITY else value
            for key, value in found["logit_bias"].items()
        }
    return found


def turn_of(data: Mapping[str, Any]) -> Turn:
    """Returns a turn that was sent with all details."""
    return Turn(
        id=data["id"],
        parent=data["parent"],
        role=data["role"],
        text=data["text"],
        message=data.get("message", {"role": data["role"], "content": data["text"]}),
        token_ids=tuple(data.get("token_ids", ())),
        prefix_length=data.get("prefix_length", 0),
        length=data["length"],
        reasoning=data.get("reasoning", ""),
        finish_reason=data.get("finish_reason", ""),
        stopped=data.get("stopped", False),
        error=_error(data),
        usage=known(Usage, data.get("usage", {})),
        timings=known(Timings, data.get("timings", {})),
        settings=settings_of(data.get("settings", {})),
        metadata=data.get("metadata", {}),
        dropped_before=data.get("dropped_before"),
    )


def _error(data: Mapping[str, Any]) -> Error | None:
    message = data.get("error")
    return None if message is None else error_of(message, data.get("error_code"), None)


def branch_of(data: Mapping[str, Any]) -> Branch:
    """Returns a branch."""
    return Branch(
        data["index"], turn_of(data["turn"]), turn_of(data["reply"]), data["leaf"], data["active"]
    )


def reply_of(data: Mapping[str, Any], turn: Turn | None = None) -> Reply:
    """Returns a finished reply, whose stored turn is `turn`."""
    return Reply(
        text=data["text"],
        reasoning=data["reasoning"],
        token_ids=list(data.get("token_ids", ())),
        finish_reason=data["finish_reason"],
        usage=known(Usage, data["usage"]),
        timings=known(Timings, data["timings"]),
        error=_error(data),
        logprobs=logprobs_of(data.get("logprobs", ())),
        turn=turn,
        notices=tuple(data.get("notices", ())),
        others=tuple(reply_of(one) for one in data.get("others", ())),
    )


def logprobs_of(data: Iterable[Mapping[str, Any]]) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of tokens."""
    return tuple(
        TokenLogprobs(one["logprob"], tuple((i, value) for i, value in one["top"])) for one in data
    )


def delta_of(data: Mapping[str, Any], seconds: float) -> Delta:
    """Returns a delta that came at this time."""
    return Delta(
        "reasoning" if data["kind"] == "reasoning" else "text",
        data["text"],
        tuple(data.get("token_ids", ())),
        logprobs_of(data.get("logprobs", ())),
        data.get("choice", 0),
        seconds,
    )


def info_of(data: Mapping[str, Any], owner: str) -> SessionInfo:
    """Returns an entry of a list of sessions."""
    return SessionInfo(
        id=data["id"],
        name=data["name"],
        owner=owner,
        title=data["title"],
        tags=tuple(data["tags"]),
        turns=data["turns"],
        tokens=data["tokens"],
        pinned=data["pinned"],
        created=datetime.fromisoformat(data["created"]),
        last_used=datetime.fromisoformat(data["last_used"]),
        model=data["model"],
        fingerprint="",
        busy="another process" if data["busy"] else "",
        snippet=data.get("snippet", ""),
        revision=data["revision"],
        metadata=data["metadata"],
        state=State(data["state"]),
    )


def template_of(data: Mapping[str, Any]) -> TemplateInfo:
    """Returns the class of the model's chat template."""
    found = dict(data)
    if found.get("reasoning") is not None:
        reasoning = dict(found["reasoning"])
        reasoning["skip"] = tuple(reasoning.get("skip", ()))
        found["reasoning"] = known(ReasoningFormat, reasoning)
    if found.get("switch") is not None:
        found["switch"] = known(ThinkingSwitch, found["switch"])
    found["notes"] = tuple(found.get("notes", ()))
    return known(TemplateInfo, found)


def stats_of(data: Mapping[str, Any]) -> Stats:
    """Returns the engine's counters."""
    tiers = {name: known(TierStats, one) for name, one in data.get("tiers", {}).items()}
    groups = tuple(known(GroupStats, one) for one in data.get("groups", ()))
    ranks = tuple(known(RankStats, one) for one in data.get("ranks", ()))
    return known(Stats, {**data, "tiers": tiers, "groups": groups, "ranks": ranks})
