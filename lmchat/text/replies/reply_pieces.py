"""Positions of replies in a rendering, and the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmchat.store.turns import Message, Turn
from lmchat.text.marks import Found, Marks, around
from lmchat.text.reasoning import REASONING_FIELDS
from lmchat.text.replies.reply_tokens import ReplyTokens


@dataclass(frozen=True)
class Piece:
    """A part of a rendering that a reply's own tokens replace."""

    start: int
    end: int
    ids: list[int]


@dataclass(frozen=True)
class Sought:
    """A text of a reply between two marks: its visible text (`last`) or its reasoning."""

    text: str
    marks: tuple[str, str]
    last: bool


def mark_reply(turn: Turn, marks: Marks, *, all_texts: bool) -> tuple[Message, list[Sought]]:
    """Returns the reply's message with marks around its texts, white space at their ends outside.

    Without `all_texts` only around visible text that is there.
    """
    message = dict(turn.message)
    sought: list[Sought] = []
    thought = turn.reasoning.strip()
    if thought and all_texts:
        for field in (*REASONING_FIELDS, "content"):
            value = message.get(field)
            if isinstance(value, str) and thought in value:
                found = Sought(thought, (marks.take(), marks.take()), last=False)
                message[field] = around(value, thought, *found.marks, last=False)
                sought.append(found)
                break
    content = message.get("content")
    if isinstance(content, str):
        text = turn.text.strip()
        if text not in content:
            text = content.strip() if not sought else ""
        if text or all_texts:
            found = Sought(text, (marks.take(), marks.take()), last=True)
            message["content"] = around(content, text, *found.marks, last=True)
            sought.append(found)
    return message, sought


def pieces_of(
    reply: ReplyTokens, found: Sequence[tuple[Sought, Found]], text: str, header: str
) -> list[Piece]:
    """Returns the parts of the rendering `text` that the reply's tokens replace.

    `found` holds the positions of its texts, `header` is the template's text in front of a
    reply to come. A text that the template changed counts as the template's.
    """
    found = [pair for pair in found if text[pair[1].start : pair[1].end] == pair[0].text]
    for sought, place in sorted(found, key=lambda pair: not pair[0].last):
        raw = reply.raw
        at = raw.rfind(sought.text) if sought.last else raw.find(sought.text)
        start = place.start - at
        if at < 0 or start < 0 or not text.startswith(raw, start):
            continue
        # All of it is there. The text in front of it may still be the template's own.
        if at == 0 or text.endswith(header, 0, start):
            return [Piece(start, start + len(raw), reply.ids)]
    pieces: list[Piece] = []
    for sought, place in sorted(found, key=lambda pair: pair[1].start):
        span = reply.find(sought.text, last=sought.last) if sought.text else None
        if span is None or not span.ids:
            continue
        start, end = place.start + span.cut_before, place.end - span.cut_after
        if text.endswith(span.before, 0, start):
            start -= len(span.before)
        if text.startswith(span.after, end):
            end += len(span.after)
        if not pieces or start >= pieces[-1].end:
            pieces.append(Piece(start, end, span.ids))
    return pieces
