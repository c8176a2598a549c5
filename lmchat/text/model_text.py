"""The tokenizer and the chat template of a model, from its folder or from its GGUF file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lmchat.text.formats import gguf_tokenizer
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.loading.loader import ModelInfo

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json")


@dataclass(frozen=True)
class ModelText:
    """What turns a model's text into tokens. `template` is None where the model has none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def read_text(info: ModelInfo) -> ModelText:
    """Reads the tokenizer and the chat template of a model.

    Raises:
        ModelError: There is no tokenizer, or one of the two cannot be used.
    """
    if info.gguf is not None:
        return ModelText(
            gguf_tokenizer.read_tokenizer(info.gguf), gguf_tokenizer.read_template(info.gguf)
        )
    folder = info.path if info.path.is_dir() else info.path.parent
    return ModelText(Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder))


def has_tokenizer(info: ModelInfo) -> bool:
    """Returns whether a model has a tokenizer. A config.json has none."""
    if info.gguf is not None:
        return gguf_tokenizer.has_tokenizer(info.gguf)
    return folder_has_tokenizer(info.path)


def folder_has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def tokenizer_digest(info: ModelInfo, vocabulary: int) -> str:
    """Returns the digest of a model's tokenizer and of its vocabulary's size, in hexadecimal."""
    digest = hashlib.blake2b(str(vocabulary).encode(), digest_size=16)
    if info.gguf is not None:
        digest.update(gguf_tokenizer.tokenizer_digest(info.gguf))
        return digest.hexdigest()
    folder = info.path if info.path.is_dir() else info.path.parent
    for path in sorted(folder.glob("*")):
        if path.name in _FILES or path.name.endswith(".model"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
