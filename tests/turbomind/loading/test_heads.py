"""The matrix that logits come from, where a config ties it to the embedding and files have it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from checkpoints import reference_logits, tiny_tensors, write_tiny

from turbomind import Engine, ModelError
from turbomind.files.checkpoint import Checkpoint
from turbomind.loading import heads
from turbomind.loading.loader import describe

IDS = [3, 40, 17, 5, 66]
TIED = {"tie_word_embeddings": True}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, np.ndarray]
Open = Callable[..., Engine]


def other_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBED][::-1].copy()


def last_value(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBED].copy()
    tensors[HEAD][-1, -1] += 1


def equal_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBED].copy()


def only_the_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBED)


def no_head(tensors: Tensors) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "tied"),
    [(other_head, False), (last_value, False), (equal_head, True), (only_the_head, True),
     (no_head, True)],
)  # fmt: skip
def test_logits_come_from_the_matrix_that_the_reference_takes(
    change: Callable[[Tensors], None],
    tied: bool,
    tmp_path: Path,
    open_engine: Open,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(heads, "PIECE", 1000)  # in several pieces
    tensors = tiny_tensors()
    change(tensors)
    folder = write_tiny(tmp_path, TIED, tensors)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with caplog.at_level(logging.WARNING):
        engine = open_engine(folder, **devices.EXACT)
    noted = [text for text in caplog.messages if "lm_head.weight differs from" in text]
    assert len(noted) == (not tied)
    assert engine.info.description.tied_head == tied
    theirs = reference_logits(reference, IDS)
    bound = 2e-2 if devices.ON_GPU else 1e-4
    assert np.abs(engine.logits(IDS) - theirs).max() <= bound * np.abs(theirs).max()


def test_an_own_head_changes_the_fingerprint_and_an_equal_one_does_not(
    tmp_path: Path, open_engine: Open
) -> None:
    facts = []
    for name, change in (("none", no_head), ("equal", equal_head), ("other", other_head)):
        tensors = tiny_tensors()
        change(tensors)
        info = describe(write_tiny(tmp_path / name, TIED, tensors))
        facts.append(info.description.facts())
        assert info.weight_bytes > 0
    assert facts[0] == facts[1] != facts[2]


def test_values_are_compared_across_types(tmp_path: Path) -> None:
    """An embedding in float32 and its head in bfloat16 are equal where no value was rounded."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    embed = torch.from_numpy(tiny_tensors()[EMBED])
    for values, dtype, equal in (
        (embed.bfloat16().float(), torch.bfloat16, True),
        (embed.half().float(), torch.float16, True),
        (embed, torch.bfloat16, False),
    ):
        folder = write_tiny(tmp_path, TIED)
        save_file({EMBED: values, HEAD: values.to(dtype)}, folder / "model.safetensors")
        info = describe(folder, weights=False)
        assert info.description.tied_head == equal
        assert bool(info.head_note) != equal


def test_a_head_of_another_shape_is_refused_by_name(tmp_path: Path, open_engine: Open) -> None:
    tensors = tiny_tensors() | {HEAD: np.ones((71, 32), np.float32)}
    with pytest.raises(ModelError, match=r"lm_head.weight has shape \(71, 32\), expected \(70, 32"):
        open_engine(write_tiny(tmp_path, TIED, tensors))


def test_a_model_without_the_head_that_it_needs_is_refused(
    tmp_path: Path, open_engine: Open
) -> None:
    folder = write_tiny(tmp_path, {"tie_word_embeddings": False})
    with pytest.raises(ModelError, match=re.escape("tensor lm_head.weight is missing")):
        open_engine(folder)


def test_a_family_that_ties_by_default_needs_no_field(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 8}
    config |= {"hidden_activation": "gelu_pytorch_tanh"}
    for name in ("tie_word_embeddings", "hidden_act"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert HEAD not in Checkpoint(folder)
    assert describe(folder, weights=False).description.tied_head
