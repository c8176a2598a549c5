"""Finds real tokenizers, templates and a tiny trained model beside the repository."""

import lzma
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT.parent / "shared" / "assets"


def asset(name: str) -> Path:
    """Returns the path of an asset; skips the test without it."""
    path = ASSETS / name
    if not path.exists():
        pytest.skip(f"needs ../shared/assets/{name}")
    return path


def tokenizer_folder(name: str, scratch: Path) -> Path:
    """Returns a folder with the tokenizer of that name, unpacked into `scratch` if needed."""
    folder = asset(f"tokenizers/{name}" if name != "stories260K" else "models/stories260K/hf")
    if (folder / "tokenizer.json").exists():
        return folder
    (scratch / "tokenizer.json").write_bytes(
        lzma.decompress((folder / "tokenizer.json.xz").read_bytes())
    )
    (scratch / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return scratch
