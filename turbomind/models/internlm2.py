"""InternLM2 and InternLM2.5: a Llama under other tensor names, with one fused q, k, v tensor."""

from dataclasses import replace

from turbomind.models.base import Family
from turbomind.models.config import Fields
from turbomind.models.description import Layer, Rows


class InternLM2(Family):
    """`bias` puts biases on wqkv and wo."""

    names = {"InternLM2ForCausalLM": "internlm2"}

    embed = "model.tok_embeddings"
    head = "output"
    attn_norm = "model.layers.{i}.attention_norm"
    mlp_norm = "model.layers.{i}.ffn_norm"
    wqkv = "model.layers.{i}.attention.wqkv"
    o = "model.layers.{i}.attention.wo"
    gate = "model.layers.{i}.feed_forward.w1"
    up = "model.layers.{i}.feed_forward.w3"
    down = "model.layers.{i}.feed_forward.w2"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag; absent means biased, as in the model's own configuration class."""
        bias = fields.flag("bias", True)
        return replace(layer, qkv_bias=bias, o_bias=bias)

    def qkv_rows(self, kind: str, layer: Layer, *columns: int) -> list[Rows]:
        """Returns rows of wqkv, which is [kv_heads][q heads of the group, k, v][head_dim]."""
        dim, group = layer.head_dim, layer.heads // layer.kv_heads
        stride = (group + 2) * dim
        shape = (layer.kv_heads * stride, *columns)

        def part(first: int, heads: int) -> list[Rows]:
            return [
                Rows(f"{self.wqkv}.{kind}", shape, h * stride + first * dim, heads * dim)
                for h in range(layer.kv_heads)
            ]

        return part(0, group) + part(group, 1) + part(group + 1, 1)
