"""What all sessions of one `ChatEngine` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmchat.admission import Admission
from lmchat.memory_store import MemoryStore
from lmchat.reader import Reader
from lmchat.text.prompt import PromptBuilder
from lmchat.text.tokenizer import Tokenizer
from turbomind import Engine


@dataclass(frozen=True)
class Runtime:
    """One model, its engine and text side, and the queue in front of it."""

    core: Engine
    tokenizer: Tokenizer
    builder: PromptBuilder
    admission: Admission
    reader: Reader
    store: MemoryStore
    model_settings: dict[str, Any]  # of the model's generation_config
