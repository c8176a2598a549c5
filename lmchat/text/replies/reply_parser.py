"""Parsing of a reply's tokens: visible text, reasoning, stop strings."""

from __future__ import annotations

import functools
import re
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from turbomind.params import wrong

if TYPE_CHECKING:
    from lmchat.text.reasoning import ReasoningFormat
    from lmchat.text.tokenizer import Tokenizer

Kind = Literal["text", "reasoning"]

# Special tokens inside markers and stop strings stand for themselves as halves of surrogate pairs,
# which no decoded text contains. So a marker is never mistaken for ordinary text that spells it.
_FIRST_SIGN = 0xD800
_MOST_SIGNS = 0x7FF
_PADDING = chr(0xDFFF)
_SIGN = re.compile("[\ud800-\udfff]")
_PARTS = re.compile("[^\ud800-\udfff]+|[\ud800-\udfff]")


class ReplyParser:
    """The visible text and reasoning of a reply's tokens, as they arrive.

    Special tokens show nothing and no character is shown before it is whole. What could be the
    start of a marker or of a stop string is held back until it is known, so the deltas of a
    kind, joined up to `finish()`, equal `text` and `reasoning`. The work per token depends on its
    own text only.

    With `hidden`, special tokens outside markers show their spellings, except these ids. They are
    the tokens that end a reply.

    Reasoning: `reasoning` names the markers, `in_reasoning` is True if the prompt has opened the
    block. A block that never ends is all reasoning, half a marker at the end is text. Newlines next
    to a marker belong to the format, except those between a block and visible text before it.
    Several blocks are joined by a newline.

    Stop strings are looked for in the visible text only, never in the reasoning. The one that is
    complete first ends the text, the longest of several that end together; it is cut off. Where a
    stop string spells special tokens that show nothing, these tokens count as their spellings.

    `resume` are the first tokens of a reply that is continued: they count as pushed, but the deltas
    hold only what is new. Stop strings that were complete in them do not stop. `context` are tokens
    before the reply whose text it continues (a completion without a template), so that its first
    word has the space before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: ReasoningFormat | None = None,
        in_reasoning: bool = False,
        stop_strings: Sequence[str] = (),
        resume: Sequence[int] = (),
        context: Sequence[int] = (),
        hidden: Collection[int] | None = None,
    ) -> None:
        if in_reasoning and reasoning is None:
            raise wrong("in_reasoning", True, "a reasoning format with it")
        self.stopped = False
        """Returns whether a stop string was found; later tokens are ignored."""
        self.reasoning_tokens = 0
        """Tokens from the one that completes an opening marker to the one that completes the
        closing one."""
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.stream(context=context)
        self._pushed = 0
        self._parts: dict[Kind, list[str]] = {"text": [], "reasoning": []}
        self._deltas: list[tuple[Kind, str]] = []

        # Tokens to raw text: what the detokenizer gives, with signs for special tokens.
        self._hidden = hidden
        self._signs: dict[int, str] = {}
        self._spellings: dict[str, str] = {}  # of the signs that are shown outside markers
        self._waiting: list[int] = []  # numbers of the tokens whose text has not come yet
        self._last = 0  # number of the last token with a text
        self._in_run = False  # they are bytes of a byte-fallback vocabulary
        self._after_byte = False  # the last token with a text is one
        self._word: Sequence[int] = context  # ends with the last token that is none
        self._raw = 0  # characters so far
        self._resumed = 0  # how many of them are of `resume`
        self._reported = 0  # how many of them were shown before
        self._pieces: deque[_Piece] = deque()

        # Raw text to reasoning and visible text.
        self._kind: Kind = "reasoning" if in_reasoning else "text"
        self._finders: dict[Kind, _Finder] = {}
        self._open = ""
        if reasoning is not None:
            marked = functools.partial(self._with_signs, shown=True)
            self._open = marked(reasoning.open)
            heads = [self._open, *map(marked, reasoning.skip)]
            self._finders = {
                "text": _Finder(heads),
                "reasoning": _Finder([marked(reasoning.close)]),
            }
        self._marker = ""  # the start of one, perhaps
        self._begun = False  # whether this part of text or reasoning has more than newlines
        self._after_marker = in_reasoning
        self._newlines = 0  # held back, from here on:
        self._newlines_start = 0
        self._floor = 0  # raw end of the last marker or reasoning: never cut off

        # Visible text to what is shown: the stop strings.
        stops = [stop for stop in stop_strings if not _SIGN.search(stop)]  # others match no text
        self._stops = _Finder(stops) if stop_strings else None
        signed = [self._with_signs(stop, shown=False) for stop in stops]
        self._signed_stops = _Finder(filter(_SIGN.search, signed))
        self._stop_signs = frozenset(_SIGN.findall("".join(signed)))
        self._tail = ""  # the start of a stop string, perhaps
        self._ends: list[int] = []  # raw ends of its characters
        self._shown_end = 0  # raw end of the last visible character
        self._stored_tokens = 0

        self._resume(resume)

    @property
    def text(self) -> str:
        """The visible text so far."""
        return "".join(self._parts["text"])

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._parts["reasoning"])

    @property
    def stored_tokens(self) -> int:
        """Number of tokens to store, including `resume`: all, or, once `stopped`, the fewest that
        cover what is shown, and the markers and reasoning before it."""
        return self._stored_tokens if self.stopped else self._pushed

    @property
    def settled_tokens(self) -> int:
        """Number of first tokens, including `resume`, that no stop string can cut off any more."""
        if self._stops is None:
            return self._pushed
        if self.stopped:
            return self._stored_tokens
        cut = max(self._shown_end, self._floor)
        if self._pieces and self._pieces[-1].end == cut:
            return self._pieces[-1].tokens[-1]
        return self._tokens_up_to(cut)

    @property
    def kind(self) -> Kind:
        """What the last token belongs to."""
        return self._kind

    def push(self, ids: Iterable[int]) -> list[tuple[Kind, str]]:
        """Takes the next tokens and returns what can be shown with them, maybe nothing."""
        for token_id in ids:
            if self.stopped:
                break
            self._push(token_id)
        return self._take_deltas()

    def finish(self) -> list[tuple[Kind, str]]:
        """Returns the text that was held back, at the end of the tokens."""
        self._end_piece()
        if self._finders:
            self._show(self._marker, self._raw - len(self._marker))
            self._marker = ""
            if self._kind == "text":
                self._show_newlines()
        if self._stops is not None and not self.stopped:
            self._release(len(self._tail))
        return self._take_deltas()

    def _take_deltas(self) -> list[tuple[Kind, str]]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # --- tokens to raw text --------------------------------------------------------------------

    def _resume(self, ids: Sequence[int]) -> None:
        self._resumed = self._reported = sys.maxsize
        self.push(ids)
        # Whole characters of a run of bytes have been shown; the next byte begins another run.
        if self._in_run and "\ufffd" not in self._tokenizer.decode(ids[self._waiting[0] - 1 :]):
            self._end_piece()
            self._in_run = False
        self._deltas = []
        self._resumed = self._reported = self._raw
        if self._kind == "reasoning" and self._newlines and not self._marker:
            self._reported = self._newlines_start

    def _push(self, token_id: int) -> None:
        self._pushed += 1
        thinking = self._kind == "reasoning"
        sign = self._signs.get(token_id)
        if sign is not None:
            self._end_piece()
            self._in_run = False
            self._waiting.append(self._pushed)
            self._add(sign)
        elif token_id in self._tokenizer.special_ids:
            if self._hidden is not None and token_id not in self._hidden:
                self._push_spelling(token_id)
            else:
                self._break_marker()
        elif self._tokenizer.has_token(token_id):
            is_byte = self._tokenizer.is_byte(token_id)
            if self._in_run and not is_byte:
                self._end_piece()
            if not is_byte:
                self._word = [token_id]
            elif self._after_byte and not self._in_run:
                # A run that has ended is not to be decoded together with the next one.
                self._detokenizer = self._tokenizer.stream(context=self._word)
            self._in_run = self._after_byte = is_byte
            self._last = self._pushed
            self._waiting.append(self._pushed)
            self._add(self._detokenizer.push([token_id]))
        self.reasoning_tokens += thinking or self._kind == "reasoning"

    def _push_spelling(self, token_id: int) -> None:
        """Shows a special token."""
        self._end_piece()
        if self.stopped:
            return
        self._in_run = self._after_byte = False
        self._break_marker()
        self._waiting.append(self._pushed)
        self._add(self._tokenizer.raw([token_id]), is_special=True)

    def _end_piece(self) -> None:
        if self.stopped:
            return
        text = self._detokenizer.flush()
        if text:
            self._waiting = self._waiting or [self._last]
            self._add(text, self._in_run)

    def _add(self, text: str, is_run: bool = False, is_special: bool = False) -> None:
        """Returns the text of the waiting tokens."""
        if not text:
            return
        start = self._raw
        self._raw += len(text)
        if self._stops is not None:
            self._pieces.append(_Piece(text, self._raw, self._waiting, is_run))
        self._waiting = []
        if is_special and self._finders:
            self._show(text, start)
        elif self._finders:
            self._scan(text, start)
        else:
            self._visible(text, start)
        least = max(self._shown_end, self._floor)
        while self._pieces and self._pieces[0].end < least:
            self._pieces.popleft()

    # --- raw text to reasoning and visible text ------------------------------------------------

    def _with_signs(self, text: str, *, shown: bool) -> str:
        """Returns a marker or a stop string with its special tokens replaced by their signs; with
        `shown` also those that are shown outside markers."""

        def sign_of(found: re.Match[str]) -> str:
            spelling = found.group()
            token_id = self._tokenizer.special_texts[spelling]
            is_shown = self._hidden is not None and token_id not in self._hidden
            if is_shown and not shown:
                return spelling
            sign = self._signs.get(token_id)
            if sign is None:
                if len(self._signs) == _MOST_SIGNS:
                    return spelling
                sign = chr(_FIRST_SIGN + len(self._signs))
            if is_shown:
                # As long as the spelling, which is shown in its place outside markers.
                sign = sign[0] + _PADDING * (len(spelling) - 1)
                self._spellings[sign] = spelling
            self._signs[token_id] = sign
            return sign

        return self._tokenizer.special_pattern.sub(sign_of, text)

    def _scan(self, text: str, start: int) -> None:
        at = 0
        while at < len(text) and not self.stopped:
            finder = self._finders[self._kind]
            end, length = finder.feed(text, at)
            pending = self._marker + text[at:end]
            size = len(pending) - (length or finder.depth)
            self._show(pending[:size], start + end - len(pending))
            self._marker = pending[size:]
            at = end
            if length:
                self._pass_marker(start + end)

    def _break_marker(self) -> None:
        """Ends all partial markers at a special token that is part of none."""
        if self._marker:
            self._show(self._marker, self._raw - len(self._marker))
            self._marker = ""
            self._finders[self._kind].reset()

    def _pass_marker(self, end: int) -> None:
        self._finders[self._kind].reset()
        if self._kind == "reasoning":
            self._kind = "text"
        elif self._marker == self._open:
            self._kind = "reasoning"
        self._marker = ""
        self._newlines = 0
        self._begun, self._after_marker = False, True
        self._floor = end

    def _show(self, text: str, start: int) -> None:
        """Adds text outside markers. Special tokens that turned out to be no marker are dropped or
        spelled out."""
        for sign, spelling in self._spellings.items():
            text = text.replace(sign, spelling)
        for found in _PARTS.finditer(text):
            part, at = found.group(), start + found.start()
            if self.stopped:
                break
            if not _SIGN.match(part):
                self._show_ordinary(part, at)
            elif part in self._stop_signs and self._kind == "text":
                self._visible(part, at)

    def _show_ordinary(self, text: str, start: int) -> None:
        if not self._begun:
            body = text.lstrip("\n")
            if not self._after_marker:
                self._hold_newlines(len(text) - len(body), start)
            if not body:
                return
            start += len(text) - len(body)
            text = body
            if self._kind == "reasoning" and self._parts["reasoning"]:
                self._emit("reasoning", "\n", 0)
            self._begun = True
        if self._kind == "reasoning":
            self._think(text, start)
        else:
            self._show_newlines()
            self._visible(text, start)

    def _think(self, text: str, start: int) -> None:
        body = text.rstrip("\n")
        if body:
            newlines, newlines_start = "\n" * self._newlines, self._newlines_start
            self._newlines = 0
            self._emit("reasoning", newlines, self._reported - newlines_start)
            self._emit("reasoning", body, self._reported - start)
            self._floor = start + len(body)
        self._hold_newlines(len(text) - len(body), start + len(body))

    def _show_newlines(self) -> None:
        count, self._newlines = self._newlines, 0
        if count:
            self._visible("\n" * count, self._newlines_start)

    def _hold_newlines(self, count: int, start: int) -> None:
        if not self._newlines:
            self._newlines_start = start
        self._newlines += count

    # --- visible text to what is shown ---------------------------------------------------------

    def _visible(self, text: str, start: int) -> None:
        if self._stops is None:
            self._emit("text", text, self._reported - start)
        elif self._stop_signs:
            for i, char in enumerate(text):
                self._search(self._stops, char, start + i)
        else:
            self._search(self._stops, text, start)

    def _search(self, stops: _Finder, text: str, start: int) -> None:
        """Looks for stop strings in a text, or, where they spell special tokens, in a character or
        a sign. `stops` finds those of visible text alone."""
        at = 0
        while at < len(text) and not self.stopped:
            end, length = (1, 0) if text in self._stop_signs else stops.feed(text, at)
            self._tail += text[at:end]
            self._ends += range(start + at + 1, start + end + 1)
            at = end
            length, depth = self._covering(length), self._covering(stops.depth)
            if self._stop_signs:
                length = max(length, self._signed_stops.feed(text, 0)[1])
                depth = max(depth, self._signed_stops.depth)
            if length and start + end > self._resumed:
                self._release(len(self._tail) - length)
                self.stopped = True
                self._stored_tokens = self._tokens_up_to(max(self._shown_end, self._floor))
            else:
                self._release(len(self._tail) - depth)

    def _covering(self, count: int) -> int:
        """Returns how many last characters held back have this many visible ones."""
        if not self._stop_signs:
            return count
        size = 0
        while count:
            size += 1
            count -= self._tail[-size] not in self._stop_signs
        return size

    def _release(self, count: int) -> None:
        """Releases held-back characters that start no stop string. Signs show nothing."""
        if count <= 0:
            return
        text, ends = self._tail[:count], self._ends[:count]
        if self._stop_signs:
            ends = [end for char, end in zip(text, ends, strict=True) if not _SIGN.match(char)]
            text = _SIGN.sub("", text)
        if text:
            self._shown_end = ends[-1]
            self._emit("text", text, bisect_right(ends, self._reported))
        self._tail = self._tail[count:]
        del self._ends[:count]

    def _tokens_up_to(self, cut: int) -> int:
        """Returns the fewest tokens whose text reaches `cut` in the raw text."""
        if cut == 0:
            return 0
        piece = next(piece for piece in self._pieces if piece.end >= cut)
        return piece.token_at(cut)

    def _emit(self, kind: Kind, text: str, reported: int) -> None:
        """Adds final text, of which `reported` characters were reported before."""
        if not text:
            return
        self._parts[kind].append(text)
        text = text[max(reported, 0) :]
        if not text:
            return
        if self._deltas and self._deltas[-1][0] == kind:
            text = self._deltas.pop()[1] + text
        self._deltas.append((kind, text))


class _Piece(NamedTuple):
    """Raw text that became final at once, and the numbers of its tokens (from 1)."""

    text: str
    end: int
    tokens: list[int]
    is_run: bool  # all of raw bytes

    def token_at(self, cut: int) -> int:
        """Returns the number of the first token at which the text up to `cut` is complete."""
        rest = self.text[len(self.text) - (self.end - cut) :]
        if not self.is_run or not rest:
            return self.tokens[-1]
        # One token per byte; in a run that is no UTF-8, one per U+FFFD. Counted from the end, as a
        # space at the start may have been dropped.
        valid = len(self.text.encode()) <= len(self.tokens)
        return self.tokens[-1 - (len(rest.encode()) if valid else len(rest))]


class _Finder:
    """Finds the first of some patterns in text that comes in pieces (Aho and Corasick, 1975)."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]  # length of the longest pattern that ends in a state
        for pattern in filter(None, patterns):
            self._insert(pattern)
        self._fail = [0] * len(self._next)
        for state, char, child in self._by_depth():
            back = self._step(self._fail[state], char) if state else 0
            self._fail[child] = back
            self._found[child] = self._found[child] or self._found[back]
        self._state = 0

    @property
    def depth(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a pattern."""
        return self._depth[self._state]

    def reset(self) -> None:
        """Forgets the text so far."""
        self._state = 0

    def feed(self, text: str, start: int) -> tuple[int, int]:
        """Reads `text` from `start` to the first end of a pattern: (that place, the length of the
        longest pattern that ends there), or (the text's end, 0)."""
        for at in range(start, len(text)):
            self._state = self._step(self._state, text[at])
            if self._found[self._state]:
                return at + 1, self._found[self._state]
        return len(text), 0

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _insert(self, pattern: str) -> None:
        state = 0
        for char in pattern:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(0)
            state = self._next[state][char]
        self._found[state] = len(pattern)

    def _by_depth(self) -> Iterator[tuple[int, str, int]]:
        """Yields all edges (state, character, child), those near the root first."""
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                yield state, char, child
                waiting.append(child)
