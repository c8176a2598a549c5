"""GGUF metadata as the fields of a config.json.

A family reads the fields as it reads a config.json, so bounds and refusals are the same. A key of
the architecture that has no field here is passed on under its own name. It is refused if it is one
of the format's list and has another value than its default, else ignored. llama.cpp's
src/llama-model.cpp defines the keys' defaults.

Not here: the names of tensors (`gguf_tensors`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from turbomind.errors import ModelError
from turbomind.gguf.architectures import ARCHITECTURES
from turbomind.gguf.file import Array, GgufFile
from turbomind.models import Description
from turbomind.models.config import Fields
from turbomind.models.gguf import DIVISORS, Architecture, table, wrong
from turbomind.models.reference import gguf_keys

# Key without its architecture -> field of config.json.
FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "attention.causal": "is_causal",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
_REQUIRED = (
    "embedding_length", "block_count", "feed_forward_length", "context_length",
    "attention.head_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_GENERAL: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "split.count": (0, 1),
}
# Keys that do not belong to an architecture and change no arithmetic.
_OTHERS = ("general.", "tokenizer.", "quantize.", "split.", "clip.")
# Beginnings of keys, without their architecture, and of tensors of encoders in the same file.
_ENCODER_KEYS = ("vision.", "audio.", "mm.")
ENCODER_TENSORS = {"v.": "vision", "a.": "audio", "mm.": "vision"}
_DRAFT_LAYERS = "nextn_predict_layers"
# Key without its architecture and "rope.scaling." -> field of rope_scaling.
_SCALING = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Keys whose default is 1; of others it is 0, empty or false.
_FACTORS = frozenset({
    "attention.output_scale", "embedding_scale", "expert_group_scale", "expert_weights_scale",
    "logit_scale", "residual_scale", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
})  # fmt: skip
_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "MXFP4": "bfloat16"}

# Tokens that end a turn under any id and of any type, as in llama.cpp (`llama_vocab`): a file names
# one end token, models have several.
_ENDS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<|eot|>", "<end_of_turn>", "<turn|>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]",
    "<eos>", "</s>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>",
    "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})  # fmt: skip
# A token of them that is none beside these others. In harmony, the format of gpt-oss, and that of
# Solar "<|end|>" ends a message but no reply. In Gemma's vocabularies "</s>" is a tag of HTML.
_OTHER_USES = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<eos>"}),
    ("</s>", {"<|tool_response>"}),
)

# Key without "general.sampling." -> field of generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def architecture_of(file: GgufFile) -> Architecture:
    """Returns what files of its architecture say otherwise.

    Raises:
        ModelError: The architecture is not supported.
    """
    found = ARCHITECTURES.get(str(file.metadata.get("general.architecture")))
    if found is None:
        raise wrong(file, "general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    return found


class GgufFields(Fields):
    """The fields of a config.json made of metadata; errors have the file and the keys' names.

    Args:
        values: The fields.
        where: The file.
        keys: The key of each field.
        prefix: The architecture, with which keys begin.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, keys: Mapping[str, str], prefix: str
    ) -> None:
        super().__init__(values, where)
        self._keys, self._prefix = keys, prefix

    def error(self, name: str, expected: str) -> ModelError:
        """Returns the ModelError of a field with a wrong value."""
        error = super().error(name, expected)
        start = f"{self.where}: "
        rest = str(error)[len(f"{start}{name}") :]
        return ModelError(f"{start}{self._keys.get(name, name)}{rest}")

    def finish(self, reads: Mapping[str, Any], prefix: str = "") -> None:
        """Refuses also keys of the format's list that were not read and are not at their default.
        Fields that follow from tensors are those of tensors without a use."""
        listed: dict[str, Any] = {}
        for name, value in self._others():
            key = self._keys.get(name, "").removeprefix(self._prefix)
            if name not in reads and (not key or key in gguf_keys()):
                default = 1 if key in _FACTORS else 0
                is_default = not key or value == default or (not default and not value)
                listed[name] = value if is_default else default
        super().finish({**reads, **listed}, prefix)


def config_of(file: GgufFile) -> GgufFields:
    """Returns the fields of a config.json for a GGUF file.

    Raises:
        ModelError: The architecture or a value is not supported, or something is missing.
    """
    _check_general(file)
    architecture = architecture_of(file)
    prefix = f"{file.metadata['general.architecture']}."
    keys = {k.removeprefix(prefix): k for k in file.metadata if not k.startswith(_OTHERS)}
    keys = {name: key for name, key in keys.items() if not name.startswith(_ENCODER_KEYS)}
    own = {name: _scalar(file, key) for name, key in keys.items()}
    for name in _REQUIRED:
        if name not in own:
            raise wrong(file, prefix + name, "a number")
    own["block_count"] = _main_layers(file, own)
    fields = {**FIELDS, **architecture.fields}
    values = {field: own.pop(name) for name, field in fields.items() if name in own}
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("rope_theta", 10000.0)
    architecture.complete(file, own, values)
    _set_head_dim(file, prefix, own, values)
    _set_rope(file, prefix, own, values)
    if "rope_scaling" in values:
        values["rope_scaling"] |= architecture.scaling
    harmless = {*_HARMLESS, *architecture.harmless}
    values |= {_field(name): value for name, value in own.items() if name not in harmless}
    values |= _facts(file)
    values.setdefault("vocab_size", file.tensors[EMBEDDING].shape[0])
    values.setdefault("architectures", [architecture.name])
    shown = {fields.get(name, _field(name)): key for name, key in keys.items()}
    return GgufFields(values, str(file.path), shown, prefix)


def _main_layers(file: GgufFile, own: dict[str, Any]) -> Any:
    """Returns the number of layers without those at the end that only draft tokens."""
    layers, drafts = own["block_count"], own.pop(_DRAFT_LAYERS, 0)
    if not isinstance(drafts, int) or not isinstance(layers, int) or not drafts:
        return layers  # a wrong number of layers is refused by the family
    if not 0 < drafts < layers:
        raise wrong(file, _DRAFT_LAYERS, f"fewer than the {layers} layers of block_count")
    return layers - drafts


def draft_layers(file: GgufFile) -> int:
    """Returns the number of layers that only draft tokens, which are not loaded."""
    architecture = file.metadata["general.architecture"]
    return int(file.metadata.get(f"{architecture}.{_DRAFT_LAYERS}", 0))


def encoders(file: GgufFile) -> tuple[str, ...]:
    """Returns what the encoders in the file are of, which are not loaded: "vision", "audio"."""
    kinds = {ENCODER_TENSORS.get(name.partition(".")[0] + ".") for name in file.tensors}
    return tuple(kind for kind in ("vision", "audio") if kind in kinds)


def _field(name: str) -> str:
    return name.replace(".", "_")


def _check_general(file: GgufFile) -> None:
    for key, expected in _GENERAL.items():
        if key in file.metadata and file.metadata[key] not in expected:
            raise wrong(file, key, " or ".join(map(repr, expected)))


def _scalar(file: GgufFile, key: str) -> Any:
    """Returns a value; that of an array if it is the same for all layers."""
    value = file.metadata[key]
    if not isinstance(value, Array):
        return value
    layers = file.array(key)
    return layers[0] if layers and all(each == layers[0] for each in layers) else layers


def _set_head_dim(file: GgufFile, prefix: str, own: dict[str, Any], values: dict[str, Any]) -> None:
    """Sets head_dim, which must be the width of values and of the rotation too."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if isinstance(heads, int) and isinstance(hidden, int) and heads and hidden % heads == 0:
        values.setdefault("head_dim", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.pop(key, values.get("head_dim")) != values.get("head_dim"):
            raise wrong(file, prefix + key, f"the width of a head, {values.get('head_dim')}")


def _set_rope(file: GgufFile, prefix: str, own: dict[str, Any], values: dict[str, Any]) -> None:
    kind = own.pop("rope.scaling.type", "linear")
    factor = own.pop("rope.scale_linear", 1.0)  # of old files
    factor = own.pop("rope.scaling.factor", factor)
    scaling = {"rope_type": kind, "factor": factor}
    for key, field in _SCALING.items():
        if f"rope.scaling.{key}" in own:
            scaling[field] = own.pop(f"rope.scaling.{key}")
    if kind not in ("none", "linear", "yarn"):
        raise wrong(file, f"{prefix}rope.scaling.type", "'none', 'linear' or 'yarn'")
    if kind == "linear":
        scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn" or (kind == "linear" and factor not in (0.0, 1.0)):
        values["rope_scaling"] = scaling


def _facts(file: GgufFile) -> dict[str, Any]:
    """Returns the fields that follow from the tensors."""
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path}: tensor {EMBEDDING} is missing, expected the embedding")
    facts: dict[str, Any] = {"tie_word_embeddings": HEAD not in file.tensors}
    elements: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and tensor.dtype in _DTYPES:
            elements[_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    facts["torch_dtype"] = elements.most_common(1)[0][0] if elements else "bfloat16"
    # Where one of several matrices has a bias, those of the others are zeros (`gguf_tensors`).
    facts[architecture_of(file).bias] = _has_bias(file, "attn_(q|k|v|output)")
    if _has_bias(file, "ffn_(gate|up|down)"):
        facts["mlp_bias"] = True
    return facts


def _has_bias(file: GgufFile, modules: str) -> bool:
    return any(re.fullmatch(rf"blk\.\d+\.{modules}\.bias", name) for name in file.tensors)


def adapted(file: GgufFile, model: Description) -> Description:
    """Returns the description with what the file's tensors have otherwise than a checkpoint's: the
    kind of rotation, the divisors of its frequencies, and norms with the offset in their weights.

    Raises:
        ModelError: The divisors have another number or type, or are not positive and finite.
    """
    architecture, rope = architecture_of(file), model.rope
    if DIVISORS in file.tensors and DIVISORS in architecture.tables:
        divisors = table(file, DIVISORS, len(rope.inv_freq))
        divided = np.array(rope.inv_freq, np.float32) / divisors
        rope = replace(rope, inv_freq=tuple(float(f) for f in divided))
    if architecture.shifted_norms:
        model = replace(model, norm_offset=0.0)
    return replace(model, rope=replace(rope, interleaved=architecture.interleaved))


def end_tokens(file: GgufFile) -> list[int]:
    """Returns the ids of the tokens that end a reply.

    They are the end tokens that the metadata name, then tokens with the spellings that end a turn
    in some model.
    """
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ids = [each for each in ends if isinstance(each, int)]
    key = "tokenizer.ggml.tokens"
    if isinstance(file.metadata.get(key), Array):
        found = {text: i for i, text in enumerate(file.array(key)) if text in _ENDS}
        others = {end for end, beside in _OTHER_USES if beside <= found.keys()}
        if file.metadata.get("tokenizer.ggml.model") == "gpt2":
            others.add("</s>")  # an ordinary piece of byte-level vocabularies
        ids += [i for text, i in found.items() if text not in others]
    return ids


def generation_defaults(file: GgufFile) -> dict[str, Any]:
    """Returns the fields of a generation_config.json that the metadata have.

    Converters write how a model samples, but not whether it does: it does if a value says how.

    Raises:
        ModelError: A value is not a number.
    """
    found: dict[str, Any] = {}
    for name, field in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{name}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(file, f"general.sampling.{name}", "a number")
        found[field] = float(f"{value:.7g}") if isinstance(value, float) else value  # of float32
    if found.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        found["do_sample"] = True
    return found
