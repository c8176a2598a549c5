"""Gemma 3: a Gemma 2 with norms of q and k, and another rotation in layers with a window."""

from dataclasses import replace
from typing import Any

from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.gemma.gemma2 import GGUF_CAPS, GGUF_NORMS, Gemma2, gguf_windows
from turbomind.models.gguf import WINDOW, Architecture
from turbomind.models.rope import MAX_CONTEXT, Rope, read_rope
from turbomind.models.wrapper import Wrapper

_FULL, _LOCAL = "full_attention", "sliding_attention"


class Gemma3(Gemma2):
    """No soft-cap of attention; one of the logits where the config has one."""

    names = {"Gemma3ForCausalLM": "gemma3_text"}
    wrappers = {"Gemma3ForConditionalGeneration": Wrapper("gemma3", "gemma3_text")}
    gguf = {
        "gemma3": Architecture(
            "Gemma3ForCausalLM",
            fields=WINDOW | GGUF_CAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
            names=GGUF_NORMS,
            shifted_norms=True,
            complete=gguf_windows(6, 0, 62),
        )
    }

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Adds the norms of q and k; the reference does not apply a soft-cap of attention."""
        if fields.raw("attn_logit_softcapping"):
            raise fields.error("attn_logit_softcapping", "null")
        return replace(super().traits(fields, layer), qk_norm=True)

    def ends(self, fields: Fields, model: Description) -> Description:
        """Refuses a soft-cap of the logits in a wrapper, where the reference does not apply it."""
        if self.wrapper and fields.raw("final_logit_softcapping"):
            raise fields.error("final_logit_softcapping", "null")
        return super().ends(fields, model)

    def rope_tables(
        self, fields: Fields, head_dim: int, max_positions: int, length: int | None
    ) -> list[Rope]:
        """Reads the tables of layers with full attention and of those with a window.

        Newer files have both in `rope_parameters`; in older ones `rope_scaling` and `rope_theta`
        are those of full attention, and `rope_local_base_freq` is that of windows.
        """
        by_type = fields.raw("rope_parameters") or {}
        if not isinstance(by_type, dict) or not by_type.keys() <= {_FULL, _LOCAL}:
            raise fields.error("rope_parameters", f"an object of {_FULL!r} and {_LOCAL!r}")
        scaling = fields.raw("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise fields.error("rope_scaling", "an object or null")
        full = {
            "rope_theta": fields.raw("rope_theta", 1e6),
            **(by_type.get(_FULL) or {}),
            **scaling,
        }
        local = {
            "rope_theta": fields.raw("rope_local_base_freq", 1e4), **(by_type.get(_LOCAL) or {})
        }  # fmt: skip
        tables = []
        for table, kept in ((full, length), (local, None)):
            values: dict[str, Any] = {"rope_parameters": table}
            own = Fields(values, ignored=fields.ignored)
            rope = read_rope(own, self.rope_rules, head_dim, max_positions, kept)
            # The positions of the config are those of the scaled rotation.
            tables.append(replace(rope, max_context=min(rope.max_context, max_positions)))
        return tables

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `layer_types`, else every sixth layer, or of another pattern, is full."""
        name = "sliding_window_pattern"
        other = fields.integer(f"_{name}", 1, MAX_CONTEXT, 6)  # as some versions save it
        return self._windows(fields, layers, fields.integer(name, 1, MAX_CONTEXT, other))

    def ropes(self, fields: Fields, layers: int) -> list[int]:
        """Returns table 1 for layers with a window."""
        return [1 if window else 0 for window in self.windows(fields, layers)]
