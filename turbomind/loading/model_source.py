"""Where a model comes from: a folder or a GGUF file, chosen here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from turbomind.errors import ModelError
from turbomind.gguf.file import is_gguf
from turbomind.gguf.source import GgufSource
from turbomind.loading.folder import FolderSource
from turbomind.quant.sources import Sources

ModelSource: TypeAlias = FolderSource | GgufSource
"""What the files of a model say, and its weights. Files are opened once.

Both classes have the reader of the config (`family`), the fields of a config.json (`values`), the
architecture (`description`), ids that end a generation (`eos`), generation_config.json or the same
values (`generation`), parts that are not loaded (`encoders`, `draft_layers`), what a folder says of
its quantized weights (`quantization`), the GGUF file (`gguf`), the weight files once they are open
(`files`), and the tensors that fill the slots (`sources`).
"""


def source_of(path: Path, rope_length: int | None = None) -> ModelSource:
    """Returns the source of a model.

    Args:
        path: A folder, a GGUF file or a config.json.
        rope_length: Tokens that a rope scaling which depends on a length is computed for.

    Raises:
        NotFound: There is no model.
        ModelError: It cannot be used.
    """
    return GgufSource(path, rope_length) if is_gguf(path) else FolderSource(path, rope_length)


def checked_sources(source: ModelSource) -> Sources:
    """Returns the weights of a source whose files are open.

    Raises:
        ModelError: A slot's tensor is missing, misshapen or of a type that is not read, or a tensor
            has no slot.
    """
    sources, family, description = source.sources, source.family, source.description
    used = {
        tensor.name
        for _, rows in sources.slots
        for row in rows
        for _, tensor in sources.scheme.places(row)
    } | source.unneeded()
    others = ((name, family.tensor_name(name)) for name in sources.checkpoint if name not in used)
    extra = sorted(
        name
        for name, ours in others
        if ours is not None and not family.ignored_tensor(ours, description)
    )
    extra = sources.scheme.unused(extra)
    if extra:
        raise ModelError(
            f"{source.path}: {len(extra)} tensors that {description.architecture} has no use "
            f"for: {', '.join(extra[:8])}; expected none"
        )
    return sources
