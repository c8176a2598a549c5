"""Incremental decoding: the text of tokens as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmchat.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"
# A UTF-8 character has at most 4 bytes, so this many later tokens decide whether a U+FFFD stays.
_DECIDED = 4
_MOST_HELD = 16  # tokens that are held back before the ones that are decided are released


class IncrementalDetokenizer:
    """An incremental decoder.

    The deltas joined, `flush()` included, equal `decode` of all ids at once; each costs the work of
    its own tokens. Nothing is shown before it is final: an unfinished UTF-8 character waits for its
    rest, and raw bytes of a byte-fallback vocabulary wait for the end of their run, because one
    invalid byte turns the whole run into U+FFFD. With a decoder that may put bytes together in
    another way, all text waits while it ends with U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Byte-level vocabularies: text is a plain function of bytes.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Others: a token's text can depend on the token before it (a leading space), so pending
        # tokens are decoded after the last one shown.
        words = (i for i in reversed(context) if i not in self._skip and tokenizer.is_word(i))
        last = next(words, None)
        self._shown: list[int] = [] if last is None else [last]
        self._shown_text = self._decode(self._shown)
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that is final with them, maybe empty."""
        return "".join([self._push(i) for i in ids if i not in self._skip])

    def flush(self) -> str:
        """Returns the text still held back, at the end of the tokens."""
        return self._utf8.decode(b"", final=True) + self._release(len(self._pending))

    def _push(self, token_id: int) -> str:
        raw = self._tokenizer.bytes_of(token_id)
        if raw is not None:
            return self._utf8.decode(raw)
        if not self._tokenizer.has_token(token_id):
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        if self._tokenizer.splits_characters and self._decode_pending().endswith(_BROKEN):
            return self._release(self._decided())
        return self._release(len(self._pending))

    def _decided(self) -> int:
        """Returns how many of many pending tokens have a text that no later token changes.

        This bounds the work of a reply that is no UTF-8.
        """
        count = len(self._pending) - _DECIDED
        if len(self._pending) < _MOST_HELD:
            return 0
        return count if self._decode_pending().startswith(self._decode_pending(count)) else 0

    def _release(self, count: int) -> str:
        """Returns the text of the first pending tokens, which are shown with it."""
        if not count:
            return ""
        text = self._decode_pending(count)[len(self._shown_text) :]
        if text or not self._shown:
            self._shown = [self._pending[count - 1]]
            self._shown_text = self._decode(self._shown)
        del self._pending[:count]
        return text

    def _decode_pending(self, count: int | None = None) -> str:
        return self._decode(self._shown + self._pending[:count])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
