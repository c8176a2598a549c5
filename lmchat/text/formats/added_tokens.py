"""Added tokens of a model folder that its JSON files name beside the vocabulary.

Added tokens are found in a text before it is cut into pieces. `tokenizer.json` has most of them;
`tokenizer_config.json` (`added_tokens_decoder`) and `added_tokens.json` may name more, and other
flags of the same ones, which win as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from lmchat.errors import ModelError
from lmchat.text.spellings import is_mark
from lmchat.text.template import special_tokens
from turbomind.files.json_file import read_json

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def read(path: Path) -> dict[str, Any]:
    """Returns a JSON file, or nothing where there is none."""
    return read_json(path) if path.is_file() else {}


def named_tokens(folder: Path) -> dict[int, tokenizers.AddedToken]:
    """Returns the tokens that the folder's JSON files name with an id.

    Raises:
        ModelError: An entry is not that of a token.
    """
    named = set(special_tokens(folder).values())
    tokens: dict[int, tokenizers.AddedToken] = {}
    path = folder / "added_tokens.json"
    for text, i in read(path).items():
        tokens[_index(i, path)] = tokenizers.AddedToken(
            text, normalized=False, special=text in named
        )
    path = folder / "tokenizer_config.json"
    decoder = read(path).get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelError(f"{path}: added_tokens_decoder is {decoder!r:.80}, expected an object")
    for i, entry in decoder.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelError(
                f"{path}: added_tokens_decoder has {entry!r:.80} for {i!r:.20}, expected an object "
                "with the token's content"
            )
        flags = {name: bool(entry.get(name)) for name in _FLAGS}
        special = bool(entry.get("special")) or entry["content"] in named
        tokens[_index(i, path)] = tokenizers.AddedToken(entry["content"], special=special, **flags)
    return tokens


def _index(value: Any, path: Path) -> int:
    if not str(value).isascii() or not str(value).isdecimal() or int(value) >= 1 << 31:
        raise ModelError(f"{path}: a token has the id {value!r:.40}, expected a number below 2**31")
    return int(value)


def special_names(folder: Path) -> set[str]:
    """Returns the spellings of the folder's special tokens, named ones and lists of others."""
    found = set(special_tokens(folder).values())
    config = {**read(folder / "special_tokens_map.json"), **read(folder / "tokenizer_config.json")}
    for name in _LISTS:
        value = config.get(name)
        value = list(value.values()) if isinstance(value, dict) else value
        for token in value if isinstance(value, list) else ():
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found.add(text)
    return found


def complete(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Adds what the folder's JSON files say of added tokens to those of its `tokenizer.json`.

    An id that has another token in `tokenizer.json` keeps it. A special token that is an ordinary
    one of the vocabulary becomes an added one if it looks like a mark: some folders pad with "!".

    Raises:
        ModelError: An entry is not that of a token, or a token has an id far from the others.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    found: dict[int, tokenizers.AddedToken] = {}
    for i, token in named_tokens(folder).items():
        index = backend.token_to_id(token.content)
        if index is None and backend.id_to_token(i) is not None:
            continue
        before = known.get(token.content)
        token.special = token.special or (before is not None and before.special)
        if repr(token) != repr(before):
            found[i if index is None else index] = token
    listed = known.keys() | {token.content for token in found.values()}
    for text in special_names(folder) - listed:
        index = backend.token_to_id(text)
        if index is not None and is_mark(text):
            found[index] = tokenizers.AddedToken(text, normalized=False, special=True)
    add_tokens(backend, found, str(folder))


def add_tokens(
    backend: tokenizers.Tokenizer, tokens: Mapping[int, tokenizers.AddedToken], where: str
) -> None:
    """Adds tokens by id. Raises ModelError where the library gives one another id."""
    added = sorted(tokens.items())
    if added:  # at once: the library builds its search again for each call
        backend.add_tokens([token for _, token in added])
    for i, token in added:
        index = backend.token_to_id(token.content)
        if index != i:
            raise ModelError(f"{where}: added token {token.content!r} has id {i}, expected {index}")
