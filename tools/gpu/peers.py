"""Phases `peers:MODEL`: transformers on the same shapes with random weights.

SDPA, bf16, a static cache, eager; greedy. `fallback` has the reason if there is no static cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from .end_to_end import TINY, Plan
from .settings import Settings, write_json
from .shapes import MODELS, write_config
from .timing import torch_device, torch_or_why

ONE_BY_ONE = 8  # measured requests, of those that ours runs together


class Peer:
    """A model and its forward pass."""

    def __init__(self, settings: Settings, model: str) -> None:
        import torch
        import transformers

        self.torch = torch
        self.device = torch_device(settings)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        torch.set_grad_enabled(False)
        torch.manual_seed(1)
        config_path = write_config(MODELS[model], Path(settings.work))
        self.config = transformers.AutoConfig.from_pretrained(config_path.parent)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                self.config, attn_implementation="sdpa"
            ).eval()
        torch.set_default_dtype(torch.float32)
        self.fallback = ""

    def cache(self, tokens: int) -> Any:
        """Makes a cache for `tokens`; a dynamic one where the model has no static one."""
        import transformers

        try:
            return transformers.StaticCache(config=self.config, max_cache_len=tokens)
        except (TypeError, AttributeError) as error:
            self.fallback = f"dynamic cache: {error}"[:300]
            return transformers.DynamicCache()

    def forward(self, ids: Any, cache: Any, past: int) -> Any:
        """Returns the greedy next ids [batch, 1] after `past` tokens in the cache."""
        position = self.torch.arange(past, past + ids.shape[1], device=self.device)
        output = self.model(
            ids,
            past_key_values=cache,
            position_ids=position[None].expand(ids.shape[0], -1),
            cache_position=position,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1:].argmax(-1)

    def prompt(self, batch: int, tokens: int) -> Any:
        """Returns random token ids."""
        vocab = self.config.vocab_size
        return self.torch.randint(3, vocab, (batch, tokens), device=self.device)

    def now(self) -> float:
        """Returns the seconds of a call, with the device's work included."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()


def run_phase(settings: Settings, model: str) -> dict[str, Any]:
    """Measures the figures of `end_to_end` under the same names."""
    torch, why = torch_or_why(settings)
    if torch is None:
        return {"not_available": why}
    try:
        peer = Peer(settings, model)
    except ImportError as error:
        return {"not_available": str(error)}
    plan = TINY if settings.tiny else Plan()
    result: dict[str, Any] = {"model": model, "peer": peer.versions, "figures": [], "error": ""}
    # The slowest figures come last.
    for name, measure in (
        ("decode", partial(_decode, peer, plan, plan.contexts[:1])),
        ("prefill", partial(_prefill, peer, plan)),
        ("turn", partial(_turn, peer, plan)),
        ("together", partial(_together, peer, plan)),
        ("decode", partial(_decode, peer, plan, plan.contexts[1:])),
    ):
        try:
            for figure in measure():
                result["figures"].append(figure)
                write_json(settings.result_path(f"peers:{model}"), result)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            result["error"] += f"{name}: {type(error).__name__}: {str(error)[:500]}; "
    result["fallback"] = peer.fallback
    return result


def _prefill(peer: Peer, plan: Plan) -> Iterator[dict[str, Any]]:
    for tokens in plan.prefill:
        times = []
        for _ in range(3):
            ids, cache = peer.prompt(1, tokens), peer.cache(tokens + 8)
            start = peer.now()
            peer.forward(ids, cache, 0)
            times.append((peer.now() - start) * 1e3)
        ms = sorted(times)[1]
        yield {"figure": "prefill", "tokens": tokens, "ms": ms, "tokens_per_s": tokens / ms * 1e3}


def _decode(peer: Peer, plan: Plan, contexts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    steps = max(2, plan.steps // 2)
    for context in contexts:
        for batch in plan.batches:
            about = {"figure": "decode", "batch": batch, "context": context, "deterministic": False}
            try:
                ms = _decode_ms(peer, batch, context, steps)
            except RuntimeError as error:  # out of memory
                yield about | {"skipped": str(error)[:200]}
                continue
            yield about | {"ms": ms, "tokens_per_s": batch / ms * 1e3}


def _decode_ms(peer: Peer, batch: int, context: int, steps: int) -> float:
    cache = peer.cache(context + steps + 8)
    token = peer.prompt(batch, 1)
    for begin in range(0, context, 512):  # all sequences at once, in pieces that fit
        token = peer.forward(peer.prompt(batch, min(512, context - begin)), cache, begin)
    for i in range(2):
        token = peer.forward(token, cache, context + i)
    start = peer.now()
    for i in range(steps):
        token = peer.forward(token, cache, context + 2 + i)
    return (peer.now() - start) * 1e3 / steps


def _turn(peer: Peer, plan: Plan) -> Iterator[dict[str, Any]]:
    history, new = plan.turn
    cache = peer.cache(history + new + 8)
    peer.forward(peer.prompt(1, history), cache, 0)
    start = peer.now()
    peer.forward(peer.prompt(1, new), cache, history)
    ms = (peer.now() - start) * 1e3
    yield {"figure": "turn", "how": "cached", "history": history, "new": new, "ms": ms}
    cache = peer.cache(history + new + 8)
    start = peer.now()
    peer.forward(peer.prompt(1, history + new), cache, 0)
    ms = (peer.now() - start) * 1e3
    yield {"figure": "turn", "how": "computed again", "history": history, "new": new, "ms": ms}


def _together(peer: Peer, plan: Plan) -> Iterator[dict[str, Any]]:
    requests, prompt, reply = plan.together
    measured = min(ONE_BY_ONE, requests)
    start = peer.now()
    for _ in range(measured):
        cache = peer.cache(prompt + reply + 8)
        token = peer.forward(peer.prompt(1, prompt), cache, 0)
        for i in range(reply - 1):
            token = peer.forward(token, cache, prompt + i)
    seconds = peer.now() - start
    yield {
        "figure": "together",
        "requests": requests,
        "prompt": prompt,
        "reply": reply,
        "measured_requests": measured,
        "note": "one after the other; the rest is extrapolated",
        "ms": seconds * 1e3 / measured * requests,
        "tokens_per_s": measured * reply / seconds,
    }
