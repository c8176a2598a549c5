"""Writes a benchmark checkpoint as a bf16 GGUF file. Runs in llama.cpp's environment.

    python to_gguf.py <model folder> <target>

Weights are random, so q and k rows are not reordered for llama.cpp's pairing of rotated elements;
shapes, types and bytes are those of a real conversion.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a checkpoint tensor."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Returns Llama 3's divisors of the rotary frequencies, float32 [head_dim / 2], or None."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return None
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray = 1.0 / (kept + (1.0 - kept) / scaling["factor"])
    return divisors.astype(np.float32)


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> bool:
    """Adds a tokenizer that has a token for every id, and its chat template; False: it has not."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    if len(vocabulary) < config["vocab_size"]:
        return False
    special = {each["id"] for each in tokenizer["added_tokens"]}
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=lambda text: vocabulary[text]))
    writer.add_token_types([kinds[index in special] for index in range(len(vocabulary))])
    writer.add_token_merges(tokenizer["model"]["merges"])
    writer.add_eos_token_id(config["eos_token_id"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])
    return True


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Adds bytes and made-up words: llama-server aborts on a model without a vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)] + [f"[{i}]" for i in range(256, size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(
        ["a b"]
    )  # llama.cpp expects at least one merge; this one makes no token.


def main() -> None:
    folder = Path(sys.argv[1])
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(sys.argv[2], config["model_type"])
    add_config(writer, config)
    if not add_tokenizer(writer, folder):
        add_vocabulary(writer, config["vocab_size"])
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + header_bytes)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = entry["shape"]
        if len(shape) == 1:  # llama.cpp wants vectors in float32
            bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
            writer.add_tensor(gguf_name(name), bits.view(np.float32))
        else:
            rows = data[begin:end].reshape(shape[0], 2 * shape[1])
            writer.add_tensor(gguf_name(name), rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
