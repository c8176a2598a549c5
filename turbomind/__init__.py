"""turbomind: checkpoints, model wiring and the engine. Token ids only; no text, no roles.

Not here: text, templates and sessions (`lmchat`), and the arithmetic (`cpp`).
"""

from turbomind._C import __version__, available_isas, cpu_name
from turbomind.config.engine_options import ChatEngineOptions, EngineOptions
from turbomind.engine.engine import Engine
from turbomind.engine.handle import Handle
from turbomind.engine.inbox import Inbox
from turbomind.engine.plan import Plan, plan
from turbomind.engine.stats import GroupStats, RankStats, Stats
from turbomind.engine.stream import Choice, Event, Generation, Stream, TokenLogprobs
from turbomind.engine.tiers import Flushed, Forecast, Residence, TierStats
from turbomind.errors import (
    Busy,
    ContextFull,
    EngineClosed,
    Error,
    InternalError,
    InvalidRequest,
    ModelError,
    NotFound,
)
from turbomind.loading.loader import ModelInfo, describe

__all__ = [
    "Busy",
    "ChatEngineOptions",
    "Choice",
    "ContextFull",
    "Engine",
    "EngineClosed",
    "EngineOptions",
    "Error",
    "Event",
    "Flushed",
    "Forecast",
    "Generation",
    "GroupStats",
    "Handle",
    "Inbox",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "ModelInfo",
    "NotFound",
    "Plan",
    "RankStats",
    "Residence",
    "Stats",
    "Stream",
    "TierStats",
    "TokenLogprobs",
    "__version__",
    "available_isas",
    "cpu_name",
    "describe",
    "plan",
]
