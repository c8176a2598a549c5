"""The tokenizer and the chat template of a GGUF file, from its metadata alone.

The metadata have the tokens with their types and, for SentencePiece models ("llama"), scores, or,
for byte-level BPE ("gpt2"), merges and the name of a pre-tokenizer, or, for that of Gemma 4, merges
of characters.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmchat.errors import ModelError
from lmchat.text.formats import added_tokens, gguf_pieces, sentencepiece_model
from lmchat.text.spellings import is_mark
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.gguf.fields import end_tokens
from turbomind.gguf.file import GgufFile

_log = logging.getLogger(__name__)
_KEY = "tokenizer.ggml."
_WHOLE = "tokenizer.huggingface.json"
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # types of tokens
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # types of tokens that are matched whole
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_MARK = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")  # what may be one in a template
# Special tokens of Phi-3 that leave the white space after them.
_PHI3_OTHERS = ("<unk>", "<s>", "<|endoftext|>")
# A mark of Phi-4, whose special tokens swallow the white space around them.
_PHI4_MARK = "<|im_sep|>"

# Name of a special token in templates -> key, without its end. The last spelling is the format's.
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def has_tokenizer(file: GgufFile) -> bool:
    """Returns whether the file has a tokenizer."""
    return _WHOLE in file.metadata or f"{_KEY}model" in file.metadata


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Returns the file's tokenizer: its `tokenizer.json` where it has one, else that of its tokens.

    Raises:
        ModelError: There is none, it is of another kind, or a value is wrong.
    """
    whole = file.metadata.get(_WHOLE)
    if whole is not None:
        try:
            backend = tokenizers.Tokenizer.from_str(whole)
        except Exception as error:  # the library raises it so for a text it cannot read
            raise ModelError(f"{file.path}: {_WHOLE}: {error}") from error
        return Tokenizer(backend, special_tokens(file))
    kind = file.metadata.get(f"{_KEY}model")
    if kind == "llama":
        backend = _sentencepiece(file)
    elif kind == "gpt2":
        backend = _byte_level(file)
    elif kind == "gemma4":
        backend = _characters(file)
    else:
        raise _error(file, "model", "'llama', 'gpt2' or 'gemma4'")
    _add_marks(backend, file)
    return Tokenizer(backend, special_tokens(file))


def read_template(file: GgufFile) -> ChatTemplate | None:
    """Returns the file's chat template, or None.

    Raises:
        ModelError: It is not a valid template.
    """
    source = file.metadata.get(_TEMPLATE)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{file.path}: {_TEMPLATE} is {source!r}, expected a string")
    return ChatTemplate(source, special_tokens(file))


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Returns the spellings of the named special tokens, as templates see them.

    An id that no token has, -1 above all, is how converters write that there is none.

    Raises:
        ModelError: An id is not a number.
    """
    ids: dict[str, int] = {}
    for name, key in _NAMED.items():
        index = file.metadata.get(f"{_KEY}{key}_token_id")
        if index is not None:
            if not isinstance(index, int):
                raise _error(file, f"{key}_token_id", "the id of a token")
            ids[name] = index
    tokens = file.array(f"{_KEY}tokens") if ids else []
    return {name: tokens[i] for name, i in ids.items() if 0 <= i < len(tokens)}


def tokenizer_digest(file: GgufFile) -> bytes:
    """Returns a digest of all that the tokenizer is made of."""
    total = hashlib.blake2b(digest_size=16)
    for key in sorted(file.metadata):
        if key.startswith("tokenizer.") and not key.startswith(_TEMPLATE):
            total.update(key.encode() + b"\0" + file.raw(key))
    return total.digest()


def _error(file: GgufFile, key: str, expected: str) -> ModelError:
    key = _KEY + key
    seen = repr(file.metadata[key]) if key in file.metadata else "absent"
    return ModelError(f"{file.path}: {key} is {seen}, expected {expected}")


def _flag(file: GgufFile, key: str, default: bool) -> bool:
    value = file.metadata.get(_KEY + key, default)
    if not isinstance(value, bool):
        raise _error(file, key, "a bool")
    return value


def _tokens(file: GgufFile, *keys: str, unique: bool = True) -> list[list[Any]]:
    """Returns the tokens, which must differ if `unique`, and the arrays of these keys, which must
    be as long; where one is absent its default for each token."""
    tokens = file.array(f"{_KEY}tokens")
    arrays = [tokens]
    for key in keys:
        if _KEY + key in file.metadata:
            arrays.append(file.array(_KEY + key))
        else:
            arrays.append(_types(file, tokens) if key == "token_type" else [0.0] * len(tokens))
    for key, values in zip(keys, arrays[1:], strict=True):
        if len(values) != len(arrays[0]):
            raise ModelError(
                f"{file.path}: {_KEY}{key} has {len(values)} values, expected one for each of "
                f"{len(arrays[0])} tokens"
            )
    counts = Counter(arrays[0])
    if unique and len(counts) != len(arrays[0]):
        twice = counts.most_common(1)[0][0]
        raise ModelError(f"{file.path}: {_KEY}tokens has {twice!r} twice, expected it once")
    if not arrays[0]:
        raise _error(file, "tokens", "at least one token")
    return arrays


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    """Returns the types of tokens in a file without them: ordinary ones, but for bytes and those
    that the metadata name by id."""
    types = [_BYTE if _BYTE_PIECE.fullmatch(text) else _NORMAL for text in tokens]
    for key, index in file.metadata.items():
        named = key.startswith(_KEY) and key.endswith("_token_id")
        if named and isinstance(index, int) and 0 <= index < len(tokens):
            types[index] = _UNKNOWN if key == f"{_KEY}unknown_token_id" else _CONTROL
    return types


def _sentencepiece(file: GgufFile) -> tokenizers.Tokenizer:
    tokens, scores, kinds = _tokens(file, "scores", "token_type")
    kinds = _with_ends(file, tokens, kinds)
    model = sentencepiece_model.Model(
        pieces=list(zip(tokens, scores, kinds, strict=True)),
        kind=sentencepiece_model.BPE,
        byte_fallback=_BYTE in kinds,
        add_prefix=_flag(file, "add_space_prefix", True),
        remove_extra_spaces=_flag(file, "remove_extra_whitespaces", False),
    )
    ends = sentencepiece_model.Ends(
        special_tokens(file),
        _flag(file, "add_bos_token", True),
        _flag(file, "add_eos_token", False),
    )
    added = {
        i: tokenizers.AddedToken(text, normalized=False, special=kind != _USER_DEFINED, rstrip=True)
        for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if _is_phi3(file) and kind in _ADDED and text not in _PHI3_OTHERS
    }
    return sentencepiece_model.build(model, ends, added, str(file.path))


def _is_phi3(file: GgufFile) -> bool:
    """Returns whether the marks of the file's SentencePiece tokenizer are those of Phi-3.

    They swallow white space after them, which no key of the metadata says. As in llama.cpp the
    name counts too: some files have the weights in the form of Llama.
    """
    name = str(file.metadata.get("general.name")).lower()
    return file.metadata.get("general.architecture") == "phi3" or "phi3" in name or "phi-3" in name


def _pre_tokenizer(file: GgufFile) -> str:
    pre = file.metadata.get(f"{_KEY}pre")
    if pre is None:
        _log.warning(
            "%s: %spre is absent, as in old files: texts are cut as for %r, which may be wrong",
            file.path, _KEY, gguf_pieces.ABSENT,
        )  # fmt: skip
        return gguf_pieces.ABSENT
    known = sorted({*gguf_pieces.PIECES, *gguf_pieces.CHARACTERS})
    if pre not in known:
        raise _error(file, "pre", f"one of {', '.join(known)}")
    return str(pre)


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    pre = _pre_tokenizer(file)
    if pre in gguf_pieces.CHARACTERS:
        return _characters(file)
    tokens, kinds = _tokens(file, "token_type")
    vocab = {text: i for i, text in enumerate(tokens)}
    pieces = gguf_pieces.PIECES[pre]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(file, vocab), ignore_merges=pieces.whole)
    )
    steps: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in pieces.patterns
    ]
    if pieces.bytes:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pieces.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel() if pieces.bytes else decoders.Fuse()
    _add_special(backend, file, tokens, kinds, pieces.begins)
    return backend


def _characters(file: GgufFile) -> tokenizers.Tokenizer:
    """Returns the BPE of Gemma 4: characters merge, spaces are escaped, and a character without a
    token becomes bytes."""
    # Some files have a few tokens under two ids; as in llama.cpp the later one counts.
    tokens, kinds = _tokens(file, "token_type", unique=False)
    vocab = {text: i for i, text in enumerate(tokens)}
    unknown = special_tokens(file).get("unk_token")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(file, vocab), unk_token=unknown, fuse_unk=True,
            byte_fallback=True,
        )
    )  # fmt: skip
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_special(backend, file, tokens, kinds, True)
    return backend


def _with_ends(file: GgufFile, tokens: list[str], kinds: list[int]) -> list[int]:
    """Returns the types of the tokens; those that end a reply are control tokens, whatever the file
    calls them."""
    ends = {i for i in end_tokens(file) if 0 <= i < len(tokens) and is_mark(tokens[i])}
    return [
        _CONTROL if i in ends and kind in (_NORMAL, _USER_DEFINED) else kind
        for i, kind in enumerate(kinds)
    ]


def _add_marks(backend: tokenizers.Tokenizer, file: GgufFile) -> None:
    """Adds marks that the template spells and that no text becomes otherwise: some files, such as
    Google's of Gemma 3, call them ordinary tokens."""
    source = file.metadata.get(_TEMPLATE)
    if not isinstance(source, str):
        return
    found = [
        tokenizers.AddedToken(text, normalized=False)
        for text in dict.fromkeys(_MARK.findall(source))
        if is_mark(text)
        and (i := backend.token_to_id(text)) is not None
        and i not in backend.encode(text, add_special_tokens=False).ids
    ]
    if found:
        backend.add_tokens(found)


def _add_special(
    backend: tokenizers.Tokenizer,
    file: GgufFile,
    tokens: list[str],
    kinds: list[int],
    add_bos: bool,
) -> None:
    """Adds the tokens that are matched whole, and those that encoding puts around a text: a BOS by
    default if `add_bos`."""
    kinds = _with_ends(file, tokens, kinds)
    strips = _PHI4_MARK in tokens and file.metadata.get("general.architecture") == "phi3"
    added = {
        i: tokenizers.AddedToken(
            text, normalized=False, special=kind != _USER_DEFINED, lstrip=strips, rstrip=strips
        )
        for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in _ADDED
    }
    added_tokens.add_tokens(backend, added, str(file.path))
    named = special_tokens(file)
    front = _flag(file, "add_bos_token", add_bos) and named.get("bos_token")
    back = _flag(file, "add_eos_token", False) and named.get("eos_token")
    sentencepiece_model.set_ends(
        backend, [front] if front else [], [back] if back else [], str(file.path)
    )


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for text in file.array(f"{_KEY}merges"):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(
                f"{file.path}: {_KEY}merges has {text!r}, expected two tokens that make a third"
            )
        merges.append((left, right))
    return merges
