"""A small chat model with random weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_safetensors

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT = (
    "A chat is a list of messages. The user asks, and the assistant answers in plain words.",
    "system user assistant You are brief. Plan a day in Kyoto, and one with children in Nara.",
    "How many tokens does this sentence have? Twelve, or 12. What is 345 + 678? It is 1,023.",
    "naïve café, déjà vu, größer; 日本語の文章 and 한국어, emoji 😀 👍 and more.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3\n",
)
_LAYERS, _HEADS, _KV_HEADS = 2, 4, 2


def chat_model(
    path: Path,
    *,
    template: str | None = CHATML,
    seed: int = 0,
    context: int = 4096,
    hidden: int = 64,
) -> Path:
    """Writes the folder of a Llama with grouped-query attention and returns `path`.

    Its vocabulary is all bytes, some merges and SPECIALS (the first ids); a reply ends with
    <|im_end|> (or <|endoftext|>). Replies are random text. `template` None: no chat template.
    `context` is the longest sequence in tokens; `seed` chooses the weights, `hidden` their width.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3 // 2,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": [2, 0], "do_sample": False})
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        tokenizer_config["chat_template"] = template
    _write_json(path / "tokenizer_config.json", tokenizer_config)
    write_safetensors(path / "model.safetensors", _weights(vocab, hidden, seed))
    return path


def endless_chat_model(path: Path, *, context: int) -> Path:
    """Writes a folder as `chat_model()` does, of a model that never ends a reply by itself."""
    chat_model(path, context=context)
    _write_json(path / "generation_config.json", {"bad_words_ids": [[0], [2]]})
    return path


def make_tokenizer() -> Any:
    """Returns a byte-level BPE with few merges, which encodes texts of any language."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def _weights(vocab: int, hidden: int, seed: int) -> dict[str, np.ndarray]:
    """Returns float32 weights, large enough that replies depend on every token of the prompt."""
    rng = np.random.default_rng(seed)
    kv, feed = hidden // _HEADS * _KV_HEADS, hidden * 3 // 2
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(_LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (hidden, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, hidden),
            layer + "mlp.gate_proj.weight": (feed, hidden),
            layer + "mlp.up_proj.weight": (feed, hidden),
            layer + "mlp.down_proj.weight": (hidden, feed),
        }
    return {
        name: (
            rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.normal(0.0, 0.3, shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
