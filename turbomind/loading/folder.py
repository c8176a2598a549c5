"""A model folder, or a config.json alone, as the source of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError, NotFound
from turbomind.files.checkpoint import Checkpoint
from turbomind.files.json_file import read_json
from turbomind.loading.heads import only_head, own_head
from turbomind.models import Rows, family_of
from turbomind.models.config import token_id_list
from turbomind.models.quantization import quantization_beside, quantization_of
from turbomind.quant.schemes import scheme_of
from turbomind.quant.sources import Sources
from turbomind.shown import shown_name

# Ends of the names of tensors that only checkpoints with quantized weights have.
_OF_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".scales")


class FolderSource:
    """The source of a model in a folder; see `loading.model_source.ModelSource`.

    Args:
        path: The folder, or a config.json.
        rope_length: Tokens that a rope scaling which depends on a length is computed for.

    Raises:
        NotFound: There is no config.json.
        ModelError: It cannot be used.
    """

    gguf = None
    draft_layers = 0

    def __init__(self, path: Path, rope_length: int | None) -> None:
        self.path = path
        config_path = path / "config.json" if path.is_dir() else path
        if not config_path.is_file():
            files = sorted(each.name for each in path.glob("*.gguf"))
            hint = f"; name a GGUF file in it, such as {files[0]}" if files else ""
            raise NotFound(f"{path} has no config.json{hint}")
        config = _config_at(config_path)
        self.family = family_of(config)
        self.description = self.family.describe(config, rope_length)
        self.values: Mapping[str, Any] = self.family.text_fields(config)
        self.encoders = self.family.encoders(config)
        self.quantization = quantization_of(config) or quantization_beside(config_path.parent)
        self.generation: dict[str, Any] = {}
        if (config_path.parent / "generation_config.json").is_file():
            self.generation = read_json(config_path.parent / "generation_config.json")
        self.eos = [
            *token_id_list(self.generation, "eos_token_id", "generation_config.json"),
            *token_id_list(self.values, "eos_token_id", "config.json"),
        ]
        self.files: Checkpoint | None = None

    def open(self, weights: bool) -> None:
        """Opens the weight files where they are there, and asked for or telling types."""
        telling = self.description.tied_head or self.quantization is not None
        if not any(self.path.glob("*.safetensors")) or not (weights or telling):
            return
        try:
            self.files = Checkpoint(self.path)
        except ModelError:
            if weights:
                raise
            # A download that was interrupted.

    def require(self) -> None:
        """Opens the weight files, unless they are open."""
        if self.files is not None:
            return
        if not self.path.is_dir():
            raise ModelError(
                f"{self.path} is a file, expected a folder or a GGUF file (or load_format 'dummy')"
            )
        self.files = Checkpoint(self.path)

    def use_stored_head(self) -> str:
        """Takes the head that the tensors have in place of a tied one; returns a note, or ""."""
        if not self.description.tied_head or self.files is None:
            return ""
        scheme = scheme_of(self.quantization, self.files)
        note = own_head(self.family, self.files, scheme.codes_name)
        if not note:
            return ""
        self.description = replace(self.description, tied_head=False)
        return f"{self.path}: {note}"

    @cached_property
    def sources(self) -> Sources:
        """The weights of the open files that fill the slots."""
        files = self.files
        assert files is not None
        names = {self.family.tensor_name(name): name for name in files}
        if self.description.tied_head and only_head(self.family, names):
            names[f"{self.family.embed}.weight"] = names[f"{self.family.head}.weight"]
        family = self.family.as_stored(names)
        scheme = scheme_of(self.quantization, files)
        if self.quantization is None:
            _check_dense(self.path, names.values())

        def name_of(name: str) -> str:
            module = name.removesuffix(".weight")
            for end in ("weight", scheme.codes_name):
                if name.endswith(".weight") and f"{module}.{end}" in names:
                    return names[f"{module}.{end}"].removesuffix(end) + "weight"
            return names.get(name, name)

        def stored(row: Rows) -> Rows:
            row = replace(row, tensor=name_of(row.tensor))
            known = row.tensor in files and files.shape(row.tensor) != row.shape
            return family.stored(row, files.shape(row.tensor)) if known else row

        slots = family.slots(self.description)
        return Sources(
            files, scheme, [(slot, [stored(row) for row in each]) for slot, each in slots]
        )

    def formats(self, dtype: str) -> dict[str, str]:
        """Returns the format of each slot whose matrix is stored as codes."""
        if self.quantization is None:
            return {}
        if self.files is None:
            slots = list(self.family.slots(self.description))
            return scheme_of(self.quantization, None).formats(slots, dtype)
        return self.sources.scheme.formats(self.sources.slots, dtype)

    def unneeded(self) -> set[str]:
        """Returns the names of tensors without a slot that other files have, too: none."""
        return set()


def _config_at(path: Path) -> dict[str, Any]:
    """Reads a config. What is neither named like one nor holds one is another file."""
    try:
        return read_json(path)
    except ModelError as error:
        if path.suffix == ".json":
            raise
        raise ModelError(
            f"{path} is not a model, expected a folder with a config.json, a GGUF file or a "
            "config.json"
        ) from error


def _check_dense(path: Path, names: Iterable[str]) -> None:
    """Raises ModelError where tensors belong to quantized weights that nothing describes."""
    found = next((name for name in names if name.endswith(_OF_QUANTIZED)), None)
    if found is not None:
        raise ModelError(
            f"{path}: tensor {shown_name(found)} belongs to quantized weights, expected a "
            "description of them: quantization_config in config.json, or quantize_config.json"
        )
