"""The mapping between tokens of a reply and its characters."""

from __future__ import annotations

import codecs
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lmchat.text.recent import Recent
from lmchat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Span:
    """Tokens that spell a text: `ids`, and how their text differs from it at its two ends.

    `before` and `after` are white space that shares a token with the text and stays; `cut_before`
    and `cut_after` count characters of the text whose token does not belong to it.
    """

    ids: list[int]
    before: str = ""
    after: str = ""
    cut_before: int = 0
    cut_after: int = 0


def _decode(raw: list[bytes]) -> tuple[str, list[int]]:
    """Returns the text of the bytes, and its length at the end of each part."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    starts, length, inside = [0], 0, False
    for part in raw:
        if inside or not part.isascii():
            length += len(decoder.decode(part))
            inside = bool(decoder.getstate()[0])
        else:
            length += len(part)
        starts.append(length)
    text = b"".join(raw).decode(errors="replace")
    starts[-1] = len(text)
    return text, starts


def _share(text: str, count: int) -> list[str]:
    """Returns what each of `count` raw bytes adds: a character comes with its last byte."""
    lengths = [len(char.encode()) for char in text]
    if sum(lengths) != count:  # no UTF-8
        return [""] * (count - 1) + [text]
    return [
        part
        for char, length in zip(text, lengths, strict=True)
        for part in [*[""] * (length - 1), char]
    ]


def _put(pieces: list[str], places: list[int], text: str) -> None:
    """Adds a text to the pieces at these places, a share to each."""
    if text:
        for at, part in zip(places, _share(text, len(places)), strict=True):
            pieces[at] += part


class Speller:
    """Finds the text that each token adds, so that encoding the text gives the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_texts.values())
        self._spaced: Recent[int, bool] = Recent()

    def spell(
        self, context: Sequence[int], ids: Sequence[int], *, skip_special: bool = False
    ) -> tuple[str, list[int]]:
        """Returns the text and the offset of each token in it, and its whole length last."""
        tokenizer = self._tokenizer
        skipped = tokenizer.special_ids if skip_special else frozenset()
        raw = [b"" if i in skipped else tokenizer.bytes_of(i) for i in ids]
        if None not in raw:
            return _decode([part or b"" for part in raw])
        pieces = self._pieces(context, ids, skip_special)
        befores = [context[-1] if context else -1, *ids[:-1]]
        for i, (before, piece) in enumerate(zip(befores, pieces, strict=False)):
            if before in self._added and piece.startswith(" ") and self._spaces(before):
                pieces[i] = piece[1:]
        return "".join(pieces), [0, *itertools.accumulate(map(len, pieces))]

    def _pieces(self, context: Sequence[int], ids: Sequence[int], skip: bool) -> list[str]:
        stream = self._tokenizer.stream(context=context, skip_special_tokens=skip)
        pieces = [""] * len(ids)
        run: list[int] = []  # places of raw bytes whose text is still held back
        for at, token in enumerate(ids):
            if run and self._tokenizer.is_word(token):
                _put(pieces, run, stream.flush())
                run = []
            pieces[at] = stream.push([token])
            if self._tokenizer.is_byte(token):
                run.append(at)
        _put(pieces, run or [len(ids) - 1], stream.flush())
        return pieces

    def _spaces(self, added: int) -> bool:
        """Returns whether text after this added token gets a word-start that decodes to a space."""
        spaced = self._spaced.get(added)
        if spaced is None:
            ids = self._tokenizer.encode_after(self._tokenizer.raw([added]), "x")
            stream = self._tokenizer.stream(context=[added], skip_special_tokens=False)
            spaced = self._spaced.put(added, stream.push(ids) + stream.flush() == " x")
        return spaced


class ReplyTokens:
    """The tokens of a reply, its stop token left out, and the text each of them adds.

    `context` are the tokens in front of it: in some vocabularies they decide whether the first
    word brings a space.
    """

    def __init__(self, speller: Speller, context: Sequence[int], ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._speller, self._context = speller, list(context[-1:])
        self.raw, self._starts = speller.spell(self._context, self.ids)

    def find(self, text: str, *, last: bool) -> Span | None:
        """Returns the tokens that spell the last (or first) `text`, or None where it is missing.

        Special tokens inside it stay. A token that the text shares with white space stays
        whole; one that it shares with anything else is left out.
        """
        spelling, starts = self.raw, self._starts
        for skip in (False, True):
            if skip:
                spelling, starts = self._speller.spell(self._context, self.ids, skip_special=True)
            at = spelling.rfind(text) if last else spelling.find(text)
            if at >= 0:
                return self._cut(spelling, starts, at, at + len(text))
        return None

    def _cut(self, text: str, starts: list[int], begin: int, end: int) -> Span:
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        before = after = ""
        if starts[first] != begin:  # inside of a token
            shared = text[starts[bisect_right(starts, begin) - 1] : begin]
            if shared.isspace():
                first, before = bisect_right(starts, begin) - 1, shared
        if starts[last] != end:
            shared = text[end : starts[last]]
            if shared.isspace():
                after = shared
            else:
                last -= 1
        last = max(first, last)
        return Span(
            self.ids[first:last],
            before,
            after,
            min(max(starts[first] - begin, 0), end - begin),
            max(end - max(starts[last], begin), 0) if last > first else 0,
        )
