"""The small chat model that ships with lmchat: sessions work before anything is downloaded."""

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
"""What a chat with it takes."""


def bundled_model() -> Path:
    """The folder of the model that ships. Raises ModelError naming the files it lacks."""
    missing = [name for name in FILES if not (FOLDER / name).is_file()]
    if missing:
        raise ModelError(
            f"{NAME}, the model that ships with lmchat, is damaged: {FOLDER} has no "
            f"{', '.join(missing)}; install lmchat again or name another model"
        )
    return FOLDER


def find_model(model: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """What to load for what a caller named: nothing, or the text "memo", is the model that ships.

    A folder called memo in the working directory comes first. Every other name stays as it is.
    """
    if model is None or (model == NAME and not Path(NAME).is_dir()):
        return bundled_model()
    return model


def name_of(model: str | os.PathLike[str] | None) -> str:
    """What a caller named, to tell one model from another: a folder's whole path, or a name."""
    if model is None or (model == NAME and not Path(NAME).is_dir()):
        return NAME
    return str(Path(model).resolve()) if Path(model).exists() else str(model)
