"""Fields that one family has, in the form of its checkpoints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TINY, tiny_tensors, write_safetensors, write_tiny

from turbomind import Engine, InvalidRequest, ModelError, describe
from turbomind.models import Description, family_of


def read(values: dict[str, Any], rope_length: int | None = None) -> Description:
    return family_of(values).describe(values, rope_length)


def named(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """Returns a small config of that family."""
    return {**TINY, "architectures": [architecture], "model_type": model_type, **fields}


SMOLLM3 = named(
    "SmolLM3ForCausalLM", "smollm3", num_hidden_layers=6, no_rope_layer_interval=3,
    max_window_layers=28, use_sliding_window=False, sliding_window=None,
)  # fmt: skip
PHI3 = named("Phi3ForCausalLM", "phi3", head_dim=16)
# What Phi-4-mini's file has besides.
PHI4_MINI = PHI3 | {
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1.0, 1.5, 20.0, 30.0, 40.0, 47.0],
        "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.25],
        "type": "longrope",
    },
    "sliding_window": 262144,
}
GRANITE = named(
    "GraniteForCausalLM", "granite", attention_multiplier=0.015625, embedding_multiplier=12.0,
    residual_multiplier=0.22, logits_scaling=8.0,
)  # fmt: skip


def test_smollm3_does_not_rotate_some_layers() -> None:
    def ropes(**changes: Any) -> list[int]:
        return [layer.rope for layer in read(SMOLLM3 | changes).layers]

    assert ropes() == [0, 0, -1, 0, 0, -1]
    assert ropes(no_rope_layers=[1, 0, 1, 1, 0, 0]) == [0, -1, 0, 0, -1, -1]
    # The reference takes a list that is too long; a layer without rotation has the window.
    longer = read(SMOLLM3 | {"no_rope_layers": [0] + 6 * [1], "use_sliding_window": True,
                             "sliding_window": 9})  # fmt: skip
    assert [(layer.rope, layer.window) for layer in longer.layers] == [(-1, 9)] + 5 * [(0, 0)]
    kinds = ["full_attention", "sliding_attention"] * 3
    listed = read(SMOLLM3 | {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 9})
    assert [layer.window for layer in listed.layers] == [0, 9] * 3
    absent = {name: value for name, value in SMOLLM3.items() if name != "tie_word_embeddings"}
    assert read(absent).tied_head
    assert not read(SMOLLM3 | {"tie_word_embeddings": False}).tied_head


@pytest.mark.parametrize("listed", [[1, 0], [2] * 6, [True] * 6, "111011", {"0": 1}])
def test_smollm3_refuses_wrong_lists(listed: Any) -> None:
    with pytest.raises(ModelError, match="no_rope_layers is .*, expected 6 times 0 or 1"):
        read(SMOLLM3 | {"no_rope_layers": listed})


def test_phi3_has_one_table_per_load() -> None:
    scaling = PHI4_MINI["rope_scaling"]
    long, short = read(PHI4_MINI), read(PHI4_MINI, 4096)
    assert (long.max_context, short.max_context) == (131072, 4096)
    plain = 1e4 ** (-np.arange(6) / 6)  # 12 of 16 elements of a head are rotated
    for model, factors in ((long, scaling["long_factor"]), (short, scaling["short_factor"])):
        assert np.allclose(model.rope.inv_freq, plain / factors, rtol=1e-6)
        expected = np.sqrt(1 + np.log(131072 / 4096) / np.log(4096))
        assert model.rope.attention_factor == pytest.approx(expected)
    assert read(PHI4_MINI, 4097).rope == read(PHI4_MINI | {"max_position_embeddings": 4097} | {
        "rope_scaling": scaling | {"factor": 32.0}}).rope  # fmt: skip
    with pytest.raises(InvalidRequest, match="rope_length is 131073"):
        read(PHI4_MINI, 131073)
    for name in ("su", "yarn", "longrope"):
        assert read(PHI4_MINI | {"rope_scaling": scaling | {"type": name}}) == long
    # A length of training inside of the rope fields counts only where there is none outside.
    inside = scaling | {"original_max_position_embeddings": 64}
    assert read(PHI4_MINI | {"rope_scaling": inside}) == long


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear', expected 'longr"),
        ({"partial_rotary_factor": 0.5}, "long_factor is .*, expected 4 numbers"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2, expected a share"),
        ({"partial_rotary_factor": 0.1, "rope_scaling": None}, "partial_rotary_factor is 0.1"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1"),
    ],
)
def test_phi3_refuses_what_it_cannot_do(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read(PHI4_MINI | changes)


@pytest.mark.parametrize(
    "value", [[1.0] * 5, [1.0] * 5 + [0.0], [1.0] * 5 + [float("nan")], 1, [True] * 6]
)
def test_longrope_refuses_wrong_factors(value: Any) -> None:
    scaling = PHI4_MINI["rope_scaling"] | {"short_factor": value}
    with pytest.raises(ModelError, match="short_factor is .*, expected 6 numbers"):
        read(PHI4_MINI | {"rope_scaling": scaling})


def test_granite_has_multipliers() -> None:
    model = read(GRANITE)
    assert (model.embed_scale, model.logit_scale) == (12.0, 0.125)
    assert {(layer.attn_scale, layer.residual_scale) for layer in model.layers} == {
        (0.015625, 0.22)
    }
    for name in ("attention", "embedding", "residual"):
        for wrong in (0, -1, "1", float("inf")):
            with pytest.raises(ModelError, match=f"{name}_multiplier is"):
                read(GRANITE | {f"{name}_multiplier": wrong})
    with pytest.raises(ModelError, match="logits_scaling is 0"):
        read(GRANITE | {"logits_scaling": 0})


GEMMA2 = named("Gemma2ForCausalLM", "gemma2", head_dim=16, num_hidden_layers=6,
               hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
               cache_implementation="hybrid", sliding_window=9)  # fmt: skip
# As Gemma 3's first files, and as those that newer libraries write.
GEMMA3 = named("Gemma3ForCausalLM", "gemma3_text", head_dim=16, num_hidden_layers=6,
               hidden_act=None, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=100,
               sliding_window=9, sliding_window_pattern=3, rope_theta=1e6, rope_local_base_freq=500,
               rope_scaling={"rope_type": "linear", "factor": 8.0})  # fmt: skip
GEMMA3_NEW = {name: value for name, value in GEMMA3.items() if "rope" not in name} | {
    "layer_types": 2 * (2 * ["sliding_attention"] + ["full_attention"]),
    "_sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 500, "rope_type": "default"},
    },
}


def test_gemma_reads_gelu_as_its_tanh_approximation() -> None:
    gemma = named("GemmaForCausalLM", "gemma", head_dim=16, hidden_act="gelu")
    d = read(gemma)
    for name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"):
        assert d == read(gemma | {"hidden_act": name})
    assert d == read(gemma | {"hidden_activation": "silu"})  # which the reference does not read
    assert d.layers[0].activation == "gelu_tanh"
    assert (d.embed_scale, d.norm_offset) == (32**0.5, 1.0)
    for wrong in ("silu", "gelu_10", "quick_gelu"):
        with pytest.raises(ModelError, match=f"hidden_act is '{wrong}'"):
            read(gemma | {"hidden_act": wrong})
    with pytest.raises(ModelError, match="hidden_activation is 'gelu', expected 'gelu_pytorch_t"):
        read(GEMMA2 | {"hidden_activation": "gelu"})
    absent = {name: value for name, value in gemma.items() if name != "tie_word_embeddings"}
    assert read(absent).tied_head


def test_gemma2_has_soft_caps_and_windows_in_every_other_layer() -> None:
    d = read(GEMMA2)
    assert [layer.window for layer in d.layers] == [9, 0] * 3
    assert {(x.softcap, x.attn_scale, x.post_norms) for x in d.layers} == {(50.0, 0.0625, True)}
    assert d.final_softcap == 30.0
    none = read(GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (none.layers[0].softcap, none.final_softcap) == (0, 0)
    with pytest.raises(ModelError, match="layer_types is"):
        read(GEMMA2 | {"layer_types": ["sliding_attention"]})
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
        with pytest.raises(ModelError, match=f"{name} is -1"):
            read(GEMMA2 | {name: -1})


def test_gemma3_applies_soft_caps_as_the_reference() -> None:
    assert read(GEMMA3 | {"final_logit_softcapping": 30.0}).final_softcap == 30.0
    text = GEMMA3_4B["text_config"] | {"final_logit_softcapping": 30.0}  # type: ignore[operator]
    with pytest.raises(ModelError, match="final_logit_softcapping is 30.0, expected null"):
        read(GEMMA3_4B | {"text_config": text})


@pytest.mark.parametrize("config", [GEMMA3, GEMMA3_NEW], ids=["old", "new"])
def test_gemma3_has_a_rotation_per_layer_type(config: dict[str, Any]) -> None:
    d = read(config)
    assert [layer.window for layer in d.layers] == [9, 9, 0] * 2
    assert [layer.rope for layer in d.layers] == [1, 1, 0] * 2
    assert d.max_context == 256  # the positions of a Gemma 3 are those after scaling
    pairs = np.arange(8) / 8
    assert np.allclose(d.rope.inv_freq, 1e6**-pairs / 8, rtol=1e-6)
    assert np.allclose(d.other_ropes[0].inv_freq, 500.0**-pairs, rtol=1e-6)
    assert {layer.attn_scale for layer in d.layers} == {0.1}
    assert (d.layers[0].softcap, d.final_softcap) == (0, 0)
    # A window as long as the context is full attention, with the rotation of windows.
    wide = read(config | {"sliding_window": 256})
    assert [(layer.window, layer.rope) for layer in wide.layers] == [(0, 1), (0, 1), (0, 0)] * 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*'full_attention'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_local_base_freq": 0.5}, "rope_theta is 0.5"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected null"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ],
)
def test_gemma3_refuses_what_it_cannot_do(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read(GEMMA3 | changes)


# The fields of Mistral-Small-3.1, Qwen2.5-VL and Qwen3-VL around those of a small text model.
TEXT = {
    name: value
    for name, value in TINY.items()
    if name not in ("architectures", "model_type", "tie_word_embeddings", "eos_token_id")
}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": TEXT | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
QWEN2_5_VL = TEXT | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "vision_config": {"depth": 32, "hidden_act": "silu", "model_type": "qwen2_5_vl"},
    "max_window_layers": 70,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": TEXT | {
        "model_type": "qwen3_vl_text", "head_dim": 16, "dtype": "bfloat16", "eos_token_id": 7,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 3, 3],
                         "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "deepstack_visual_indexes": [5, 11, 17]},
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 6],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
WRAPPERS = {"mistral3": MISTRAL3, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_have_the_fields_of_their_language_model(name: str, tmp_path: Path) -> None:
    config = WRAPPERS[name]
    info = describe(written(tmp_path, config))
    d = info.description
    assert d.architecture == config["architectures"][0]
    assert (d.hidden, d.vocab, d.max_context) == (32, 70, 256)
    assert d.tied_head == (name != "mistral3")
    assert d.layers[0].window == 0
    assert info.unknown_fields == ()
    assert info.encoders == ("vision",)
    assert info.dtype == ("float32" if name == "qwen2_5_vl" else "bfloat16")
    assert info.eos_token_ids == {"qwen2_5_vl": (5,), "qwen3_vl": (7,)}.get(name, ())
    if name != "mistral3":  # text has one position, so mrope is an ordinary rotation
        plain = {k: v for k, v in TEXT.items() if k != "rope_scaling"}
        assert d.rope == read(plain | {"architectures": ["LlamaForCausalLM"]}).rope


def test_a_sparse_text_config_has_the_sizes_of_the_reference() -> None:
    for name, sizes in (("mistral3", (32000, 4096, 32)), ("qwen3_vl", (151936, 4096, 32))):
        text = {"model_type": WRAPPERS[name]["text_config"]["model_type"]}
        d = read(WRAPPERS[name] | {"text_config": text})
        assert (d.vocab, d.hidden, len(d.layers)) == sizes


def test_gemma_3_4b_has_its_sizes(tmp_path: Path) -> None:
    info = describe(written(tmp_path, GEMMA3_4B))
    d = info.description
    assert info.parameters == 3_880_263_168  # 4.3 B with the encoder of images
    assert (d.vocab, d.max_context, d.tied_head) == (262208, 131072, True)
    assert [i for i, layer in enumerate(d.layers) if not layer.window] == [5, 11, 17, 23, 29]
    assert info.eos_token_ids == (1, 6)


def test_a_head_is_tied_at_either_level() -> None:
    def tied(outer: Any, text: Any) -> bool:
        config = QWEN3_VL | {"tie_word_embeddings": outer}
        inner = {**QWEN3_VL["text_config"], "tie_word_embeddings": text}  # type: ignore[dict-item]
        return read(config | {"text_config": inner}).tied_head

    assert [tied(*each) for each in ((None, None), (False, None), (None, False))] == [False] * 3
    assert [tied(*each) for each in ((True, None), (None, True), (False, True))] == [True] * 3
    with pytest.raises(ModelError, match="tie_word_embeddings is 'yes'"):
        tied("yes", None)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("mistral3", {"text_config": None}, "text_config is None, expected an object"),
        ("qwen3_vl", {"text_config": [1]}, r"text_config is \[1\], expected an object"),
        ("qwen2_5_vl", {"hidden_size": None}, "hidden_size is None"),
        (
            "mistral3",
            {"text_config": {"model_type": "ministral3"}},
            "model_type is 'ministral3', e",
        ),
        ("mistral3", {"model_type": "mistral"}, "model_type is 'mistral', expected 'mistral3'"),
        ("qwen3_vl", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*fp8"),
    ],
)
def test_wrappers_without_a_language_model_of_ours_are_refused(
    name: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ModelError, match=match):
        read(WRAPPERS[name] | changes)
    flat = {k: v for k, v in QWEN2_5_VL.items() if k != "hidden_size"}
    with pytest.raises(ModelError, match="text_config is None.*language model of this qwen2_5_vl"):
        read(flat)


@pytest.mark.parametrize(
    ("body", "head", "outer"),
    [
        ("language_model.model.", "language_model.lm_head.weight", ""),
        ("model.language_model.", "lm_head.weight", "model."),
    ],
)
def test_tensors_of_a_wrapper_are_found_and_those_of_its_encoder_skipped(
    body: str, head: str, outer: str, tmp_path: Path
) -> None:
    """Hubs have both ways to name them."""
    text = TEXT | {"model_type": "mistral", "sliding_window": None, "torch_dtype": "float32"}
    config = MISTRAL3 | {"text_config": text, "torch_dtype": "float32"}
    tensors = {name.replace("model.", body, 1): value for name, value in tiny_tensors().items()}
    tensors[head] = np.arange(70 * 32, dtype=np.float32).reshape(70, 32) / 700
    names = ("vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight")
    encoder = {outer + name: np.ones(2, np.float32) for name in names}
    plain = tiny_tensors() | {"lm_head.weight": tensors[head]}
    alone = write_tiny(tmp_path / "alone", {"tie_word_embeddings": False}, plain)
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "cache_memory": "2MiB"}
    with Engine(alone, **options) as engine:
        expected = engine.logits([3, 4, 5])
    folder = tmp_path / "wrapped"
    folder.mkdir()
    written(folder, config)
    write_safetensors(folder / "model.safetensors", tensors | encoder)
    with Engine(folder, **options) as engine:
        assert np.array_equal(engine.logits([3, 4, 5]), expected)
    write_safetensors(
        folder / "model.safetensors", tensors | {"audio.weight": plain["lm_head.weight"]}
    )
    with pytest.raises(ModelError, match="1 tensors that Mistral3.*audio.weight"):
        Engine(folder, **options)
    write_safetensors(folder / "model.safetensors", encoder)
    with pytest.raises(ModelError, match="tensor model.* is missing"):
        Engine(folder, **options)
