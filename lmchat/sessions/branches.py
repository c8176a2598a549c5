"""Branches of a session: its user turns by number, the alternatives to each, and forks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from lmchat.errors import NotFound
from lmchat.interface.session import Branch
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn, TurnTree
from turbomind.params import wrong


def users(record: SessionRecord) -> list[Turn]:
    """Returns the user turns of the current conversation."""
    return [turn for turn in record.tree.path(record.leaf) if turn.role == "user"]


def user_turn(record: SessionRecord, turn: int) -> Turn:
    """Returns user turn number `turn`, from 0.

    Raises:
        InvalidRequest: there is none.
    """
    found = users(record)
    check_index("turn", turn, len(found))
    return found[turn]


def reply_turn(record: SessionRecord, turn_id: int) -> Turn:
    """Returns the reply with this id, of any branch.

    Raises:
        NotFound: there is none.
    """
    turn = record.tree.get(turn_id) if turn_id in record.tree else None
    if turn is None or turn.role != "assistant":
        raise NotFound(f"session {record.name!r} has no reply {turn_id}")
    return turn


def replies(record: SessionRecord) -> tuple[Turn, ...]:
    """Returns the replies of all branches, the oldest first."""
    tree = record.tree
    found = {turn.id: turn for end in tree.ends() for turn in tree.path(end)}
    return tuple(found[i] for i in sorted(found) if found[i].role == "assistant")


def branches(record: SessionRecord, turn: int) -> list[Branch]:
    """Returns the branches at user turn `turn`, oldest first.

    The number after the last turn selects the branches that `undo()` left.
    """
    tree, parent = record.tree, record.leaf
    path = {turn.id for turn in tree.path(record.leaf)}
    if turn != len(users(record)):
        parent = user_turn(record, turn).parent
    found = [
        (user, reply) for user in _alternatives(record, parent) for reply in tree.children(user.id)
    ]
    return [
        Branch(index, user, reply, tree.newest_leaf(reply.id).id, reply.id in path)
        for index, (user, reply) in enumerate(found)
    ]


def _alternatives(record: SessionRecord, parent: int | None) -> list[Turn]:
    """Returns the user turns under `parent`; at the root those under any system prompt."""
    tree = record.tree
    systems = [turn.id for turn in tree.children(None) if turn.role == "system"]
    parents = [None, *systems] if parent is None or parent in systems else [parent]
    return [turn for p in parents for turn in tree.children(p) if turn.role == "user"]


def forked(
    record: SessionRecord, name: str | None, at: int | None, after: int | None = None
) -> SessionRecord:
    """Returns a session with the first `at` rounds of the conversation (None: all), or with the
    conversation up to the reply `after`, of any branch.

    It has the same settings and tags and is in no store yet. An empty name is replaced there.
    """
    path = record.tree.path(record.leaf if after is None else reply_turn(record, after).id)
    if at is not None:
        questions = users(record)
        check_index("at", at, len(questions) + 1)
        if at < len(questions):
            path = path[: path.index(questions[at])]
    return SessionRecord(
        name=name or "",
        owner=record.owner,
        history=record.history,
        settings=copy.deepcopy(record.settings),
        template_variables=copy.deepcopy(record.template_variables),
        created=record.created,
        tags=record.tags,
        metadata=record.metadata,
        overflow=record.overflow,
        adapter=record.adapter,
        model=record.model,
        fingerprint=record.fingerprint,
        tokenizer=record.tokenizer,
        template=record.template,
        loading=record.loading,
        imported=record.imported,
        tree=_with_dropped(record.tree, path),
        leaf=path[-1].id if path else None,
    )


def _with_dropped(tree: TurnTree, path: Sequence[Turn]) -> TurnTree:
    """Returns a tree of a conversation, and of the older ones that were dropped before it."""
    turns = {turn.id: turn for turn in path}
    for turn in tree.dropped(path):
        turns[turn.id] = turn
        if turn.parent is not None and turn.parent not in turns:  # a system prompt
            turns[turn.parent] = tree.get(turn.parent)
    return TurnTree.of(turns[i] for i in sorted(turns))


def check_index(what: str, index: object, count: int) -> None:
    """Raises InvalidRequest unless `index` is an integer from 0 to `count` - 1."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        expected = f"an integer from 0 to {count - 1}" if count else "nothing: there is none"
        raise wrong(what, index, expected)
