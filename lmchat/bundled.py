"""The small chat model that ships with lmchat, and names of models.

Not here: loading a model (`turbomind.loading`).
"""

from __future__ import annotations

import os
from pathlib import Path

from lmchat.errors import ModelError

NAME = "memo"
FOLDER = Path(__file__).parent / NAME
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""The files that a chat with the bundled model needs."""


def bundled_model() -> Path:
    """Returns the folder of the bundled model.

    Raises ModelError, which names the missing files, where it is damaged.
    """
    missing = [name for name in FILES if not (FOLDER / name).is_file()]
    if missing:
        raise ModelError(
            f"{NAME}, the model that ships with lmchat, is damaged: {FOLDER} has no "
            f"{', '.join(missing)}; install lmchat again or name another model"
        )
    return FOLDER


def find_model(model: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Returns the model to load for a name.

    None and "memo" are the bundled model, unless the working directory has a folder "memo". Every
    other name is returned unchanged.
    """
    if model is None or (model == NAME and not Path(NAME).is_dir()):
        return bundled_model()
    return model


def name_of(model: str | os.PathLike[str] | None) -> str:
    """Returns the name of a model in lists: a folder's absolute path, or the name itself.

    The last part of a path stays as it was typed, also where it is a link: a link such as "current"
    keeps its name when it is switched to another folder.
    """
    if model is None or (model == NAME and not Path(NAME).is_dir()):
        return NAME
    path = Path(model)
    if not path.exists():
        return str(model)
    if path.name in ("", ".."):
        return str(path.resolve())
    return str(path.parent.resolve() / path.name)
