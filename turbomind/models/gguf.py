"""What GGUF files of a family say otherwise than a config.json and its checkpoint.

llama.cpp's src/models/ defines the keys and their defaults, and its conversion/ what converters
change in tensors. Each family has an `Architecture` for each name that its files have.

Not here: how a file is read (`turbomind.gguf`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turbomind.errors import ModelError
from turbomind.files.weight_file import Tensor

Values = dict[str, Any]


class GgufFile(Protocol):
    """An open file, as families see it."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Its entries."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by name."""

    def data(self, tensor: Tensor) -> bytes:
        """Reads a tensor."""


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture become a config.json.

    Attributes:
        name: Class of config.json.
        interleaved: The rotated elements of a head are neighbours.
        fields: Key without its architecture -> field of config.json, beside the common ones.
        harmless: Keys that change nothing for text.
        names: Name in a checkpoint of a hub -> name in a file, where it is not the common one.
        tables: Tensors that belong to the config.
        shifted_norms: The weights of norms have the family's offset added.
        bias: Field of config.json that says whether q, k and v have biases.
        scaling: Fields of a scaling of the rotation that files do not have.
        complete: Called with the file, its other keys and the fields, both without the
            architecture: sets the fields that files do not have.
    """

    name: str
    interleaved: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    shifted_norms: bool = False
    bias: str = "attention_bias"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    complete: Callable[[GgufFile, Values, Values], None] = lambda file, own, values: None


def wrong(file: GgufFile, key: str, expected: str) -> ModelError:
    """Returns the error of a key, or an own key of the architecture, with a wrong value."""
    own = f"{file.metadata.get('general.architecture')}.{key}"
    name = own if own in file.metadata else key
    seen = repr(file.metadata[name]) if name in file.metadata else "absent"
    return ModelError(f"{file.path}: {name} is {seen}, expected {expected}")


def head_dim(values: Values) -> int:
    """Returns the width of a head; 0 where the sizes are wrong, which the family refuses."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    known = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    width = values.get("head_dim", hidden // heads if known else 0)
    return width if isinstance(width, int) and width > 0 else 0


def check_experts(file: GgufFile, own: Values, values: Values) -> None:
    """Refuses a file without the numbers of experts, for which the family has defaults."""
    for key, name in (
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
    ):
        if name not in values:
            raise wrong(file, key, "a number")


def per_layer(file: GgufFile, key: str, value: Any, count: int) -> list[Any]:
    """Returns a value for each layer, of a key that has one for all or a list."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise wrong(file, key, f"a number or {count} of them")
    return values


def table(file: GgufFile, name: str, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns a table of rotations, float32 [count], positive and finite.

    Raises:
        ModelError: It is missing, or has another number, type or value.
    """
    found = file.tensors.get(name)
    if found is None:
        raise ModelError(f"{file.path}: tensor {name} is missing, expected F32 ({count},)")
    if found.dtype != "F32" or found.shape != (count,):
        raise ModelError(
            f"{file.path}: tensor {name} is {found.dtype} {found.shape}, expected F32 ({count},)"
        )
    values = np.frombuffer(file.data(found), "<f4")
    if not (np.isfinite(values) & (values >= 1e-6)).all():
        raise ModelError(
            f"{file.path}: tensor {name} has a value that is not positive and finite, "
            "expected divisors of frequencies"
        )
    return values


DIVISORS = "rope_freqs.weight"
WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
SECTIONS = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys about positions in images."""
