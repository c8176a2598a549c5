"""The tokenizer and the chat template of a GGUF file, from its metadata alone.

The metadata have the tokens with their types and, for SentencePiece models ("llama"), scores, or,
for byte-level BPE ("gpt2"), merges and the name of a pre-tokenizer, or, for that of Gemma 4, merges
of characters.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmchat.errors import ModelError
from lmchat.text.formats import sentencepiece_model
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.files.gguf import GgufFile

_KEY = "tokenizer.ggml."
_WHOLE = "tokenizer.huggingface.json"
_TEMPLATE = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens

# Parts of the regular expressions of pieces, as in the tokenizer.json of the models.
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
_LLAMA, _GPT4O = _WORDS % "{1,3}", _CASES % (f"{_SHORT}?", f"{_SHORT}?", "{1,3}")
# Pre-tokenizer -> regular expression of its pieces, and whether GPT-2's, which the library has,
# cuts them further.
_PIECES: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, True),
    "llama-bpe": (_LLAMA, False),
    "dbrx": (_LLAMA, False),
    "smaug-bpe": (_LLAMA, False),
    "qwen2": (_WORDS % "", False),
    "gpt-4o": (_GPT4O, False),
    "llama4": (_GPT4O, False),
    "tekken": (_CASES % ("", "", ""), False),
    "refact": (r"\p{N}", True),
    "smollm": (r"\p{N}", True),
}
# Those of models that take a piece that is a token whole, and begin texts with a BOS.
_WHOLE_PIECES = ("llama-bpe", "tekken")

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
        return Tokenizer(backend, special_tokens(file).values())
    kind = file.metadata.get(f"{_KEY}model")
    if kind == "llama":
        backend = _sentencepiece(file)
    elif kind == "gpt2":
        backend = _byte_level(file)
    elif kind == "gemma4":
        backend = _characters(file)
    else:
        raise _error(file, "model", "'llama', 'gpt2' or 'gemma4'")
    return Tokenizer(backend, special_tokens(file).values())


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

    Raises:
        ModelError: An id is not that of a token.
    """
    named: dict[str, str] = {}
    for name, key in _NAMED.items():
        index = file.metadata.get(f"{_KEY}{key}_token_id")
        if index is not None:
            tokens = file.array(f"{_KEY}tokens")
            if not isinstance(index, int) or not 0 <= index < len(tokens):
                raise _error(file, f"{key}_token_id", f"the id of one of {len(tokens)} tokens")
            named[name] = tokens[index]
    return named


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
    be as long."""
    arrays = [file.array(_KEY + key) for key in ("tokens", *keys)]
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


def _sentencepiece(file: GgufFile) -> tokenizers.Tokenizer:
    tokens, scores, kinds = _tokens(file, "scores", "token_type")
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
    return sentencepiece_model.build(model, ends, {}, str(file.path))


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    pre = file.metadata.get(f"{_KEY}pre")
    if pre not in _PIECES:
        raise _error(file, "pre", " or ".join(map(repr, _PIECES)))
    tokens, kinds = _tokens(file, "token_type")
    vocab = {text: i for i, text in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(file, vocab), ignore_merges=pre in _WHOLE_PIECES)
    )
    pieces, has_gpt2 = _PIECES[pre]
    steps: list[Any] = []
    if pieces is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pieces), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # as in its tokenizer.json; metadata omit it
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, file, tokens, kinds, pre in _WHOLE_PIECES)
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


def _add_special(
    backend: tokenizers.Tokenizer,
    file: GgufFile,
    tokens: list[str],
    kinds: list[int],
    add_bos: bool,
) -> None:
    """Adds the tokens that are matched whole, and those that encoding puts around a text: a BOS by
    default if `add_bos`."""
    added = {
        i: tokenizers.AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
        for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    sentencepiece_model.add_tokens(backend, added, str(file.path))
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
