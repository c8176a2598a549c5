"""The tensors of a model's files as the sources of the core's weight slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.gguf import tensors as gguf_tensors
from turbomind.gguf.file import GgufFile
from turbomind.gguf.scheme import GgufScheme
from turbomind.loading.heads import only_head
from turbomind.models import Description, Family, Quantization, Rows
from turbomind.quant.scheme import Scheme
from turbomind.quant.schemes import scheme_of
from turbomind.shown import shown_name

# Ends of the names of tensors that only checkpoints with quantized weights have.
_OF_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".scales")


@dataclass(frozen=True)
class Sources:
    """A checkpoint, the scheme by which it stores matrices, and the rows that fill each slot."""

    checkpoint: CheckpointFiles
    scheme: Scheme
    slots: list[tuple[str, list[Rows]]]

    def prefetch(self, number: int) -> None:
        """Asks the system to read the tensors of a slot, if there is one of that number."""
        for row in self.slots[number][1] if number < len(self.slots) else []:
            for file, tensor in self.scheme.places(row) if not row.index else ():
                file.prefetch(tensor)

    def pack(self, builder: _C.DecoderBuilder) -> None:
        """Fills all slots."""
        for number, (slot, rows) in enumerate(self.slots):
            self.prefetch(number + 1)  # the disk works while we pack
            self.scheme.pack(builder, slot, rows)


def open_sources(
    path: Path,
    family: Family,
    description: Description,
    checkpoint: CheckpointFiles,
    file: GgufFile | None,
    quantization: Quantization | None = None,
) -> Sources:
    """Returns the weights of a model that fill its slots.

    Args:
        path: The model folder.
        family: The reader of the config, which names the tensors.
        description: The architecture.
        checkpoint: The model's weight files.
        file: The GGUF file, in place of the folder.
        quantization: What the checkpoint says about its quantized weights.

    Raises:
        ModelError: There are no weights for a slot, or tensors without a description.
    """
    if file is not None:
        slots = gguf_tensors.slots_of(file, family, description)
        return Sources(checkpoint, GgufScheme(checkpoint), slots)
    names = {family.tensor_name(name): name for name in checkpoint}
    if description.tied_head and only_head(family, names):
        names[f"{family.embed}.weight"] = names[f"{family.head}.weight"]
    family = family.as_stored(names)
    scheme = scheme_of(quantization, checkpoint)
    if quantization is None:
        _check_dense(path, names.values())

    def name_of(name: str) -> str:
        module = name.removesuffix(".weight")
        for end in ("weight", scheme.codes_name):
            if name.endswith(".weight") and f"{module}.{end}" in names:
                return names[f"{module}.{end}"].removesuffix(end) + "weight"
        return names.get(name, name)

    def stored(row: Rows) -> Rows:
        row = replace(row, tensor=name_of(row.tensor))
        known = row.tensor in checkpoint and checkpoint.shape(row.tensor) != row.shape
        return family.stored(row, checkpoint.shape(row.tensor)) if known else row

    slots = [(slot, [stored(row) for row in each]) for slot, each in family.slots(description)]
    return Sources(checkpoint, scheme, slots)


def _check_dense(path: Path, names: Iterable[str]) -> None:
    """Raises ModelError where tensors belong to quantized weights that nothing describes."""
    found = next((name for name in names if name.endswith(_OF_QUANTIZED)), None)
    if found is not None:
        raise ModelError(
            f"{path}: tensor {shown_name(found)} belongs to quantized weights, expected a "
            "description of them: quantization_config in config.json, or quantize_config.json"
        )
