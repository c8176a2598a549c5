"""The objects that all sessions of one `ChatEngine` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lmchat.generation import settings as settings_module
from lmchat.generation.admission import Admission
from lmchat.generation.idle_prefill import IdlePrefill
from lmchat.generation.observer import Observer
from lmchat.generation.reader import Reader
from lmchat.generation.worker import Worker
from lmchat.kv.lower_tiers import LowerTiers
from lmchat.sessions.model_identity import Identity
from lmchat.store.protocol import Store
from lmchat.store.syncer import Durability
from lmchat.text.prompt import PromptBuilder
from lmchat.text.tokenizer import Tokenizer
from turbomind import Engine


@dataclass(frozen=True)
class Runtime:
    """One model: its engine, tokenizer and templates, the admission queue and the store."""

    core: Engine
    tokenizer: Tokenizer
    builder: PromptBuilder
    admission: Admission
    idle_prefill: IdlePrefill
    reader: Reader
    """Reads the replies without a session. It never waits for the store."""
    session_reader: Reader
    """Reads the replies of sessions. It waits for the store to journal their tokens."""
    worker: Worker
    """Does what may wait for the store: opening, changing and committing."""
    store: Store
    durability: Durability
    pages: LowerTiers
    identity: Identity
    model_settings: dict[str, Any]  # from the model's generation_config.json
    observers: list[Observer] = field(default_factory=list)

    def session_settings(
        self, settings: Mapping[str, Any], before: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Returns the settings of a session after a change.

        Args:
            settings: what changes. None: the model's own.
            before: those that the session has.

        Raises:
            InvalidRequest: a value is out of range, or no reply could use it.
        """
        merged = {k: v for k, v in {**before, **settings}.items() if v is not None}
        valid = settings_module.validate(merged)
        own = {name: merged[name] for name in settings if name in merged}
        changed = settings_module.validate(own, vocab=self.core.vocab_size)
        settings_module.check_length(changed, self.core.max_context)
        settings_module.merge({}, valid, self.model_settings)  # they may contradict each other
        return valid

    def check_fits(self, *texts: str) -> None:
        """Refuses texts that a prompt cannot hold, before they are rendered and encoded.

        Raises:
            ContextFull: together they have more tokens than the context.
        """
        self.tokenizer.check_fits(texts, self.core.max_context)
