"""Fields that tools write for AWQ and GPTQ.

AutoAWQ, AutoGPTQ, GPTQModel and AutoRound note how they worked, and their readers ignore what they
do not know. So do we, but for what changes the meaning of codes: the fields here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from turbomind.errors import ModelError
from turbomind.models.config import Fields
from turbomind.models.quantization import Quantization
from turbomind.shown import shown

_SYNONYMS = {"bits": ("bits", "w_bit", "wbits"), "group_size": ("group_size", "q_group_size")}
# Fields with their values that change nothing, beside null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "act_bits": (16, 32),
    "adapter": (),
    "data_type": ("int", "int_sym", "int_asym"),
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "rotation": (False,),
    "rotation_config": ({},),
    "spinquant_config": ({},),
    "super_bits": (),
    "super_group_size": (),
}
# What a rule for some modules may repeat, and the value without the field.
_OF_ALL_MODULES = {"bits": None, "group_size": None, "sym": True, "desc_act": False}


def tool_fields(quantization: Quantization) -> Fields:
    """Returns the fields after a check of those that all tools share.

    Raises:
        ModelError: A field changes the meaning of codes in a way that is not supported.
    """
    fields = quantization.fields()
    for name, neutral in _NEUTRAL.items():
        if fields.raw(name) is not None and fields.raw(name) not in neutral:
            expected = " or ".join(map(repr, (*neutral, None)))
            raise fields.error(name, expected)
    for module, rule in _rules(fields, "dynamic"):  # of GPTQModel
        if not module.startswith("-:"):  # these modules have no codes
            _check_rule(fields, f"dynamic: {module}", rule)
    for module, rule in _rules(fields, "extra_config"):  # of AutoRound
        bits = rule.get("bits")
        if not isinstance(bits, int) or bits < 16:
            _check_rule(fields, f"extra_config: {module}", rule)
    return fields


def name_of(fields: Fields, name: str) -> str:
    """Returns the name by which a tool writes a field."""
    names = _SYNONYMS.get(name, ())
    return next((each for each in names if fields.values.get(each) is not None), name)


def agreed_choice(fields: Fields, names: tuple[str, ...], options: tuple[str, ...]) -> str:
    """Returns the value, in lower case, that a tool writes under several names; the first option
    where it has none of them.

    Raises:
        ModelError: A value is not an option, or two of them differ.
    """
    found = {name: fields.raw(name) for name in names if fields.raw(name) is not None}
    for name, value in found.items():
        if str(value).lower() not in options:
            raise fields.error(name, " or ".join(map(repr, options)))
    for (first, value), (other, another) in pairwise(found.items()):
        if str(value).lower() != str(another).lower():
            raise fields.error(other, f"{value!r}, as {first}")
    return str(next(iter(found.values()), options[0])).lower()


def _rules(fields: Fields, name: str) -> list[tuple[str, dict[str, Any]]]:
    rules = fields.raw(name) or {}
    if not isinstance(rules, dict) or not all(isinstance(each, dict) for each in rules.values()):
        raise fields.error(name, "an object of objects")
    return list(rules.items())


def _check_rule(fields: Fields, where: str, rule: dict[str, Any]) -> None:
    for name, default in _OF_ALL_MODULES.items():
        base = fields.values.get(name_of(fields, name), default)
        if rule.get(name) not in (None, base):
            raise ModelError(
                f"{fields.where}: {shown(where)}: {name} is {rule[name]!r}, expected {base!r}, "
                "as for all modules"
            )
