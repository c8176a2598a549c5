"""Tokens that a tokenizer has and its model lacks, as fine-tunes with added tokens leave them."""

import json

import pytest
from chat_models import chat_model

import lmchat
from lmchat.errors import InvalidRequest

OPTIONS = {"threads": 1, "cache_memory": "16MiB", "store": "memory"}
GREEDY = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


@pytest.fixture
def engine(tmp_path):
    """An engine whose tokenizer has one token more than the model has rows."""
    folder = chat_model(tmp_path / "model")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    token = {
        "id": json.loads((folder / "config.json").read_text())["vocab_size"],
        "content": "<|later|>", "special": False, "normalized": False,
        "single_word": False, "lstrip": False, "rstrip": False,
    }  # fmt: skip
    tokenizer["added_tokens"].append(token)
    path.write_text(json.dumps(tokenizer))
    with lmchat.ChatEngine(folder, **OPTIONS) as opened:
        yield opened


def test_a_token_without_a_row_is_named_by_its_text(engine):
    rows = engine.core.vocab_size
    words = rf"the token '<\|later\|>', whose id is {rows}: the model has no row for it"
    session = engine.session("it")
    expected = session.send("Hello", **GREEDY).text
    for send in (
        lambda text: session.send(text, **GREEDY),
        lambda text: engine.generate(text, **GREEDY),
        lambda text: engine.chat([{"role": "user", "content": text}], **GREEDY),
    ):
        with pytest.raises(InvalidRequest, match=words):
            send("say <|later|> again")
    assert session.turns[-1].text == expected  # nothing was added
    session.send("Hello again", **GREEDY)
