"""Changes of the model since a session's last turn, and their cost.

KV depends on the weights and the arithmetic (the core's *fingerprint*), a transcript on the
*tokenizer*, a suffix on the *template*. A session stores which of them it was last used with, and a
reply stores the tokenizer that it was made with.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmchat.store.turns import Turn
from turbomind.config.engine_options import OPTIONS
from turbomind.loading.quantize import NO_QUANTIZATION

if TYPE_CHECKING:
    from lmchat.store.records import SessionRecord

TOKENIZER = "tokenizer"
"""Key of a reply's settings under which the digest of its tokenizer is stored."""
LOADING = tuple(name for name, row in OPTIONS.items() if row.computing)
"""Engine options that change what a model computes. A session stores those that differ from their
defaults. Those of a machine, such as the device and the number of ranks, are not among them."""
_DEFAULTS = {name: OPTIONS[name].default for name in LOADING}
_QUANTIZATION = {"quantize", "head", "group_size"}


@dataclass(frozen=True)
class Identity:
    """The model that an engine runs.

    Attributes:
        model: the name that it was opened with.
        fingerprint: the core's fingerprint of weights and arithmetic.
        tokenizer: digest of the tokenizer's files and the vocabulary size.
        template: digest of the chat template; that of an empty text without one.
        loading: the engine options of LOADING that differ from their defaults.
    """

    model: str
    fingerprint: str
    tokenizer: str
    template: str
    loading: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the record of a session that was last used with this model."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer,
            "template": self.template,
            "loading": dict(self.loading),
            "imported": False,
        }

    def notices(self, record: SessionRecord, *, reencoded: bool = False) -> tuple[str, ...]:
        """Returns one line for each change of the model since the session's last turn.

        Args:
            record: the session.
            reencoded: the conversation is encoded again, which makes a changed template's notice
                redundant.
        """
        found = []
        if record.fingerprint and record.fingerprint != self.fingerprint:
            found.append(f"its KV is computed again: {self._changed(record)}")
        if not reencoded and record.tokenizer and record.template != self.template:
            found.append(
                "the chat template has changed: earlier turns stay as they are, later ones follow "
                "the new one"
            )
        return tuple(found)

    def _changed(self, record: SessionRecord) -> str:
        if record.model != self.model:
            return f"the model is {self.model}, and was {record.model}"
        return f"the weights of {self.model}, or how they are computed, have changed"

    def reads(self, path: Sequence[Turn], record: SessionRecord) -> bool:
        """Returns whether all replies of a conversation were made with this tokenizer."""
        return all(
            turn.settings.get(TOKENIZER, record.tokenizer or self.tokenizer) == self.tokenizer
            for turn in path
            if turn.role == "assistant"
        )

    def marked(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a reply with the tokenizer's digest added."""
        return {**stored, TOKENIZER: self.tokenizer}


def identity(
    model: str,
    fingerprint: str,
    tokenizer: str,
    template: str | None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Identity:
    """Returns the identity of a model.

    Args:
        model: the name that it was opened with.
        fingerprint: the core's fingerprint.
        tokenizer: digest of the tokenizer.
        template: source of the chat template, or None.
        options: the engine options that it was opened with.
    """
    source = "" if template is None else template
    return Identity(
        model=model,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        template=hashlib.blake2b(source.encode("utf-8", "replace"), digest_size=16).hexdigest(),
        loading=loading_of(options),
    )


def loading_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine options that a session stores: those that change what a model computes,
    where they are not the default."""
    found: dict[str, Any] = {}
    for name in LOADING:
        value = options.get(name)
        if value is not None and value not in (_DEFAULTS[name], NO_QUANTIZATION):
            # A store takes plain values, and an engine numpy's integers too.
            found[name] = str(value) if isinstance(value, str) else operator.index(value)
    return found


def loading_again(stored: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what loads a session's model as it was loaded last.

    Args:
        stored: what `loading_of()` returned then.
        options: the engine options that the user has given. They count; one of quantization stands
            for all of these.
    """
    given = set(options)
    if given & _QUANTIZATION:
        given |= _QUANTIZATION
    return {name: value for name, value in stored.items() if name in LOADING and name not in given}
