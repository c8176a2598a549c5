"""Tokenizers of folders that have only a SentencePiece model, no `tokenizer.json`.

The model file, a protobuf message with the fields of sentencepiece_model.proto, is read here and
made a `tokenizers.Tokenizer` of the kind that `tokenizer.json` files of such models hold. BPE
merges are not in the file: a pair merges when its text is a piece, pieces of higher score first.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lmchat.errors import ModelError
from lmchat.text.formats import added_tokens
from lmchat.text.spellings import is_mark
from lmchat.text.template import special_tokens

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, BPE = 1, 2  # kinds of models


@dataclass(frozen=True)
class Ends:
    """The special tokens by name ("bos_token", ...), and whether a text begins and ends with one.

    A name that is absent is that of the model.
    """

    named: Mapping[str, str]
    add_bos: bool = True
    add_eos: bool = False


@dataclass
class Model:
    """The fields that are read from the file, with the format's defaults."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    kind: int = _UNIGRAM
    suffix_spaces: bool = False
    byte_fallback: bool = False
    bos: int = 1
    eos: int = 2
    character_map: bytes = b""
    add_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    def named(self, index: int) -> str | None:
        """Returns the text of the piece with this id, or None for an id out of range."""
        return self.pieces[index][0] if 0 <= index < len(self.pieces) else None


def find_model(folder: Path) -> Path | None:
    """Returns the folder's SentencePiece model: `tokenizer.model`, or a name like `x.model.v3`."""
    if (folder / "tokenizer.model").is_file():
        return folder / "tokenizer.model"
    found = [p for p in (*folder.glob("*.model"), *folder.glob("*.model.v[0-9]*")) if p.is_file()]
    return max(found, default=None)  # of several the latest version


def load(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of the model at `path`, with the settings of its JSON files.

    Those are `tokenizer_config.json` (`added_tokens_decoder`, `legacy`, `add_bos_token`,
    `add_eos_token`, names of special tokens), `special_tokens_map.json` and `added_tokens.json`.
    Raises ModelError when the file cannot be read or holds a model of another kind.
    """
    try:
        model = _parse(path.read_bytes())
    except (ValueError, IndexError, struct.error, OSError) as error:
        raise ModelError(f"{path}: no SentencePiece model: {error}") from error
    if not model.pieces:
        raise ModelError(f"{path}: no SentencePiece model: it has no pieces")
    if model.kind not in (_UNIGRAM, BPE) or model.suffix_spaces or not model.escape_spaces:
        raise ModelError(
            f"{path}: model type {model.kind}, spaces as suffix {model.suffix_spaces}, escaped "
            f"{model.escape_spaces}; expected Unigram (1) or BPE (2) with escaped spaces in front"
        )
    config = added_tokens.read(path.parent / "tokenizer_config.json")
    named = special_tokens(path.parent)
    ends = Ends(named, config.get("add_bos_token", True), config.get("add_eos_token", False))
    added = added_tokens.named_tokens(path.parent)
    _set_names(model, added)
    special = added_tokens.special_names(path.parent)
    for i, (text, _, _) in enumerate(model.pieces):
        if text in special and is_mark(text):
            added.setdefault(i, tokenizers.AddedToken(text, normalized=False, special=True))
    return build(model, ends, added, str(path), legacy=config.get("legacy") is not False)


def build(
    model: Model,
    ends: Ends,
    added: Mapping[int, tokenizers.AddedToken],
    where: str,
    *,
    legacy: bool = True,
) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a model.

    Args:
        model: The pieces and the settings of the model.
        ends: The special tokens, and those that encoding puts around a text.
        added: Tokens that the model lacks or has as ordinary pieces, by id.
        where: The file, for messages.
        legacy: Puts the word-start before every part between special tokens, else before the
            first only.

    Raises:
        ModelError: A token has another id than its place.
    """
    backend = tokenizers.Tokenizer(_bpe(model) if model.kind == BPE else _unigram(model))
    _set_spaces(backend, model, legacy)
    _add_tokens(backend, model, added, where)
    _set_ends(backend, model, ends, where)
    return backend


def _set_names(model: Model, added: Mapping[int, tokenizers.AddedToken]) -> None:
    """Gives pieces without a use of their own, as InternLM2 has some, the names of the tokens that
    other files put in their place."""
    texts = {text for text, _, _ in model.pieces}
    for i, token in added.items():
        if 0 <= i < len(model.pieces) and token.content not in texts:
            model.pieces[i] = (token.content, *model.pieces[i][1:])


def _bpe(model: Model) -> models.BPE:
    vocab = {text: i for i, (text, _, _) in enumerate(model.pieces)}
    normal = {
        text: score
        for text, score, kind in model.pieces
        if kind == _NORMAL or (kind == _USER_DEFINED and _SPACE in text)
    }
    lengths = sorted({len(text) for text in normal})
    known = set(lengths)
    merges = []
    for text, score in normal.items():
        # Both parts are pieces, so a piece of 300,000 characters is cut at few places.
        for cut in lengths[: bisect.bisect_left(lengths, len(text))]:
            if len(text) - cut not in known:
                continue
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                merges.append((-score, vocab[text], vocab[left], left, right))
    merges.sort()
    return models.BPE(
        vocab=vocab,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=_unknown(model)[1],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: Model) -> models.Unigram:
    # A piece that is never used loses against every other way to write its text.
    scores = [
        (text, score if kind != _UNUSED else score - 1000.0) for text, score, kind in model.pieces
    ]
    return models.Unigram(scores, _unknown(model)[0], model.byte_fallback)


def _unknown(model: Model) -> tuple[int, str]:
    found = ((i, text) for i, (text, _, kind) in enumerate(model.pieces) if kind == _UNKNOWN)
    return next(found, (0, model.pieces[0][0]))


def _set_spaces(backend: tokenizers.Tokenizer, model: Model, legacy: bool) -> None:
    """The word-start: before every part between special tokens, unless not `legacy`: first only."""
    steps: list[Any] = []
    if model.character_map:
        steps.append(normalizers.Precompiled(model.character_map))
    if model.remove_extra_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if model.add_prefix and legacy:
        steps.append(normalizers.Prepend(_SPACE))
    if model.add_prefix and not legacy:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps.append(normalizers.Replace(" ", _SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)


def _add_tokens(
    backend: tokenizers.Tokenizer,
    model: Model,
    added: Mapping[int, tokenizers.AddedToken],
    where: str,
) -> None:
    tokens: dict[int, tokenizers.AddedToken] = {}
    for i, (text, _, kind) in enumerate(model.pieces):
        if kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and _SPACE not in text):
            special = kind != _USER_DEFINED
            tokens[i] = tokenizers.AddedToken(text, normalized=False, special=special)
    added_tokens.add_tokens(backend, {**tokens, **added}, where)


def _set_ends(backend: tokenizers.Tokenizer, model: Model, ends: Ends, where: str) -> None:
    """Sets the tokens that encoding puts around a text. Default: a BOS and no EOS."""
    bos = ends.named.get("bos_token", model.named(model.bos))
    eos = ends.named.get("eos_token", model.named(model.eos))
    front = [bos] if ends.add_bos and bos else []
    back = [eos] if ends.add_eos and eos else []
    set_ends(backend, front, back, where)


def set_ends(backend: tokenizers.Tokenizer, front: list[str], back: list[str], where: str) -> None:
    """Sets the tokens that encoding puts around a text.

    Raises:
        ModelError: The vocabulary has no such token.
    """
    ids = {text: backend.token_to_id(text) for text in front + back}
    if None in ids.values():
        raise ModelError(f"{where}: special tokens {sorted(ids)}, expected tokens of the model")
    if ids:
        backend.post_processor = processors.TemplateProcessing(
            single=[*front, "$A", *back], special_tokens=list(ids.items())
        )


def _parse(data: bytes) -> Model:
    model = Model()
    for number, value in _fields(data):
        if number == 1:
            piece: dict[int, Any] = {2: b"\0\0\0\0", 3: _NORMAL, **dict(_fields(value))}
            text = piece[1].decode()
            model.pieces.append((text, struct.unpack("<f", piece[2])[0], piece[3]))
        elif number == 2:  # how it was trained
            trained = dict(_fields(value))
            model.kind = trained.get(3, _UNIGRAM)
            model.suffix_spaces = bool(trained.get(24, False))
            model.byte_fallback = bool(trained.get(35, False))
            model.bos, model.eos = _signed(trained.get(41, 1)), _signed(trained.get(42, 2))
        elif number == 3:  # how it normalizes
            normalizer = dict(_fields(value))
            model.character_map = normalizer.get(2, b"")
            model.add_prefix = bool(normalizer.get(3, True))
            model.remove_extra_spaces = bool(normalizer.get(4, True))
            model.escape_spaces = bool(normalizer.get(5, True))
    return model


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields field numbers and values of a protobuf message: integers, else raw bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field type {kind}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes where {len(data) - at} are left")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
