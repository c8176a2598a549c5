"""Encoding of text that follows given tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lmchat.text.marks import Marks
from lmchat.text.recent import Recent
from lmchat.text.tokenizer import Tokenizer

# Tokens of context: enough for any tokenizer to choose the next token as in one piece.
_TAIL = 24
_LONG = 2000  # characters; of longer pieces only those of the last turns are cached
_MOST_LONG = 64


class ContextEncoder:
    """Encodes pieces of a rendering after the transcript they follow; the cost is the piece's.

    Pieces recur from turn to turn, so their ids are cached.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: Recent[tuple[str, str, tuple[int, ...]], list[int]] = Recent()
        self._long: Recent[tuple[str, str, tuple[int, ...]], list[int]] = Recent(_MOST_LONG)

    def encode(self, before: Sequence[int], piece: str, marks: Marks) -> list[int]:
        """Returns the ids of `piece` after the tokens `before`.

        Text that is marked as plain gives no special tokens.
        """
        if not piece:
            return []
        key = (marks.begin + marks.end, piece, tuple(before[-_TAIL:]))
        known = self._known if len(piece) <= _LONG else self._long
        return known.get(key) or known.put(key, self._encode(key[2], piece, marks))

    def spells_special(self, text: str) -> bool:
        """Returns whether encoding `text` alone gives a special token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return not self._tokenizer.special_ids.isdisjoint(ids)

    def _encode(self, before: Sequence[int], piece: str, marks: Marks) -> list[int]:
        context = self._tokenizer.raw(before) if before else ""
        ids: list[int] = []
        for part, plain in marks.split(piece):
            ids += self._tokenizer.encode_after(context, part, parse_special=not plain)
            # After plain text its last character is enough context, and spells nothing.
            context = part[-1] if plain else context + part
        return ids
