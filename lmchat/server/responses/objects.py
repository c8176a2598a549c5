"""Response objects, from stored turns and from what a generation has returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmchat.errors import ContextFull, Error, InvalidRequest, Overloaded
from lmchat.server.errors import error_object
from lmchat.server.responses import ids, items
from lmchat.store.turns import Turn, Usage

RECORD = "response"
"""Key in a user turn's metadata of what the response repeats of its request."""

DELETED = "response_deleted"
"""Key in a reply's metadata that marks its response as deleted."""

_STATUS = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled"}
_INTERRUPTED = "the server ended during the reply; what was generated is kept"


def response_object(
    response_id: str,
    model: str,
    record: dict[str, Any],
    *,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    usage: Usage | None = None,
    error: dict[str, Any] | None = None,
    conversation: str | None = None,
) -> dict[str, Any]:
    """Returns a response.

    Args:
        response_id: its id.
        model: the served model's name.
        record: what it repeats of its request, with `created_at`.
        status: "queued", "in_progress", "completed", "incomplete", "cancelled" or "failed".
        output: its items.
        usage: token counts of a finished response.
        error: the error of a failed one.
        conversation: id of its conversation.
    """
    return {
        "id": response_id,
        "object": "response",
        "created_at": record.get("created_at", 0),
        "status": status,
        "background": record.get("background", False),
        "error": error,
        "incomplete_details": ({"reason": "max_output_tokens"} if status == "incomplete" else None),
        "instructions": record.get("instructions"),
        "max_output_tokens": record.get("max_output_tokens"),
        "model": model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": record.get("previous_response_id"),
        "conversation": {"id": conversation} if conversation else None,
        "reasoning": {"effort": None, "summary": None},
        "temperature": record.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": record.get("top_logprobs", 0),
        "top_p": record.get("top_p"),
        "truncation": record.get("truncation", "disabled"),
        "usage": None if usage is None else usage_object(usage),
        "metadata": record.get("metadata", {}),
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns token counts in the form of responses."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def status_of(finish_reason: str) -> str:
    """Returns the status of a response whose reply ended so."""
    return _STATUS.get(finish_reason, "failed")


def failure(error: BaseException | None) -> dict[str, Any]:
    """Returns the error of a failed response."""
    if error is None:
        return {"code": "server_error", "message": _INTERRUPTED}
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest | ContextFull):
        code = "invalid_prompt"
    return {"code": code, "message": error_object(error)["error"]["message"]}


def stored_response(session_id: str, model: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the response of the last turn of a conversation, which is a reply."""
    user, reply = turns[-2], turns[-1]
    record = dict(user.metadata.get(RECORD) or {})
    status = status_of(reply.finish_reason)
    error: Error | None = reply.error
    return response_object(
        ids.of_turn("resp", session_id, reply.id),
        model,
        record,
        status=status,
        output=items.of_reply(session_id, reply),
        usage=reply.usage,
        error=failure(error) if status == "failed" else None,
        conversation=ids.of_conversation(session_id) if record.get("conversation") else None,
    )


def is_chained(turns: Sequence[Turn]) -> bool:
    """Returns whether a reply is a response that belongs to no conversation."""
    record = turns[-2].metadata.get(RECORD)
    return record is not None and not record.get("conversation")
