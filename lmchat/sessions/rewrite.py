"""Rebuilt conversations: new turns with the same texts, as a branch.

They follow from a changed system prompt, a conversation whose oldest turns were dropped, and
another tokenizer. The old turns stay in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmchat.errors import InvalidRequest
from lmchat.sessions.planner import Planner
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Message, Turn, TurnTree


@dataclass(frozen=True)
class Round:
    """A user turn, and its reply if there is one."""

    user: Turn
    reply: Turn | None


def system_of(path: Sequence[Turn]) -> str | None:
    """Returns the text of the system prompt, or None."""
    return path[0].text if path and path[0].role == "system" else None


def rounds_of(path: Sequence[Turn]) -> list[Round]:
    """Returns the user turns of a conversation with their replies."""
    return [
        Round(turn, path[at + 1] if at + 1 < len(path) else None)
        for at, turn in enumerate(path)
        if turn.role == "user"
    ]


def rebuilt(
    runtime: Runtime,
    record: SessionRecord,
    system: str | None,
    rounds: Sequence[Round],
    *,
    encode: bool = False,
) -> list[Turn]:
    """Returns new turns, not in the record's tree: the system prompt, if any, then the rounds.

    Args:
        runtime: the engine's runtime.
        record: the session.
        system: the system prompt, or None.
        rounds: user turns and replies.
        encode: whether replies get the tokens of their text. Default: they have the same tokens.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    planner = Planner(runtime, record)
    made: list[Turn] = []
    if system is not None:
        made.append(system_turn(record.tree, system))
        runtime.builder.check_system(made)
    for turn in rounds:
        user = planner.user_after(made, turn.user.text)[0]
        user = replace(user, dropped_before=turn.user.dropped_before)
        made.append(replace(user, metadata=turn.user.metadata))
        if turn.reply is not None:
            made.append(_copy(runtime, record, turn.reply, made[-1], encode))
    return made


def with_turns(record: SessionRecord, made: Sequence[Turn]) -> SessionRecord:
    """Returns the record with these turns added, at the last of them."""
    return record.changed(made, leaf=made[-1].id if made else None)


def system_turn(tree: TurnTree, text: str) -> Turn:
    """Returns a system prompt as a new root turn of a session with this tree."""
    message: Message = {"role": "system", "content": text}
    return Turn(tree.new_id(), None, "system", text, message)


def _copy(runtime: Runtime, record: SessionRecord, reply: Turn, user: Turn, encode: bool) -> Turn:
    if encode:
        reply = _encoded(runtime, reply)
    return replace(
        reply,
        id=record.tree.new_id(),
        parent=user.id,
        prefix_length=user.length,
        length=user.length + len(reply.token_ids),
    )


def _encoded(runtime: Runtime, reply: Turn) -> Turn:
    """Returns the reply with this tokenizer's tokens for its text, without its reasoning."""
    try:
        ids = tuple(runtime.builder.reply_tokens(reply.text))
    # Half a character, which a model can generate but a tokenizer cannot encode.
    except InvalidRequest:
        text = reply.text.encode("utf-8", "replace").decode()
        ids = tuple(runtime.builder.reply_tokens(text))
    return replace(
        reply,
        token_ids=ids,
        stopped=False,
        message=runtime.builder.reply_message(reply.text, "", reply.text),
        settings=runtime.identity.marked(reply.settings),
    )
