"""Writes a checkpoint of a shape for chat servers, whose tokens are characters.

The checkpoints of make_models.py have a tokenizer of bytes, so most of the tokens that they
generate have no text. Here nearly every token is one character, and a text has exactly one
encoding. A reply that a client sends again thus has the tokens that were generated, as text of a
trained model nearly always has. With other tokens, random weights would make every prefix cache
fail.

The rows of bytes and of parts of characters are scaled down in the tied head, so that greedy
sampling never chooses them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from make_models import write_checkpoint, write_json
from shapes import Shape

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Letters without other letters inside, and the private characters of plane 15.
RANGES = (
    (0x3400, 0x4DB5), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x20000, 0x2A6D6), (0x2A700, 0x2B734),
    (0x2B740, 0x2B81D), (0x2B820, 0x2CEA1), (0xF0000, 0xFFFFD),
)  # fmt: skip
PART_SCALE = 2.0**-7  # exact in bfloat16
COMPLETE = "complete"  # a file that is written last


def byte_letters() -> dict[int, str]:
    """Returns the letters by which byte-level BPE writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def characters() -> Iterator[str]:
    for first, last in RANGES:
        yield from map(chr, range(first, last + 1))


def vocabulary(size: int, specials: tuple[int, ...]) -> tuple[list[str], list[str], list[int]]:
    """Returns the tokens in the order of their ids, the merges, and the ids of incomplete tokens.

    Args:
        size: Number of tokens.
        specials: Ids of SPECIAL.
    """
    letters = byte_letters()
    tokens: list[str] = [letters[byte] for byte in range(256)]
    partial = list(range(256))
    known = set(tokens)
    merges: list[str] = []
    source = characters()
    while len(tokens) < size:
        if len(tokens) in specials:
            partial.append(len(tokens))
            tokens.append(SPECIAL[specials.index(len(tokens))])
            continue
        word = "".join(letters[byte] for byte in next(source).encode())
        needed = [word[:end] for end in range(2, len(word) + 1) if word[:end] not in known]
        if any(len(tokens) + each in specials for each in range(len(needed))):
            needed = needed[:1]  # the character is left out
        if len(tokens) + len(needed) > size:
            needed = needed[: size - len(tokens)]
        for each in needed:
            if each != word:
                partial.append(len(tokens))
            known.add(each)
            tokens.append(each)
            merges.append(f"{each[:-1]} {each[-1]}")
    return tokens, merges, partial


def write_chat_model(shape: Shape, folder: Path) -> None:
    """Writes config.json, weights and tokenizer into a folder, unless it is complete."""
    if (folder / COMPLETE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(shape, folder)
    end = int(shape.hf["eos_token_id"])
    tokens, merges, partial = vocabulary(shape.vocab, (end, end + 1, end + 2))
    scale_rows(folder / "model.safetensors", shape, partial)
    write_tokenizer(folder, tokens, merges)
    (folder / COMPLETE).touch()


def scale_rows(path: Path, shape: Shape, rows: list[int]) -> None:
    """Multiplies rows of the embedding, which is also the head, by PART_SCALE."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    begin = 8 + header_bytes + header["model.embed_tokens.weight"]["data_offsets"][0]
    size = (shape.vocab, shape.hidden)
    table = np.memmap(path, dtype=np.uint16, mode="r+", offset=begin, shape=size)
    values = (table[rows].astype(np.uint32) << 16).view(np.float32) * np.float32(PART_SCALE)
    table[rows] = (values.view(np.uint32) >> 16).astype(np.uint16)
    table.flush()


def write_tokenizer(folder: Path, tokens: list[str], merges: list[str]) -> None:
    byte_level: dict[str, Any] = {"type": "ByteLevel", "use_regex": True}
    byte_level |= {"add_prefix_space": False, "trim_offsets": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [
        {"id": tokens.index(text), "content": text, "special": True, **flags} for text in SPECIAL
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {text: index for index, text in enumerate(tokens)},
        "merges": merges,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2]}
    write_json(
        folder / "tokenizer_config.json",
        names | {"chat_template": TEMPLATE, "clean_up_tokenization_spaces": False},
    )
