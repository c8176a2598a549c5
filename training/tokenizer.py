"""memo's tokenizer: byte-level BPE, and the chat template.

Capitalised words and digits exclude the space before them, which is a token of its own. A name has
the same tokens wherever it occurs, so the model can copy it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, SYSTEM, USER, ASSISTANT, END = SPECIAL = (
    "<|begin|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
VOCABULARY = 4096

_PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"| ?I(?![\p{L}\p{M}])"
    r"| ?\p{Ll}[\p{L}\p{M}]*"
    r"|\p{L}[\p{L}\p{M}]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+"
)

# Each message is rendered independently, so a rendering only grows. The roles are those that the
# model was trained on.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{- raise_exception('role ' ~ message['role'] ~ ', expected system, user or assistant') }}"
    "{%- endif %}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Trains a tokenizer on `texts`. Equal texts give equal tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of `token`.

    Raises:
        ValueError: the tokenizer does not have it.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"token {token!r}, expected one of the tokenizer's")
    return int(found)


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": id_of(tokenizer, BEGIN),
        "eos_token_id": id_of(tokenizer, END),
        "pad_token_id": id_of(tokenizer, END),
        "do_sample": False,
        "max_new_tokens": 256,  # its longest stories have a hundred tokens
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def render(messages: list[dict[str, str]]) -> str:
    """Returns the template's text for `messages`, without a header for a reply."""
    return BEGIN + "".join(f"<|{m['role']}|>{m['content']}{END}" for m in messages)
