"""Tokenizers of model folders: `tokenizer.json` or a SentencePiece model."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from lmchat.errors import context_full
from lmchat.store.turns import common_prefix
from lmchat.text.detokenizer import IncrementalDetokenizer
from lmchat.text.spellings import Spellings, is_mark, pattern
from turbomind.errors import InvalidRequest, ModelError
from turbomind.shown import shown

if TYPE_CHECKING:
    from lmchat.text.template_tokens import TemplateTokens

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Decoders whose tokens are whole characters, apart from the raw bytes of a fallback.
_WHOLE_CHARACTERS = frozenset(
    {"BPEDecoder", "ByteFallback", "CTC", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
)


def _byte_of_char() -> dict[str, int]:
    """Returns the alphabet of byte-level BPE: printable Latin-1, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()

# How much of a context decides the tokens after it, in characters. The cut goes back from the
# first number to the next word border, at most to the second.
_TAIL, _TAIL_LIMIT = 128, 1024
# Texts of at most this many bytes per token of the context are encoded to count their tokens.
_PLAIN_BYTES = 8
_LONG = 4096  # ids that take so long to decode that other threads should run meanwhile
# Characters that hardly ever share a token with what follows them.
_ANCHORS = ("\x01", "\n", "。", "a", "0")


class Tokenizer:
    """A folder's tokenizer.

    `encode` adds the tokens that the tokenizer's own post-processor adds (usually a BOS) unless
    disabled; text rendered by a chat template already has them. Safe to use from many threads, and
    other threads run while a long text is encoded.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, named: Mapping[str, str] | None = None
    ) -> None:
        self._backend = backend
        _start_pool(backend)
        self.named = dict(named or {})
        """Spellings of the named special tokens: "bos_token", "eos_token", ..."""
        texts = set(self.named.values())
        backend.no_padding()
        backend.no_truncation()
        added = backend.get_added_tokens_decoder()
        self.added_texts: dict[str, int] = {t.content: i for i, t in added.items()}
        """Spellings of the tokens that are found before a text is split, special or not."""
        # Some have their end token as an ordinary added one.
        self.special_texts: dict[str, int] = {
            t.content: i for i, t in added.items() if t.special or t.content in texts
        }
        """Spellings of the special tokens and their ids."""
        self.special_ids = frozenset(self.special_texts.values())
        """Ids that decoding leaves out by default."""
        self.mark_ids = self.special_ids
        """Ids that no typed text becomes: special tokens, and those that the template writes."""
        self.rows: int | None = None
        """Number of ids that the model has rows for, where it is known. Fine-tunes may have added
        tokens to their tokenizer alone."""
        self._own = dict.fromkeys((False, True), pattern(()))
        parts = _decoder_parts(json.loads(backend.to_str()).get("decoder") or {})
        self._byte_level = [part for part in parts if part != "Fuse"] == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in parts
        self.splits_characters = not self._byte_level and not _WHOLE_CHARACTERS.issuperset(parts)
        """Whether tokens may be parts of characters that only the decoder can put together."""
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads `folder/tokenizer.json`, else the folder's SentencePiece model, and the tokens that
        the folder's other JSON files add.

        Raises ModelError when there is neither or it is not readable.
        """
        from lmchat.text.formats import added_tokens, sentencepiece_model
        from lmchat.text.template import special_tokens

        path = Path(folder) / "tokenizer.json"
        named = special_tokens(folder)
        if path.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path))
                added_tokens.complete(backend, path.parent)
            except ModelError:
                raise
            except Exception as error:  # the library raises it so for a file it cannot read
                raise ModelError(f"{path}: {error}") from error
            return cls(backend, named)
        model = sentencepiece_model.find_model(path.parent)
        if model is None:
            hint = " (only vocab.json, not read)" if (path.parent / "vocab.json").is_file() else ""
            raise ModelError(f"{path.parent}: no tokenizer.json and no SentencePiece model{hint}")
        return cls(sentencepiece_model.load(model), named)

    def with_tokens(self, found: TemplateTokens, ends: Iterable[int] = ()) -> Tokenizer:
        """Returns a tokenizer that has the marks of a chat template.

        Args:
            found: the added tokens that the template writes.
            ends: tokens that end a reply. Those of them that look like marks are special ones, but
                for those that replies have themselves.
        """
        hidden = set(ends) - found.replies
        more = {t: i for t, i in self.added_texts.items() if i in hidden and is_mark(t)}
        made = copy.copy(self)
        for name in ("spellings", "special_pattern", "_new_names", "_literal"):  # cached
            made.__dict__.pop(name, None)
        made.special_texts = {**self.special_texts, **more}
        made.special_ids = frozenset(made.special_texts.values())
        made.mark_ids = made.special_ids | found.marks
        own = {t for t, i in self.added_texts.items() if i in found.replies}
        made._own = {True: pattern(own), False: pattern(own - made.special_texts.keys())}
        return made

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Returns the ids of `text`.

        Spellings of marks (`mark_ids`) in it become those tokens; with `parse_special=False` they
        are ordinary text, and only the post-processor's own tokens are special.
        Raises InvalidRequest for a text that is no Unicode (half of a surrogate pair), or has a
        token that the model lacks (`rows`).
        """
        _check_unicode(text)
        found = _encoding(self._backend, text, add_special_tokens)
        ids: list[int] = found.ids
        if parse_special or self.mark_ids.isdisjoint(ids):
            return self._with_rows(ids)
        if any(
            i in self.mark_ids and not ours
            for i, ours in zip(ids, found.special_tokens_mask, strict=True)
        ):
            return self._with_rows(_encoding(self._literal, text, add_special_tokens).ids)
        return self._with_rows(ids)

    def _with_rows(self, ids: list[int]) -> list[int]:
        """Returns the ids. Raises InvalidRequest for one that the model has no row for."""
        if self.rows is not None and max(ids, default=0) >= self.rows:
            token = next(i for i in ids if i >= self.rows)
            spelled = shown(self._backend.id_to_token(token))
            raise InvalidRequest(
                f"the text has the token {spelled}, whose id is {token}: the model has no row for "
                f"it, expected ids below {self.rows}"
            )
        return ids

    def check_fits(self, texts: Sequence[str], context: int) -> None:
        """Refuses texts that have more tokens together than `context` for certain.

        The cost is bounded by `context`, whatever the length of the texts. Texts that are not
        much too long pass; the caller counts their tokens once they are encoded.
        Raises ContextFull.
        """
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if size <= _PLAIN_BYTES * context:
            return
        if size > context * self._longest_token:
            raise context_full(
                f"the text has {size} bytes, expected at most {context * self._longest_token}, as "
                f"the longest token has {self._longest_token} bytes",
                context,
            )
        count, step = 0, _PLAIN_BYTES * context // 2
        for part in (text[at : at + step] for text in texts for at in range(0, len(text), step)):
            _check_unicode(part)
            count += len(_encoding(self._backend, part))
            if count > 2 * context:  # not `context`: a cut may split tokens
                raise context_full(
                    f"the text has more than {count} tokens, expected at most {context}", context
                )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token, at least."""
        tokens = self._backend.get_vocab(with_added_tokens=True)
        if self._byte_level:
            return max(map(len, tokens))
        return max(len(token.replace("\u2581", " ").encode()) for token in tokens)

    def encode_after(self, context: str, text: str, *, parse_special: bool = True) -> list[int]:
        """Returns the ids that `text` has in an encoding of `context + text` in one piece.

        So no word-start token is added after ordinary text. An empty context is the start of
        a text. Spellings of marks in `context` count as those tokens, those in `text`
        unless `parse_special=False`. Where a token of the one piece spans the border, the ids are
        those of `text` after some other character: their text is still exactly `text`.
        The cost depends on `text` alone: only the last characters of `context` are looked at.
        Raises InvalidRequest for a text that is no Unicode, or has a token that the model lacks.
        """
        tail = _tail(context)
        if not tail:
            return self.encode(text, add_special_tokens=False, parse_special=parse_special)
        return self._with_rows(self._encode_after(tail, text, parse_special))

    def _encode_after(self, tail: str, text: str, parse_special: bool) -> list[int]:
        _check_unicode(tail)
        _check_unicode(text)
        backend = self._backend
        before, whole = _ids(backend, tail), _ids(backend, tail + text)
        if not parse_special and self._marks(before) != self._marks(whole):
            backend, tail = self._literal, self._rename(tail)
            before, whole = _ids(backend, tail), _ids(backend, tail + text)
        shared = common_prefix(before, whole)
        if shared == len(before):
            return whole[shared:]
        # The same text cut into other tokens: the border may still be one between two tokens.
        start = max(shared - 1, 0)
        wanted = self.raw(before[start:])
        for end in range(max(shared, 1), min(len(whole), len(before) + 4) + 1):
            if self.raw(whole[start:end]) == wanted:
                return whole[end:]
        for anchor in _ANCHORS:
            first, both = _ids(backend, anchor), _ids(backend, anchor + text)
            # A normalizer may have dropped the character.
            if both[: len(first)] == first and self.raw(first).endswith(anchor):
                return both[len(first) :]
        return _ids(backend, text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        shown = [i for i in ids if i not in self.special_ids] if skip_special_tokens else list(ids)
        if len(shown) > _LONG:  # releases the interpreter's lock, which costs 5 us
            return str(self._backend.decode_batch([shown], skip_special_tokens=False)[0])
        return str(self._backend.decode(shown, skip_special_tokens=False))

    def raw(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` with the special tokens spelled out."""
        return self.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each of `ids` inside a text, special tokens spelled out.

        SentencePiece drops the space at the start of a text, which the text of a token alone lacks.
        """
        found: dict[int, str] = {}
        for token in ids:
            if token not in found:
                once = self.raw([token])
                found[token] = self.raw([token, token])[len(once) :] or once
        return [found[token] for token in ids]

    @functools.cached_property
    def spellings(self) -> Spellings:
        """The spellings of the marks."""
        return Spellings(t for t, i in self.added_texts.items() if i in self.mark_ids)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds the spelling of a special token, the longest first."""
        return pattern(self.special_texts)

    def own_parts(self, text: str, *, generated: bool = False) -> list[str]:
        """Returns the text of a reply cut at tokens that replies have themselves, around reasoning
        and calls of tools. Every second part is one.

        Args:
            text: the text.
            generated: whether the text is that of tokens. Special ones among these are spelled in
                it; in another text such a spelling is no token.
        """
        return self._own[generated].split(text)

    @functools.cached_property
    def _new_names(self) -> dict[str, str]:
        """Spellings of the marks in `_literal`, which no text can guess."""
        secret = secrets.token_hex(16)
        marks = self.added_texts.items()
        return {text: f"<{secret}{i}>" for text, i in marks if i in self.mark_ids}

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The tokenizer with its marks renamed, so that their spellings are plain text.

        A copy, because the backend's own switch for this would hold for every thread; and because
        with that switch the spellings in the vocabulary of a Unigram model still match.
        """
        return tokenizers.Tokenizer.from_str(
            json.dumps(_renamed(json.loads(self._backend.to_str()), self._new_names))
        )

    def _rename(self, text: str) -> str:
        names = self._new_names
        return self.spellings.pattern.sub(lambda found: names[found.group()], text)

    def _marks(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self.mark_ids]

    def stream(
        self, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """Returns a decoder for tokens that arrive one by one, continuing the text of `context`."""
        return IncrementalDetokenizer(self, context, skip_special_tokens)

    def has_token(self, token_id: int) -> bool:
        """Returns whether the id is that of a token. Models may have more rows than tokens; such
        an id decodes to nothing."""
        return self._backend.id_to_token(token_id) is not None

    def is_word(self, token_id: int) -> bool:
        """Returns whether the id is that of a token which is no raw byte."""
        return self.has_token(token_id) and not self.is_byte(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Returns whether the token is a raw byte of a byte-fallback vocabulary, as `<0xE4>`."""
        if not self._byte_fallback:
            return False
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token of a byte-level vocabulary, else None."""
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

    def token_bytes(self, token_id: int, before: int | None = None) -> bytes:
        """Returns the bytes that a token adds to a text; those of a special token spell it.

        Args:
            token_id: the token.
            before: the token before it that is no raw byte. Without one, a vocabulary of words
                leaves out the space in front of the first.
        """
        found = self.bytes_of(token_id)
        if found is not None:
            return found
        if self.is_byte(token_id):
            return bytes([int(str(self._backend.id_to_token(token_id))[3:5], 16)])
        if before is None:
            return self.raw([token_id]).encode()
        return self.raw([before, token_id])[len(self.raw([before])) :].encode()


def _decoder_parts(decoder: dict[str, Any]) -> list[str]:
    """Returns the types in a decoder of `tokenizer.json`, sequences of any depth taken apart."""
    if "decoders" in decoder:
        return [name for part in decoder["decoders"] for name in _decoder_parts(part)]
    return [decoder["type"]] if decoder else []


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text holds {text[error.start]!r}, expected Unicode") from error


def _start_pool(backend: tokenizers.Tokenizer) -> None:
    """Starts the library's threads now, or has it work without them where the system refuses any.

    It starts them at its first batch, and fails at each one if it cannot.
    """
    try:
        backend.decode_batch([[0]])
    except BaseException as error:  # a panic of Rust is no Exception
        if "ThreadPoolBuildError" not in str(error):
            raise
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    """Encodes a text. Unlike `backend.encode()` it releases the interpreter's lock."""
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(_encoding(backend, text).ids)


def _tail(context: str) -> str:
    """Returns the end of `context`, from a place where every tokenizer begins a new token."""
    if len(context) <= _TAIL:
        return context
    first = max(len(context) - _TAIL_LIMIT, 0)
    at = len(context) - _TAIL
    while at > first:
        before, after = context[at - 1], context[at]
        if (after == " " and not before.isspace()) or (before == "\n" and not after.isspace()):
            break
        at -= 1
    return context[at:]


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A `tokenizer.json` whose tokens of these names have others; their ids stay."""
    for token in model["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    inner = model["model"]
    if isinstance(inner["vocab"], dict):
        inner["vocab"] = {names.get(text, text): i for text, i in inner["vocab"].items()}
    else:  # Unigram: pairs of text and score
        inner["vocab"] = [[names.get(text, text), score] for text, score in inner["vocab"]]
    if inner.get("unk_token"):
        inner["unk_token"] = names.get(inner["unk_token"], inner["unk_token"])
    if "merges" in inner:
        pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in inner["merges"]]
        inner["merges"] = [p for p in pairs if names.keys().isdisjoint((*p, "".join(p)))]
    return model
