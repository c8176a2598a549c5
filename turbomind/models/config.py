"""Readers of config.json and generation_config.json that ignore no field silently."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError

# Fields that cannot change the logits of a decoder at inference: provenance, training, output
# plumbing of the library that wrote the file, and generation defaults.
HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "architectures",
        "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map",
        "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
        "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
        "dtype", "early_stopping", "embd_pdrop", "embedding_dropout",
        "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
        "ffn_dropout", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range", "is_decoder",
        "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length",
        "max_sequence_length", "max_window_layers", "min_length", "model_max_length",
        "model_type", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
        "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
        "remove_invalid_values", "repetition_penalty", "resid_pdrop", "residual_dropout",
        "return_dict", "return_dict_in_generate", "sep_token_id", "seq_length", "suppress_tokens",
        "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
        "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
        "use_cache", "use_flash_attention", "use_flash_attn",
    }
)  # fmt: skip

# Fields whose only supported value is the one that changes nothing.
NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "use_mrope": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}

_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ModelError if it cannot be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


class Fields:
    """A JSON object whose fields are read one by one; `finish()` refuses fields that were not read.

    Getters raise ModelError with the field, its value and the expected value. A null counts as
    absent. `default` replaces an absent field; without a default the field is required.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self._taken: set[str] = set()

    def error(self, name: str, expected: str) -> ModelError:
        """Returns the ModelError of a field with a wrong value."""
        seen = repr(self.values[name]) if name in self.values else "absent"
        if len(seen) > 200:
            seen = seen[:200] + "..."
        return ModelError(f"{self.where}: {name} is {seen}, expected {expected}")

    def has(self, name: str) -> bool:
        """Returns whether the object has the field, even as null."""
        return name in self.values

    def _take(self, name: str, default: Any, expected: str) -> Any:
        self._taken.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(name, expected)
        return default

    def raw(self, name: str, default: Any = None) -> Any:
        """Returns the unchecked value."""
        return self._take(name, default, "a value")

    def integer(self, name: str, low: int, high: int, default: Any = _MISSING) -> Any:
        """Returns an int in [low, high], or the default."""
        expected = f"an integer from {low} to {high}"
        value = self._take(name, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, expected)
        return value

    def number(self, name: str, low: float, high: float, default: Any = _MISSING) -> Any:
        """Returns a finite float in [low, high], or the default."""
        expected = f"a number from {low:g} to {high:g}"
        value = self._take(name, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, expected)
        if not math.isfinite(value) or not low <= value <= high:
            raise self.error(name, expected)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false, or the default."""
        value = self._take(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, options: tuple[str, ...], default: Any = _MISSING) -> str:
        """Returns one of the strings, or the default."""
        expected = " or ".join(repr(o) for o in options)
        value = self._take(name, default, expected)
        if value not in options:
            raise self.error(name, expected)
        return str(value)

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Raises ModelError for the first field that was neither read nor is harmless."""
        for name, value in self.values.items():
            if name in self._taken or name in harmless or value is None:
                continue
            if name in NEUTRAL:
                if value != NEUTRAL[name] or isinstance(value, bool) != isinstance(
                    NEUTRAL[name], bool
                ):
                    raise self.error(name, f"{NEUTRAL[name]!r} or nothing")
                continue
            raise self.error(name, "nothing: this field is not supported")


def token_id_list(values: Mapping[str, Any], name: str, where: str) -> list[int]:
    """Returns the ids of a field that is a token id, a list of them, or absent (then empty)."""
    value = values.get(name)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(f"{where}: {name} is {value!r}, expected a token id or a list of them")
    return ids
