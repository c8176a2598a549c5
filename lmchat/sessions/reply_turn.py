"""Builds the turn of a reply from its plan and tokens, when it ends or is recovered."""

from __future__ import annotations

from collections.abc import Sequence

from lmchat.generation.parts import Delta, PartsLog
from lmchat.generation.reply import Outcome, Reply
from lmchat.sessions.planner import Plan
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn, TurnTree
from lmchat.text.replies.reply_parser import ReplyParser


def tell_preceding(log: PartsLog, tree: TurnTree, parent: int | None, user: Turn | None) -> None:
    """Lets readers of a running reply find the turns before it: those up to `parent`, and a new
    question."""

    def preceding() -> tuple[Turn, ...]:
        return (*tree.path(parent), *(() if user is None else (user,)))

    log.preceding = preceding
    log.dropped = lambda: tuple(tree.dropped(preceding()))


def resumed_ids(plan: Plan) -> tuple[int, ...]:
    """Returns the tokens that a continued reply starts with, without the stop token."""
    extends = plan.extends
    return extends.token_ids[: len(extends.token_ids) - extends.stopped] if extends else ()


def resumed_parts(
    runtime: Runtime, record: SessionRecord, plan: Plan, parser: ReplyParser
) -> tuple[Delta, ...]:
    """Returns what a continued reply had before, as deltas; nothing for a new reply.

    Args:
        runtime: the model.
        record: the session.
        plan: the plan of the reply.
        parser: its parser. It takes the tokens before it as shown, also those of the last one's
            text that a stop string has cut off.
    """
    extends = plan.extends
    if extends is None:
        return ()
    if plan.effective.stop_strings:  # which hold text back
        parser = parser_of(runtime, record, plan, stop_strings=())
    text = _longer(parser.text, extends.text)
    reasoning = _longer(parser.reasoning, extends.reasoning)
    return whole(text, reasoning, resumed_ids(plan))


def _longer(parsed: str, stored: str) -> str:
    """Returns the text so far: `stored` if it has what the parser holds back, half a marker. Half a
    character at its end is not shown."""
    return stored if len(stored.rstrip("\ufffd")) > len(parsed) else parsed


def whole(text: str, reasoning: str, token_ids: tuple[int, ...]) -> tuple[Delta, ...]:
    """Returns a reply as deltas, the first of them with all tokens."""
    if not reasoning:
        return (Delta("text", text, token_ids),)
    return (Delta("reasoning", reasoning, token_ids), Delta("text", text))


def reply_of(turn: Turn) -> Reply:
    """Returns a stored reply as a `Reply`."""
    return Reply(
        text=turn.text,
        reasoning=turn.reasoning,
        token_ids=list(turn.token_ids),
        finish_reason=turn.finish_reason,
        usage=turn.usage,
        timings=turn.timings,
        error=turn.error,
        turn=turn,
    )


_CUT = ("cancelled", "interrupted", "error")


def is_cut(reply: Turn) -> bool:
    """Returns whether a reply ended before its end: it was stopped, failed, or its process died."""
    most = reply.settings.get("max_new_tokens")
    is_full = most is not None and reply.usage.completion_tokens >= most
    return reply.finish_reason in _CUT and not is_full


def parser_of(
    runtime: Runtime,
    record: SessionRecord,
    plan: Plan,
    stop_strings: Sequence[str] | None = None,
) -> ReplyParser:
    """Returns the parser for the tokens to come. `stop_strings` override those of the plan."""
    user = plan.user or _asked(record, plan)
    return ReplyParser(
        runtime.tokenizer,
        reasoning=runtime.builder.reasoning,
        in_reasoning=runtime.builder.starts_in_reasoning(user.token_ids),
        stop_strings=plan.effective.stop_strings if stop_strings is None else stop_strings,
        resume=resumed_ids(plan),
        context=user.token_ids if runtime.builder.info.kind == "none" else (),
    )


def _asked(record: SessionRecord, plan: Plan) -> Turn:
    """Returns the user turn of a continued or repeated reply."""
    user = plan.extends.parent if plan.extends else plan.parent
    made = (turn for turn in plan.past if turn.id == user)
    return next(made, None) or record.tree.get(user or 0)


def reply_id(record: SessionRecord, plan: Plan) -> int:
    """Returns the id of the reply to come.

    A continued reply that has children stays unchanged, and the longer one becomes its sibling.
    """
    extends, tree = plan.extends, record.tree
    if extends is not None and (extends.id not in tree or not tree.children(extends.id)):
        return extends.id
    return tree.new_id()


def reply_turn(
    runtime: Runtime, plan: Plan, parser: ReplyParser, outcome: Outcome, turn_id: int
) -> Turn:
    """Returns the reply as a turn."""
    extends, stopped = plan.extends, outcome.stopped
    ids = tuple(outcome.token_ids)
    if extends is not None:
        if not ids:
            return extends
        ids = resumed_ids(plan) + ids
    raw = runtime.tokenizer.raw(ids[: len(ids) - stopped])
    message = runtime.builder.reply_message(parser.text, parser.reasoning, raw)
    prompt = extends.prefix_length if extends else plan.length
    return Turn(
        id=turn_id,
        parent=extends.parent if extends else plan.user.id if plan.user else plan.parent,
        role="assistant",
        text=parser.text,
        message=message,
        token_ids=ids,
        prefix_length=prompt,
        length=prompt + len(ids),
        reasoning=parser.reasoning,
        finish_reason=outcome.finish_reason,
        stopped=stopped,
        error=outcome.error,
        usage=outcome.usage,
        timings=outcome.timings,
        settings=plan.effective.stored,
        metadata={**(extends.metadata if extends else {}), **plan.metadata},
    )
