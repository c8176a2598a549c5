"""What has changed under a session since its last turn, and what that costs.

Keys and values depend on the weights and how they are computed (the core's *fingerprint*), a
transcript on the *tokenizer*, a suffix on the *template*. A session remembers with which of them it
was last used, and a reply with which tokenizer it was made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmchat.store.turns import Turn

if TYPE_CHECKING:
    from pathlib import Path

    from lmchat.store.records import SessionRecord

TOKENIZER = "tokenizer"
"""The name under which a reply's settings hold its tokenizer's digest."""

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json")


@dataclass(frozen=True)
class Identity:
    """The model that an engine runs: its name as it was opened, the core's fingerprint, and digests
    of the tokenizer with its vocabulary's size and of the template (empty: none)."""

    model: str
    fingerprint: str
    tokenizer: str
    template: str

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the record of a session that was last used with this model."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer,
            "template": self.template,
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
            found.append(f"its keys and values are computed again: {self._changed(record)}")
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
        """Whether the tokens of a conversation are this tokenizer's."""
        return all(
            turn.settings.get(TOKENIZER, record.tokenizer or self.tokenizer) == self.tokenizer
            for turn in path
            if turn.role == "assistant"
        )

    def marked(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a reply, with its tokenizer."""
        return {**stored, TOKENIZER: self.tokenizer}


def identity(
    model: str, fingerprint: str, folder: Path, vocabulary: int, template: str | None
) -> Identity:
    """Of the model in `folder`, with a vocabulary of that many tokens and that template."""
    digest = hashlib.blake2b(str(vocabulary).encode(), digest_size=16)
    for path in sorted(folder.glob("*")):
        if path.name in _FILES or path.name.endswith(".model"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    source = "" if template is None else template
    return Identity(
        model=model,
        fingerprint=fingerprint,
        tokenizer=digest.hexdigest(),
        template=hashlib.blake2b(source.encode("utf-8", "replace"), digest_size=16).hexdigest(),
    )
