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
        self.tokenizer = tokenizer
        self._known: Recent[tuple[str, bytes, tuple[int, ...]], array[int]] = Recent(
            _MOST_CHARACTERS
        )

    def encode(self, before: Sequence[int], piece: str, marks: Marks) -> list[int]:
        """Returns the ids of `piece` after the tokens `before`.

        Text that is marked as plain gives no marks of the template.
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

    def encode_reply(self, before: Sequence[int], text: str, lead: str = "") -> list[int]:
        """Returns the ids of the text of a reply whose tokens are unknown.

        It gives no marks of the template but those that replies have themselves.

        Args:
            before: the tokens before it.
            text: the text.
            lead: white space before the text.
        """
        marks = Marks([text])
        parts = self.tokenizer.own_parts(lead + text)
        parts[::2] = [f"{marks.begin}{part}{marks.end}" if part else "" for part in parts[::2]]
        return self.encode(before, "".join(parts), marks)

    def _encode(self, before: Sequence[int], piece: str, marks: Marks) -> list[int]:
        context = self.tokenizer.raw(before) if before else ""
        ids: list[int] = []
        for part, plain in marks.split(piece):
            ids += self.tokenizer.encode_after(context, part, parse_special=not plain)
            # After plain text its last character is enough context, and spells nothing.
            context = part[-1] if plain else context + part
        return ids


def digest_of(text: str) -> bytes:
    """Returns a digest, by which caches have a long text without keeping it."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
