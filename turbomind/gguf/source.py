"""A GGUF file as the source of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from turbomind.files.checkpoint import CheckpointFiles
from turbomind.gguf import fields, tensors
from turbomind.gguf.file import GgufFile
from turbomind.gguf.scheme import GgufScheme
from turbomind.models import family_of
from turbomind.quant.sources import Sources


class GgufSource:
    """The source of a model in a GGUF file; see `loading.model_source.ModelSource`. No file beside
    it is read.

    Args:
        path: The file.
        rope_length: Tokens that a rope scaling which depends on a length is computed for.

    Raises:
        ModelError: It cannot be used.
    """

    quantization = None

    def __init__(self, path: Path, rope_length: int | None) -> None:
        self.path = path
        self.gguf = GgufFile(path)
        config = fields.config_of(self.gguf)
        self.family = family_of(config.values)
        described = self.family.describe(config, rope_length)
        self.description = fields.adapted(self.gguf, described)
        self.values: Mapping[str, Any] = config.values
        self.eos = fields.end_tokens(self.gguf)
        self.generation = fields.generation_defaults(self.gguf)
        self.encoders = fields.encoders(self.gguf)
        self.draft_layers = fields.draft_layers(self.gguf)
        self.files = CheckpointFiles([self.gguf])

    def open(self, weights: bool) -> None:
        """Does nothing: the file is open."""

    def require(self) -> None:
        """Does nothing: the file is open."""

    def use_stored_head(self) -> str:
        """Returns "": the description has the head of the file."""
        return ""

    @cached_property
    def sources(self) -> Sources:
        """The weights that fill the slots."""
        slots = tensors.slots_of(self.gguf, self.family, self.description)
        return Sources(self.files, GgufScheme(self.files), slots)

    def formats(self, dtype: str) -> dict[str, str]:
        """Returns the format of each slot whose matrix is stored as codes."""
        return self.sources.scheme.formats(self.sources.slots, dtype)

    def unneeded(self) -> set[str]:
        """Returns the names of tensors without a slot that a file may have."""
        return tensors.unneeded(self.gguf, self.description)
