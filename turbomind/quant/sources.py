"""The tensors of a model's files as the sources of the core's weight slots."""

from __future__ import annotations

from dataclasses import dataclass

import turbomind._C as _C
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models import Rows
from turbomind.quant.scheme import Scheme


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
