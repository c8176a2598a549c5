"""Parts that GGUF files leave out, or have beside the language model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from checkpoints import SMALL, TINY_SHAPES, Zoo, prompt, reference_logits, write_tiny

import turbomind
from turbomind import ModelError
from turbomind.loading.loader import describe

Open = Callable[..., turbomind.Engine]
F32 = gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize(
    "missing",
    [
        ["attn_output"],
        ["attn_q", "attn_output"],
        ["attn_k", "attn_v"],
        ["attn_q", "attn_k", "attn_v", "attn_output"],
        ["ffn_gate"],
        ["ffn_up", "ffn_down"],
    ],
)
def test_a_bias_that_is_missing_is_zero(
    missing: list[str], zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    """In one layer; others have all, or in the file of one layer none has."""
    torch = pytest.importorskip("torch")
    folder = zoo.folder("llama_gqa_biases_tied")
    model = copy.deepcopy(zoo.model("llama_gqa_biases_tied"))
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    names |= {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    layer = model.model.layers[0]
    for name in missing:
        bias = getattr(layer.self_attn if "attn" in name else layer.mlp, names[name]).bias
        assert bias.abs().max() > 1e-3
        with torch.no_grad():
            bias.zero_()
    without = [f"blk.0.{name}.bias" for name in missing]
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", without=without)
    ids = prompt(50, SMALL["vocab_size"])
    ours, theirs = open_engine(path).logits(ids), reference_logits(model, ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_a_qwen2_without_biases_has_none(zoo: Zoo, open_engine: Open, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = copy.deepcopy(zoo.model("qwen2"))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith(".bias"):
                values.zero_()
    layers = range(len(model.model.layers))
    without = [f"blk.{i}.attn_{kind}.bias" for i in layers for kind in "qkv"]
    path = gguf_files.write_gguf(zoo.folder("qwen2"), tmp_path / "m.gguf", without=without)
    ids = prompt(50, SMALL["vocab_size"])
    ours, theirs = open_engine(path).logits(ids), reference_logits(model, ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def written(tmp_path: Path, name: str, **options: Any) -> Path:
    folder = write_tiny(tmp_path / "tiny")
    return gguf_files.write_gguf(folder, tmp_path / f"{name}.gguf", **options)


def test_encoders_in_the_file_are_skipped_and_reported(tmp_path: Path, open_engine: Open) -> None:
    """As Ollama stores models that also see and hear."""
    keys: dict[str, Any] = {
        "llama.vision.block_count": 27, "llama.vision.embedding_length": 64,
        "llama.audio.attention.head_count": 8, "llama.mm.tokens_per_image": 256,
        "clip.has_vision_encoder": True,
    }  # fmt: skip
    names = ("v.patch_embedding.weight", "v.blk.0.attn_q.weight", "mm.mm_input_projection.weight",
             "a.conv1d.0.weight")  # fmt: skip
    more = {name: np.ones((4, 8), np.float32) for name in names}
    path = written(tmp_path, "whole", changes=keys, more=more)
    plain = written(tmp_path, "plain")
    ids = [3, 4, 5, 60]
    engine = open_engine(path)
    assert (engine.logits(ids) == open_engine(plain).logits(ids)).all()
    assert describe(path).encoders == ("vision", "audio")
    assert describe(path).unknown_fields == ()
    assert describe(plain).encoders == ()


def test_layers_that_draft_are_skipped_and_reported(tmp_path: Path, open_engine: Open) -> None:
    plain = written(tmp_path, "plain")
    blocks = describe(plain).description.layers
    last = len(blocks)
    names = (f"blk.{last}.attn_norm.weight", f"blk.{last}.nextn.eh_proj.weight",
             f"blk.{last}.nextn.shared_head_norm.weight")  # fmt: skip
    more = {name: np.ones((4, 8), np.float32) for name in names}
    keys = {"llama.block_count": last + 1, "llama.nextn_predict_layers": 1}
    path = written(tmp_path, "drafts", changes=keys, more=more)
    ids = [3, 4, 5, 60]
    assert (open_engine(path).logits(ids) == open_engine(plain).logits(ids)).all()
    assert describe(path).draft_layers == 1
    assert describe(plain).draft_layers == 0
    with pytest.raises(ModelError, match="nextn_predict_layers is 9, expected fewer than the"):
        describe(written(tmp_path, "many", changes={**keys, "llama.nextn_predict_layers": 9}))


@pytest.mark.parametrize("kind", ["IQ4_XS", "IQ3_S", "Q2_K", "Q3_K", "TQ1_0"])
def test_types_that_are_not_read_are_refused_before_memory_is_estimated(
    kind: str, zoo: Zoo, tmp_path: Path
) -> None:
    """As if the type were the weights', a file of 7 GB was said to need 25 GB of memory."""
    number = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    path = tmp_path / "model.gguf"
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    folder = write_tiny(tmp_path / "tiny", wide, wide_tensors())
    name = "blk.0.ffn_down.weight"

    def blocks(values: np.ndarray, chosen: object) -> np.ndarray:
        return np.zeros((256, size), np.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "blocks", blocks)
        gguf_files.write_gguf(folder, path, lambda each: number if each == name else F32)
    words = f"tensor {name} has dtype {kind}, expected one of BF16, F16, F32, MXFP4, Q8_0, Q4_0"
    for look in (describe, turbomind.Engine):
        with pytest.raises(ModelError, match=words):
            look(path)


def wide_tensors() -> dict[str, np.ndarray]:
    """The TINY model's tensors with 256 columns."""
    shapes = {
        name: tuple({32: 256, 48: 256, 16: 128}.get(size, size) for size in shape)
        for name, shape in TINY_SHAPES.items()
    }
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def test_other_tensors_are_still_refused(tmp_path: Path, open_engine: Open) -> None:
    more = {"vision_model.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match="1 tensors .* no use for: vision_model.weight"):
        open_engine(written(tmp_path, "other", more=more))
