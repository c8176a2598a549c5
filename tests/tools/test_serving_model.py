"""The tokenizer of the serving benchmark's model: texts and tokens are in one-to-one relation."""

import random
import sys

import pytest
from assets import ROOT
from tokenizers import Tokenizer

sys.path.insert(0, str(ROOT / "benchmarks"))
import serving_model

SIZE, SPECIALS = 151936, (151643, 151644, 151645)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokens, merges, partial = serving_model.vocabulary(SIZE, SPECIALS)
    serving_model.write_tokenizer(folder, tokens, merges)
    return tokens, partial, Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_every_id_has_a_token_of_its_own(made):
    tokens, partial, tokenizer = made
    assert len(tokens) == len(set(tokens)) == tokenizer.get_vocab_size() == SIZE
    assert [tokens[index] for index in SPECIALS] == list(serving_model.SPECIAL)
    assert len(partial) < 0.02 * SIZE


def test_a_reply_that_is_sent_again_has_the_generated_tokens(made):
    _, partial, tokenizer = made
    whole = sorted({*range(SIZE)} - {*partial})
    dice = random.Random(0)
    for _ in range(50):
        ids = dice.choices(whole, k=128)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert len(text) == 128
        prompt = f"<|im_start|>assistant\n{text}<|im_end|>\n"
        found = tokenizer.encode(prompt, add_special_tokens=False).ids
        begin = found.index(ids[0])
        assert found[begin : begin + 128] == ids
        assert found[begin + 128] == SPECIALS[2]
