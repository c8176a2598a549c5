"""Sessions, turns and replies as JSON objects, without what is this machine's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lmchat.engine import SessionInfo
from lmchat.generation.reply import Reply
from lmchat.public_text import public_message, public_model, public_notice, public_summary
from lmchat.sessions.branches import Branch
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn
from turbomind import Forecast


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


def whole(session: Session, *, token_ids: bool = False) -> dict[str, Any]:
    """Returns a session with the turns of its conversation. It decodes these, which takes time."""
    record, turns = session._record, session.turns
    return {
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
        "system": session.system,
        "settings": dict(record.settings),
        "template_variables": dict(record.template_variables),
        "history": record.history,
        "overflow": record.overflow,
        "unanswered": session.unanswered,
        "interrupted": session.interrupted,
        "notices": [public_notice(text) for text in record.notices],
        "turns": [of_turn(turn, token_ids=token_ids) for turn in turns],
    }


def of_turn(turn: Turn, *, token_ids: bool = False) -> dict[str, Any]:
    """Returns a turn."""
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
            "settings": dict(turn.settings),
            "error": None if turn.error is None else public_message(turn.error),
        }
    if token_ids:
        found["token_ids"] = list(turn.token_ids)
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
    }
    if token_ids:
        found["token_ids"] = list(reply.token_ids)
    if reply.logprobs:
        found["logprobs"] = [
            {"logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in reply.logprobs
        ]
    return found


def stored_reply(turn: Turn, *, token_ids: bool = False) -> dict[str, Any]:
    """Returns the reply of a stored turn."""
    found = of_turn(turn, token_ids=token_ids)
    names = ("text", "reasoning", "finish_reason", "usage", "timings", "error")
    reply = {name: found[name] for name in names}
    more = {"token_ids": found["token_ids"]} if token_ids else {}
    return {"turn": turn.id, **reply, "notices": [], **more}


def of_branches(found: Sequence[Branch]) -> list[dict[str, Any]]:
    """Returns the branches at a turn."""
    return [
        {
            "index": one.index,
            "turn": of_turn(one.turn),
            "reply": of_turn(one.reply),
            "leaf": one.leaf,
            "active": one.active,
        }
        for one in found
    ]
