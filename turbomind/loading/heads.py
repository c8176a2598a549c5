"""The matrix that logits come from: the head that a checkpoint stores, or the embedding.

A config says by `tie_word_embeddings` whether the embedding is the head too. Trainers copy the
field from the base model and store a head of its own nevertheless, and others leave out either of
two equal matrices, so the tensors decide, as in transformers 5 (`tie_weights`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from turbomind.files.checkpoint import DTYPES, CheckpointFiles
from turbomind.files.weight_file import Tensor, WeightFile
from turbomind.models import Family

PIECE = 4 << 20  # bytes of both tensors that are compared at a time


def own_head(family: Family, checkpoint: CheckpointFiles, codes_name: str) -> str:
    """Returns a sentence about the head that a checkpoint of a tied model has nevertheless; "" for
    none, or one that equals the embedding.

    Args:
        family: The reader of the config, which names the tensors.
        checkpoint: The tensors.
        codes_name: End of the names of tensors of codes, of a scheme that has them.
    """
    names = {family.tensor_name(name): name for name in checkpoint}
    head = names.get(f"{family.head}.weight")
    embed = names.get(f"{family.embed}.weight")
    codes = names.get(f"{family.head}.{codes_name}") if codes_name else None
    if codes is None and (head is None or embed is None or _equal(checkpoint, head, embed)):
        return ""
    return f"tie_word_embeddings is true, but {codes or head} differs from {embed}: it is used"


def only_head(family: Family, names: dict[str | None, str]) -> bool:
    """Returns whether a checkpoint stores a tied matrix under the name of the head alone.

    Args:
        family: The reader of the config.
        names: The checkpoint's tensors, by the names that `family` gives them.
    """
    return f"{family.embed}.weight" not in names and f"{family.head}.weight" in names


def _equal(checkpoint: CheckpointFiles, one: str, other: str) -> bool:
    """Compares the values of two tensors, up to the first piece that differs."""
    if checkpoint.shape(one) != checkpoint.shape(other):
        return False
    kinds = [checkpoint.dtype(name) for name in (one, other)]
    if any(kind not in DTYPES for kind in kinds):
        return kinds[0] == kinds[1]  # refused by its type when it is read
    pair = [checkpoint.find(name, checkpoint.shape(name)) for name in (one, other)]
    elements = PIECE // 4
    for first in range(0, int(np.prod(checkpoint.shape(one))), elements):
        left, right = (_piece(file, tensor, first, elements) for file, tensor in pair)
        same = kinds[0] == kinds[1] and left.tobytes() == right.tobytes()
        if not same and not np.array_equal(_values(left, kinds[0]), _values(right, kinds[1])):
            return False
    return True


def _piece(file: WeightFile, tensor: Tensor, first: int, elements: int) -> npt.NDArray[np.generic]:
    size = DTYPES[tensor.dtype][1]
    begin = tensor.begin + first * size
    data = file.read(begin, min(begin + elements * size, tensor.end))
    return np.frombuffer(data, f"<u{size}")


def _values(bits: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
