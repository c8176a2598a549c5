"""What all sessions of one `ChatEngine` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmchat.admission import Admission
from lmchat.ahead import Ahead
from lmchat.changes import Identity
from lmchat.durability import Durability
from lmchat.pages_below import PagesBelow
from lmchat.reader import Reader
from lmchat.store import Store
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
    ahead: Ahead
    reader: Reader
    store: Store
    durability: Durability
    pages: PagesBelow
    identity: Identity
    model_settings: dict[str, Any]  # of the model's generation_config
