"""Sessions, turns and replies as JSON objects, without what is this machine's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lmchat.generation.reply import Reply
from lmchat.generation.settings import as_json
from lmchat.interface.engine import SessionInfo
from lmchat.interface.session import Branch
from lmchat.public_text import public_message, public_model, public_notice, public_summary
from lmchat.server.errors import code_of
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn
from turbomind import Forecast, TokenLogprobs


def listed(info: SessionInfo, forecast: Forecast | None = None) -> dict[str, Any]:
    """Returns a session of a list, with its residence if that is known."""
    one = public_summary(info)
    found: dict[str, Any] = {
        "id": one.id,
        "object": "session",
        "name": one.name,
        "title": one.title,
        "tags": list(one.tags),
        "metadata": dict(one.metadata),
        "pinned": one.pinned,
        "state": one.state.value,
        "busy": bool(one.busy),
        "turns": one.turns,
        "tokens": one.tokens,
        "created": one.created.isoformat(),
        "last_used": one.last_used.isoformat(),
        "model": one.model,
        "revision": one.revision,
    }
    if one.snippet:
        found["snippet"] = one.snippet
    if forecast is not None:
        found |= predicted(forecast)
    return found


def predicted(forecast: Forecast) -> dict[str, Any]:
    """Returns where the KV of a session is, and the predicted time to its next first token."""
    return {"residence": asdict(forecast.residence), "predicted_ttft": forecast.ttft}


def whole(
    session: Session,
    *,
    token_ids: bool = False,
    details: bool = False,
    known: int | None = None,
    dropped: bool = False,
) -> dict[str, Any]:
    """Returns a session with the turns of its conversation. It decodes these, which takes time.

    With `known` it has only the turns after that one, if the conversation has it; with `dropped`
    also the turns that were dropped from its prompt.
    """
    record = session._record
    turns = record.tree.path(record.leaf)
    system = next((turn.text for turn in turns[:1] if turn.role == "system"), None)
    start = next((i for i, turn in enumerate(turns, 1) if turn.id == known), 0)
    turns = turns[start:]
    more: dict[str, Any] = {"turns_after": known} if start else {}
    if dropped:
        more["dropped"] = [
            of_turn(turn, token_ids=token_ids, details=details) for turn in session.dropped
        ]
    return more | {
        "id": session.id,
        "object": "session",
        "name": record.name,
        "title": record.title,
        "tags": list(record.tags),
        "metadata": dict(record.metadata),
        "pinned": record.pinned,
        "state": session.state.value,
        "tokens": session.length,
        "created": record.created.isoformat(),
        "last_used": record.last_used.isoformat(),
        "model": public_model(record.model),
        "revision": record.revision,
        "system": system,
        "settings": as_json(record.settings),
        "template_variables": dict(record.template_variables),
        "history": record.history,
        "overflow": record.overflow,
        "unanswered": session.unanswered,
        "interrupted": session.interrupted,
        "notices": [public_notice(text) for text in record.notices],
        "turns": [of_turn(turn, token_ids=token_ids, details=details) for turn in turns],
    }


def of_turn(turn: Turn, *, token_ids: bool = False, details: bool = False) -> dict[str, Any]:
    """Returns a turn. `details` adds its tokens and all else that a `Turn` has."""
    found: dict[str, Any] = {
        "id": turn.id,
        "parent": turn.parent,
        "role": turn.role,
        "text": turn.text,
        "length": turn.length,
    }
    if turn.role == "assistant":
        found |= {
            "reasoning": turn.reasoning,
            "finish_reason": turn.finish_reason,
            "usage": asdict(turn.usage),
            "timings": asdict(turn.timings),
            "settings": as_json(turn.settings),
            "error": None if turn.error is None else public_message(turn.error),
            "error_code": None if turn.error is None else code_of(turn.error),
        }
    if turn.dropped_before is not None:
        found["dropped_before"] = turn.dropped_before
    if token_ids or details:
        found["token_ids"] = list(turn.token_ids)
    if details:
        found |= {
            "prefix_length": turn.prefix_length,
            "stopped": turn.stopped,
            "message": dict(turn.message),
            "metadata": dict(turn.metadata),
        }
    return found


def of_reply(reply: Reply, *, token_ids: bool = False) -> dict[str, Any]:
    """Returns a finished reply. `turn` is the id of its turn; None: it was stopped before its first
    token and is not stored."""
    found: dict[str, Any] = {
        "turn": None if reply.turn is None else reply.turn.id,
        "text": reply.text,
        "reasoning": reply.reasoning,
        "finish_reason": reply.finish_reason,
        "usage": asdict(reply.usage),
        "timings": asdict(reply.timings),
        "notices": [public_notice(text) for text in reply.notices],
        "error": None if reply.error is None else public_message(reply.error),
        "error_code": None if reply.error is None else code_of(reply.error),
    }
    if token_ids:
        found["token_ids"] = list(reply.token_ids)
    if reply.logprobs:
        found["logprobs"] = of_logprobs(reply.logprobs)
    if reply.others:
        found["others"] = [of_reply(one, token_ids=token_ids) for one in reply.others]
    return found


def of_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Returns the log-probabilities of tokens."""
    return [{"logprob": one.logprob, "top": [list(pair) for pair in one.top]} for one in logprobs]


def of_branches(found: Sequence[Branch], *, details: bool = False) -> list[dict[str, Any]]:
    """Returns the branches at a turn."""
    return [
        {
            "index": one.index,
            "turn": of_turn(one.turn, details=details),
            "reply": of_turn(one.reply, details=details),
            "leaf": one.leaf,
            "active": one.active,
        }
        for one in found
    ]
