"""Writes turbomind/models/reference_fields.json: the fields of a config.json that the reference
implementations read, with their defaults, and the keys of GGUF files.

python tools/reference_fields.py turbomind/models/reference_fields.json

The reference is the installed transformers. Of each family, the configuration class and all code
that the model's class refers to are searched for uses of a config's attributes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import transformers
from transformers import CONFIG_MAPPING, MODEL_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from turbomind.models import FAMILIES

# Modules whose code is searched, beside those of the models.
_SHARED = ("cache_utils", "masking_utils", "modeling_rope_utils")

# Fields that the code reads, and that change no logits of a decoder once it is loaded.
_WITHOUT_EFFECT = {
    "attention_dropout", "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range",
    "number_of_conv_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "use_cache",
}  # fmt: skip

# Fields of all models in earlier versions, and of tools that write them into every config.
_OF_ALL_MODELS = {
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "attn_implementation", "attn_pdrop",
    "auto_map", "cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task",
    "is_decoder", "keys_to_ignore_at_inference", "model_type", "name_or_path",
    "output_attentions", "prefix", "pruned_heads", "quantization_config", "sep_token_id",
    "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class",
    "torch_dtype", "torchscript", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16",
}  # fmt: skip

# Fields that code of the library reads for every model.
_STRUCTURE = {"is_encoder_decoder": False, "per_layer_config": None, "tie_word_embeddings": False}

# The code of InternLM2 is in its checkpoints: configuration_internlm2.py, modeling_internlm2.py.
_INTERNLM2 = {
    "bias": True, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": None, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": 103168,
}  # fmt: skip

# The object `rope_parameters` in the functions that compute a rotation.
_ROPE_OBJECTS = ("rope_parameters_dict", ".rope_parameters")

Definition = ast.ClassDef | ast.FunctionDef


@cache
def _module(name: str) -> tuple[dict[str, Definition], dict[str, tuple[str, str]]]:
    """Returns the definitions of a module, and the module and name of what it imports."""
    path = Path(str(importlib.import_module(name).__file__))
    definitions: dict[str, Definition] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, Definition):
            definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*name.split(".")[: -node.level], node.module or ""])
            imports |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return definitions, imports


def _is_searched(module: str) -> bool:
    parts = module.split(".")[1:]
    return (parts[:1] == ["models"] and len(parts) == 3) or parts in ([each] for each in _SHARED)


def _definitions(kind: type) -> Iterator[Definition]:
    """Yields the definition of a class and all those that it refers to."""
    seen, queue = set(), [(kind.__module__, kind.__name__)]
    while queue:
        module, name = queue.pop()
        if (module, name) in seen or not _is_searched(module):
            continue
        seen.add((module, name))
        definitions, imports = _module(module)
        if name in imports:
            queue.append(imports[name])
        if name in definitions:
            node = definitions[name]
            yield node
            queue += [(module, each.id) for each in ast.walk(node) if isinstance(each, ast.Name)]


def _uses(code: Definition, config: type, is_config: bool) -> Iterator[tuple[str, Any]]:
    """Yields the fields that code reads, each with the default that the code has for it.

    Args:
        code: A definition.
        config: The class of the model's config.
        is_config: The code is a class of configs, whose fields are its own attributes.
    """
    declared = {field.name for field in dataclasses.fields(config)}

    def is_holder(node: ast.expr) -> bool:
        """Returns whether the fields of a language model, or of one of its layers, are in it."""
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        parts = name.split("_")
        own = is_config and name == "self"
        return own or (parts[-1] == "config" and parts[0] not in ("vision", "audio"))

    for node in ast.walk(code):
        # Another attribute would be one of an encoder's config.
        if isinstance(node, ast.Attribute) and is_holder(node.value) and node.attr in declared:
            yield node.attr, None
        if not isinstance(node, ast.Call) or not node.args:
            continue
        arguments = list(node.args)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            is_read = is_holder(arguments.pop(0))
        else:  # what a file has beside the fields of the class
            is_read = is_config and ast.unparse(node.func) in ("kwargs.get", "kwargs.pop")
        if is_read and isinstance(arguments[0], ast.Constant):
            yield str(arguments[0].value), _default(arguments[1:], config)


def _default(values: list[ast.expr], config: type) -> Any:
    """Returns a default that follows from the class alone, else None."""
    text = ast.unparse(values[0]) if values else "None"
    if text.startswith("self.default_theta"):
        return eval(text, {"self": config})
    try:
        return ast.literal_eval(text)
    except ValueError:
        return None


def _is_settable(config: type, name: str) -> bool:
    """Returns whether a file may set an attribute: it is not one of the class alone."""
    own = inspect.getattr_static(config, name, None)
    return own is None or (isinstance(own, property) and own.fset is not None)


def read_fields(model_type: str, model: type) -> dict[str, Any]:
    """Returns the fields that a reference reads, by name, with their defaults.

    Args:
        model_type: Of the language model's config.
        model: The class of the model.
    """
    config = CONFIG_MAPPING[model_type]
    declared = {field.name: field.default for field in dataclasses.fields(config)}
    found: dict[str, Any] = dict(_STRUCTURE)
    for kind in (model, *config.__mro__):
        for code in _definitions(kind):
            is_config = kind is not model and code.name == kind.__name__
            for name, default in _uses(code, config, is_config):
                if name in declared or _is_settable(config, name):
                    found[name] = default if found.get(name) is None else found[name]
    found |= {name: declared[name] for name in found if name in declared}
    for pair in config.attribute_map.items():  # two names of one field
        found |= {name: found[other] for name, other in (pair, pair[::-1]) if other in found}
    return {
        name: found[name]
        for name in sorted(found)
        if not name.startswith("_") and name not in _WITHOUT_EFFECT
    }


def _read_rope_fields() -> dict[str, list[str]]:
    """Returns the fields of `rope_parameters` that are read for each type of rotation."""
    definitions, _ = _module("transformers.modeling_rope_utils")
    found = {"default": ["rope_theta"]}
    for kind, function in ROPE_INIT_FUNCTIONS.items():
        names = set()
        for node in ast.walk(definitions[function.__name__]):
            if isinstance(node, ast.Subscript):
                holder, key = node.value, node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                holder, key = node.func.value, node.args[0]
            else:
                continue
            if isinstance(key, ast.Constant) and ast.unparse(holder).endswith(_ROPE_OBJECTS):
                names.add(str(key.value))
        found[kind] = sorted(names)
    return found


def _gguf_keys() -> list[str]:
    """Returns the keys of all architectures in the format's list, without the architecture."""
    groups = (vars(group).values() for group in vars(gguf.Keys).values() if inspect.isclass(group))
    keys = {key for group in groups for key in group if str(key).startswith("{arch}.")}
    return sorted(key.removeprefix("{arch}.") for key in keys if key.count("{") == 1)


def read_all() -> dict[str, Any]:
    """Returns the content of the file."""
    models: dict[str, Any] = {}
    for family in FAMILIES:
        for architecture, model_type in family.names.items():
            models[model_type] = getattr(transformers, architecture, None)
        for wrapper in family.wrappers.values():
            models.setdefault(wrapper.text_type, MODEL_MAPPING[CONFIG_MAPPING[wrapper.text_type]])
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    base |= GenerationConfig._get_default_generation_params().keys()
    return {
        "versions": {each: metadata.version(each) for each in ("gguf", "transformers")},
        "without_effect": sorted(base - _STRUCTURE.keys() | _WITHOUT_EFFECT | _OF_ALL_MODELS),
        "gguf_keys": _gguf_keys(),
        "rope": _read_rope_fields(),
        "models": {
            name: _INTERNLM2 if name == "internlm2" else read_fields(name, model)
            for name, model in models.items()
        },
    }


def document(content: dict[str, Any], indent: str = " ") -> str:
    """Returns the JSON of an object, of which no line has more than 100 columns."""
    parts = []
    for name, value in content.items():
        text = f"{indent}{json.dumps(name)}: {json.dumps(value)}"
        if isinstance(value, dict) and any(
            isinstance(each, dict | list) for each in value.values()
        ):
            text = f"{indent}{json.dumps(name)}: {document(value, indent + ' ')}"
        elif len(text) > 99:
            words = text.replace(": ", ":\0")  # a name and its value stay in one line
            text = textwrap.fill(words, 99, subsequent_indent=indent + " ", drop_whitespace=True)
        parts.append(text.replace("\0", " "))
    return "{\n" + ",\n".join(parts) + f"\n{indent[1:]}}}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(read_all()) + "\n", encoding="utf-8")
