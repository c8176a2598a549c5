"""Writes GGUF files of model folders, with the library's writer and its table of tensor names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from turbomind.files.checkpoint import SafetensorsFile

F32 = gguf.GGMLQuantizationType.F32
_DTYPES = {"F32": np.float32, "F16": np.float16}
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
# By model type, where they differ.
_KINDS = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")

# Of other families than the first ones.
_MORE = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_PERMUTED = (
    "llama",
    "granite",
    "granitemoe",
    "smollm3",
    "mistral3",
)  # rotated elements are neighbours
_WINDOWED = ("gemma2", "gemma3", "gemma4", "gpt-oss", "phi3")

_SCALING = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
}

# Places of the float16 scales in a block, and the spread of scale and minimum for which random
# codes have a standard deviation of about 1 and a mean of about 0.
_SCALES = {
    "Q4_K": {0: 1 / 150, 2: 7.5 / 150},
    "Q5_K": {0: 1 / 300, 2: 15.5 / 300},
    "Q6_K": {208: 1 / 1400},
}

Types = Callable[[str], gguf.GGMLQuantizationType]


def write_gguf(
    folder: Path,
    path: Path,
    types: Types = lambda name: F32,
    *,
    kind: str | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray] | None = None,
    experts: str | None = None,
    rounded: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values,
    without: Collection[str] = (),
) -> Path:
    """Writes the model of a folder as llama.cpp's converter does, and returns `path`.

    Args:
        folder: A folder with config.json and model.safetensors.
        path: The file.
        types: The type of a matrix by its GGUF name. Vectors are float32.
        kind: The architecture. None: that of the config's model type.
        tokenizer: Metadata of the tokenizer. None: none.
        changes: Metadata in place of others; None removes an entry.
        more: Further tensors, float32.
        experts: How gates, ups and downs of experts are stored: "apart", "fused" with gate and up
            in one tensor, or "single" with a tensor for each expert. None: as the family has them.
        rounded: Returns values in place of those of a tensor, by its GGUF name.
        without: Names of tensors that are left out.
    """
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    kind = kind or _kind(config)
    writer = gguf.GGUFWriter(path, kind)
    entries = {f"{kind}.{key}": value for key, value in _own_entries(config, kind).items()}
    entries |= {**(tokenizer or {}), **(changes or {})}
    for key, value in entries.items():
        if value is not None and key != "general.architecture":
            add(writer, key, value)
    stored = tensors(folder, config, kind)
    if experts is not None:
        stored = _stored_experts(stored, experts)
    for name in without:
        del stored[name]
    for name, values in {**stored, **(more or {})}.items():
        chosen = types(name) if values.ndim > 1 else F32
        values = rounded(name, values)
        data = values if chosen == F32 else blocks(values, chosen)
        writer.add_tensor(name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(config: Mapping[str, Any]) -> str:
    """Returns the architecture of a model type."""
    name: str = config["model_type"].removesuffix("_text")
    return _KINDS.get(name, name)


def _own_entries(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns the metadata of the architecture, without its name."""
    names = {
        **_KEYS,
        **_MORE,
        **({"sliding_window": "attention.sliding_window"} if kind in _WINDOWED else {}),
    }
    entries = {key: config[name] for name, key in names.items() if config.get(name)}
    if config.get("head_dim"):
        entries["attention.value_length"] = config["head_dim"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    entries["rope.freq_base"] = float(rope.get("rope_theta") or config.get("rope_theta"))
    entries["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if rope.get("rope_type") in ("linear", "yarn"):
        for name, key in _SCALING.items():
            if name in rope:
                entries[f"rope.scaling.{key}"] = rope[name]
    if kind == "gpt-oss":
        entries["expert_feed_forward_length"] = config["intermediate_size"]
    if kind == "gemma4":
        entries |= _gemma4_entries(config)
    if kind == "phi3":
        width = config["hidden_size"] // config["num_attention_heads"]
        entries["rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", 1.0))
        entries["attention.sliding_window"] = config.get("sliding_window") or 0
        original = config["original_max_position_embeddings"]
        entries["rope.scaling.original_context_length"] = original
        if "long_factor" in rope:
            factor = config["max_position_embeddings"] / original
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
            entries["rope.scaling.attn_factor"] = attention
    return entries


def _gemma4_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what differs between layers, as llama.cpp's converter writes it."""
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = next(iter(config["per_layer_config"].values()))
    wide, narrow, kv = full["head_dim"], config["head_dim"], config["num_key_value_heads"]
    inner, shared = config["intermediate_size"], config["num_kv_shared_layers"]
    entries = {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.sliding_window_pattern": local,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }
    if "num_key_value_heads" in full:
        heads = full["num_key_value_heads"]
        entries["attention.head_count_kv"] = [kv if each else heads for each in local]
    if config["use_double_wide_mlp"]:
        entries["feed_forward_length"] = [inner] * (len(local) - shared) + [2 * inner] * shared
    if config.get("top_k_experts"):
        entries["expert_used_count"] = config["top_k_experts"]
    return entries


def _stored_experts(tensors: Mapping[str, np.ndarray], how: str) -> dict[str, np.ndarray]:
    """Returns tensors with those of experts as `write_gguf` describes."""
    result = dict(tensors)
    for name in [name for name in tensors if ".ffn_gate_up_exps." in name and how != "fused"]:
        for part, values in zip(("gate", "up"), np.split(result.pop(name), 2, axis=1), strict=True):
            result[name.replace("gate_up", part)] = values
    for name in [name for name in tensors if ".ffn_gate_exps." in name and how == "fused"]:
        parts = [result.pop(name), result.pop(name.replace("gate", "up"))]
        result[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)
    for name in [name for name in result if "_exps.weight" in name and how == "single"]:
        for index, values in enumerate(result.pop(name)):
            result[name.replace("_exps.", f".{index}.")] = values
    return result


def rope_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a longrope."""
    rope = config["rope_parameters"]
    kinds = ("long", "short") if "long_factor" in rope else ()
    return {
        f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
        for kind in kinds
    }


def proportional_divisors(config: dict[str, Any]) -> np.ndarray:
    """Returns Gemma 4's divisors as llama.cpp's converter writes them, float32 [head_dim / 2]."""
    config = config.get("text_config", config)
    pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    return np.where(np.arange(pairs) < int(share * pairs), 1, 1e30).astype(np.float32)


def blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns values in blocks of a type, in bytes [..., row bytes].

    The library quantizes to no type of 256 columns: blocks of those are random, with the spread of
    the values.
    """
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    data = random.integers(0, 256, (values.size // columns, size), dtype=np.uint8)
    for place, spread in _SCALES[kind.name].items():
        scale = spread * values.std() * random.uniform(0.5, 1.5, (len(data), 1))
        data[:, place : place + 2] = scale.astype(np.float16).view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds metadata in the type that converters use."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tensors(folder: Path, config: Mapping[str, Any], kind: str) -> dict[str, np.ndarray]:
    """Returns the folder's tensors, float32, by GGUF name, as llama.cpp's converter changes them:
    rows of q and k in another order, 1 added to the norms of Gemma 1 to 3, the same matrices of a
    layer's experts in one tensor, Granite's and gpt-oss's gates and ups in two, and the gate of a
    shared expert as a vector."""
    file = SafetensorsFile(folder / "model.safetensors")
    (arch,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    result: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in file.tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        data = np.frombuffer(file.data(tensor), _DTYPES[tensor.dtype]).reshape(tensor.shape)
        values = data.astype(np.float32)
        if ".vision_tower." in name or ".embed_vision." in name:
            continue
        name = name.replace(".language_model.", ".")
        if kind == "gpt-oss" and ".mlp.experts." in name:
            result |= _gpt_oss_experts(name, values)
            continue
        if scale := _SCALES_OF_ROUTERS.get(name.split(".", 3)[-1]):
            result[f"blk.{name.split('.')[2]}.{scale}"] = values
            continue
        if name.endswith(("layer_scalar", "sinks", "experts.gate_up_proj", "experts.down_proj")):
            name += ".weight"
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if expert := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = values
            continue
        if name.endswith("block_sparse_moe.input_linear.weight"):
            layer = f"blk.{name.split('.')[2]}"
            gate, up = np.split(values, 2, axis=1)
            result |= {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
            continue
        projection = name.split(".")[-2]
        if kind in _PERMUTED and projection in heads:
            values = interleaved(values, heads[projection])
        if kind in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    for name, experts in stacks.items():
        stacked = np.stack([experts[index] for index in sorted(experts)])
        result[names.get_name(name, try_suffixes=(".weight",))] = stacked
    return result


# Without a common name in the library's table.
_SCALES_OF_ROUTERS = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def _gpt_oss_experts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns stacked experts of gpt-oss, which are transposed and whose gates and ups alternate,
    or their biases."""
    prefix, end = f"blk.{name.split('.')[2]}.ffn_", "bias" if name.endswith("_bias") else "weight"
    turned = values if end == "bias" else values.swapaxes(1, 2)
    if ".down_proj" in name:
        return {f"{prefix}down_exps.{end}": np.ascontiguousarray(turned)}
    return {
        f"{prefix}{part}_exps.{end}": np.ascontiguousarray(turned[:, first::2])
        for first, part in enumerate(("gate", "up"))
    }


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows in the order in which a pair of rotated rows are neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def byte_level(folder: Path, pre: str) -> dict[str, Any]:
    """Returns the metadata of the byte-level BPE and the template of a folder."""
    described = json.loads((folder / "tokenizer.json").read_text())
    vocab = dict(described["model"]["vocab"])
    kinds = {
        each["id"]: gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
        for each in described["added_tokens"]
    }
    vocab |= {each["content"]: each["id"] for each in described["added_tokens"]}
    merges = described["model"]["merges"]
    tokens = sorted(vocab, key=lambda text: vocab[text])
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(kinds.get(vocab[text], gguf.TokenType.NORMAL)) for text in tokens
        ],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.add_bos_token": False,
    }
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) if config.exists() else {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if settings.get(name):
            metadata[f"tokenizer.ggml.{key}_token_id"] = vocab[settings[name]]
    if settings.get("chat_template"):
        metadata["tokenizer.chat_template"] = settings["chat_template"]
    return metadata


def sentencepiece(pieces: list[tuple[str, float, int]], **more: Any) -> dict[str, Any]:
    """Returns the metadata of a SentencePiece model: (text, score, type) of each piece."""
    tokens, scores, kinds = zip(*pieces, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def write_metadata(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes a file with metadata alone and returns `path`."""
    rest = dict(metadata)
    writer = gguf.GGUFWriter(path, rest.pop("general.architecture", "llama"))
    for key, value in rest.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
