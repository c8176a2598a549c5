"""turbomind: checkpoints, model wiring and the engine. Token ids only; no text, no roles."""

from turbomind._C import __version__, available_isas, cpu_name
from turbomind.engine import Engine
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
from turbomind.handle import Handle
from turbomind.inbox import Inbox
from turbomind.loading.loader import ModelInfo, describe
from turbomind.stats import GroupStats, RankStats, Stats
from turbomind.stream import Choice, Event, Generation, Stream, TokenLogprobs
from turbomind.tiers import Flushed, Forecast, Residence, TierStats

__all__ = [
    "Busy",
    "Choice",
    "ContextFull",
    "Engine",
    "EngineClosed",
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
]
