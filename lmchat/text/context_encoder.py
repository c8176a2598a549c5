"""Encoding of text that follows given tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from lmchat.text.marks import Marks
from lmchat.text.recent import Recent
from lmchat.text.tokenizer import Tokenizer

# Tokens of context: enough for any tokenizer to choose the next token as in one piece.
_TAIL = 24
_MOST_CHARACTERS = 16 << 20  # of the pieces whose ids are cached
_OVERHEAD = 1024  # what an entry of the cache costs, in the same unit


class ContextEncoder:
    """Encodes pieces of a rendering after the transcript they follow; the cost is the piece's.

    Pieces recur from turn to turn, so their ids are cached.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: Recent[tuple[str, bytes, tuple[int, ...]], array[int]] = Recent(
            _MOST_CHARACTERS
        )

    def encode(self, before: Sequence[int], piece: str, marks: Marks) -> list[int]:
        """Returns the ids of `piece` after the tokens `before`.

        Text that is marked as plain gives no special tokens.
        """
        if not piece:
            return []
        tail = tuple(before[-_TAIL:])
        key = (marks.begin + marks.end, digest_of(piece), tail)
        known = self._known.get(key)
        if known is None:
            known = array("i", self._encode(tail, piece, marks))
            self._known.put(key, known, len(piece) + _OVERHEAD)
        return known.tolist()

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


def digest_of(text: str) -> bytes:
    """Returns a digest, by which caches have a long text without keeping it."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
