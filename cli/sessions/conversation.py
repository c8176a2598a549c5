"""Prints a conversation: its rounds, its token ids, its branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.text import Text

from lmchat.store.turns import Turn

from ..terminal.blocks import BlockStream
from ..terminal.layout import wrap
from ..terminal.markdown import render
from ..terminal.screen import Screen
from ..terminal.tables import columns
from ..terminal.texts import EXCERPT, clean, counted, excerpt

_ENDS = {
    "cancelled": "stopped",
    "length": "cut at its limit",
    "error": "ended by an error",
    "interrupted": "interrupted: the process ended",
}
_HEAD = "bold"
DROPPED = "above: no longer in the prompt, because the context was full"
"""What is said below rounds that were dropped."""

BranchLine = tuple[bool, int, int, str, str]
"""A branch: is it active, number of its question, its own number (both from 1), question, reply."""


def conversation(
    screen: Screen,
    turns: Sequence[Turn],
    count: int | None = None,
    *,
    dropped: Sequence[Turn] = (),
    reasoning: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Prints the last rounds, numbered, and the system prompt before the first one.

    Args:
        screen: Where to print.
        turns: The conversation.
        count: Number of rounds; None: all.
        dropped: Turns that were dropped from the prompt. They are printed above the others, without
            numbers, and a line follows them.
        reasoning: Print reasoning.
        stopped: Called before each turn; True ends the output.
    """
    number = _first(turns, count)[1]
    more = None if count is None else max(0, count - sum(turn.role == "user" for turn in turns))
    above = rounds(dropped, more)
    marked = [*above, *([None] if above else []), *rounds(turns, count)]
    for at, turn in enumerate(marked):
        if stopped():
            return
        if turn is None:
            screen.note(f"── {DROPPED} ──")
        elif turn.role == "user":
            number += at >= len(above)
            head = f"{number}> " if at >= len(above) else "> "
            lines = wrap(Text(clean(turn.text), style=_HEAD), max(1, screen.width - len(head)))
            screen.print(Text(head, style=_HEAD) + lines[0], *lines[1:])
        elif turn.role == "system":
            screen.note(f"system prompt: {clean(turn.text)}")
        else:
            _reply(screen, turn, reasoning)
    if not any(turn.role == "user" for turn in turns):
        screen.note("no question yet")


def rounds(turns: Sequence[Turn], count: int | None) -> Sequence[Turn]:
    """Returns the last `count` questions with their replies; None: all turns."""
    return turns[_first(turns, count)[0] :]


def _first(turns: Sequence[Turn], count: int | None) -> tuple[int, int]:
    """Returns the index of the last `count` questions, and the number of earlier questions."""
    questions = [i for i, turn in enumerate(turns) if turn.role == "user"]
    if count is None or count >= len(questions):
        return 0, 0
    return (questions[-count], len(questions) - count) if count else (len(turns), 0)


def _reply(screen: Screen, turn: Turn, reasoning: bool) -> None:
    if turn.reasoning and reasoning:
        screen.note(clean(turn.reasoning).strip())
        screen.print(Text())
    if screen.plain:
        screen.print(*(Text(line) for line in clean(turn.text).split("\n")))
    else:
        blocks = BlockStream()
        blocks.feed(turn.text.lstrip("\n"))
        for block in blocks.finish():
            screen.print(*render(block, screen.width, fold_code=False))
    if turn.finish_reason not in ("", "stop"):
        screen.note(f"({_ENDS.get(turn.finish_reason, clean(turn.finish_reason))})")
    screen.print(Text())


def tokens(
    screen: Screen,
    turns: Sequence[Turn],
    count: int | None = None,
    *,
    spelled: Callable[[int], str] = lambda _id: "",
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Prints the token ids of the last rounds, a paragraph per turn.

    Args:
        screen: Where to print.
        turns: The conversation.
        count: Number of rounds; None: all.
        spelled: Returns a text to print after a token id.
        stopped: Called before each token; True ends the output.
    """
    for turn in rounds(turns, count):
        screen.note(f"{turn.role}: {counted(len(turn.token_ids), 'token')}", _HEAD)
        line = Text()
        for token_id in turn.token_ids:
            if stopped():
                return
            line.append(str(token_id), "cyan")
            line.append(spelled(token_id) + " ")
        line.rstrip()
        screen.print(*(wrap(line, screen.width) if turn.token_ids else ()))


def branch_list(screen: Screen, found: Iterable[BranchLine]) -> None:
    """Prints branches, a line each; * marks the active ones."""
    arrow = " → " if screen.width >= 3 * EXCERPT // 2 else "\n→ "
    columns(
        screen,
        [
            (f"{'*' if active else ' '} {question} {number}", excerpt(text) + arrow + reply)
            for active, question, number, text, reply in found
        ],
        (_HEAD,),
    )
