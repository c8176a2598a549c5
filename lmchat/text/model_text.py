"""The tokenizer and the chat template of a model, from its folder or from its GGUF file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmchat.text.formats import gguf_tokenizer
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.gguf.file import GgufFile
from turbomind.loading.loader import ModelInfo

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json")


@dataclass(frozen=True)
class ModelText:
    """What turns a model's text into tokens. `template` is None where the model has none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


class _OfFolder:
    """The text files of a model folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_there(self) -> bool:
        return folder_has_tokenizer(self._folder)

    def read(self) -> ModelText:
        return ModelText(
            Tokenizer.from_folder(self._folder), ChatTemplate.from_folder(self._folder)
        )

    def parts(self) -> Iterator[bytes]:
        """Yields what decides how texts become tokens."""
        for path in sorted(self._folder.glob("*")):
            if path.name in _FILES or path.name.endswith(".model"):
                yield path.name.encode()
                yield path.read_bytes()


class _OfGguf:
    """The tokenizer and the template inside a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def is_there(self) -> bool:
        return gguf_tokenizer.has_tokenizer(self._file)

    def read(self) -> ModelText:
        return ModelText(
            gguf_tokenizer.read_tokenizer(self._file), gguf_tokenizer.read_template(self._file)
        )

    def parts(self) -> Iterator[bytes]:
        yield gguf_tokenizer.tokenizer_digest(self._file)


def _text_of(info: ModelInfo) -> _OfFolder | _OfGguf:
    if info.gguf:
        return _OfGguf(info.gguf)
    return _OfFolder(info.path if info.path.is_dir() else info.path.parent)


def read_text(info: ModelInfo) -> ModelText:
    """Reads the tokenizer and the chat template of a model.

    Raises:
        ModelError: There is no tokenizer, or one of the two cannot be used.
    """
    return _text_of(info).read()


def has_tokenizer(info: ModelInfo) -> bool:
    """Returns whether a model has a tokenizer. A config.json has none."""
    return (bool(info.gguf) or info.path.is_dir()) and _text_of(info).is_there()


def folder_has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def tokenizer_digest(info: ModelInfo, vocabulary: int) -> str:
    """Returns the digest of a model's tokenizer and of its vocabulary's size, in hexadecimal."""
    digest = hashlib.blake2b(str(vocabulary).encode(), digest_size=16)
    for part in _text_of(info).parts():
        digest.update(part)
    return digest.hexdigest()
