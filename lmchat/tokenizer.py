"""Text to token ids and back, on a model folder's `tokenizer.json`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from turbomind.errors import InvalidRequest, ModelError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """A folder's tokenizer.

    `encode` adds the tokens that the tokenizer's own post-processor adds (usually a BOS) unless
    told not to; text rendered by a chat template already has them.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that decoding leaves out unless told otherwise."""
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        parts = [part["type"] for part in decoder.get("decoders", [decoder]) if part]
        self._byte_level = parts == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in parts
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads `folder/tokenizer.json`; raises ModelError when it is missing or not readable."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            other = [n for n in ("tokenizer.model", "vocab.json") if (path.parent / n).is_file()]
            hint = f" (only {other[0]}, which is not read)" if other else ""
            raise ModelError(f"{path.parent}: no tokenizer.json{hint}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise ModelError(f"{path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Spellings of special tokens in it become those tokens.

        Raises InvalidRequest for a text that is no Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text holds {text[error.start]!r}, expected Unicode") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 come out as U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A decoder for tokens that arrive one by one, continuing the text of `context`."""
        return IncrementalDetokenizer(self, context, skip_special_tokens)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a byte-fallback vocabulary, like `<0xE4>`."""
        if not self._byte_fallback:
            return False
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token of a byte-level vocabulary; None for vocabularies of other kinds."""
        if not self._byte_level:
            return None
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            try:
                found = bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token is spelled in plain text
                found = token.encode()
            self._bytes[token_id] = found
        return found


class IncrementalDetokenizer:
    """Text of tokens as they arrive.

    The deltas joined, `flush()` included, equal `decode` of all ids at once; each costs the work of
    its own tokens. Nothing is shown before it is final: an unfinished UTF-8 character waits for its
    rest, and raw bytes of a byte-fallback vocabulary wait for the end of their run, because one
    invalid byte turns the whole run into U+FFFD.
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
        last = next(
            (i for i in reversed(context) if i not in self._skip and not tokenizer.is_byte(i)), None
        )
        self._shown: list[int] = [] if last is None else [last]
        self._shown_text = self._decode(self._shown)
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that is final with them, maybe empty."""
        return "".join([self._push(i) for i in ids if i not in self._skip])

    def flush(self) -> str:
        """The text still held back, at the end of the tokens."""
        return self._utf8.decode(b"", final=True) + self._release()

    def _push(self, token_id: int) -> str:
        raw = self._tokenizer.bytes_of(token_id)
        if raw is not None:
            return self._utf8.decode(raw)
        self._pending.append(token_id)
        return "" if self._tokenizer.is_byte(token_id) else self._release()

    def _release(self) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._shown + self._pending)[len(self._shown_text) :]
        self._shown = self._pending[-1:]
        self._shown_text = self._decode(self._shown)
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
