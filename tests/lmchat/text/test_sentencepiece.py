"""Folders with a SentencePiece model only, against the sentencepiece library and recorded ids."""

import io
import json
import random
import shutil

import pytest
from assets import ROOT, asset
from hypothesis import given, settings
from hypothesis import strategies as st

from lmchat.errors import ModelError
from lmchat.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")


def reference(folder):
    model = next(folder.glob("*.model*"))
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


@pytest.fixture(scope="module")
def mistral():
    return Tokenizer.from_folder(asset("tokenizers/mistral"))


def test_mistral_ids_equal_the_recorded_ones(mistral):
    goldens = json.loads(asset("tokenizers/tokenizer_goldens.json").read_text())
    for text, ids in zip(goldens["texts"], goldens["ids"]["mistral-v3"], strict=True):
        assert mistral.encode(text, add_special_tokens=False) == ids, text
    assert mistral.encode("hi")[0] == mistral.special_texts["<s>"] == 1
    assert mistral.special_texts["[INST]"] in mistral.special_ids


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_mistral_ids_equal_those_of_the_library(mistral, text):
    library = reference(asset("tokenizers/mistral"))
    if any(spelling in text for spelling in mistral.special_texts):
        return
    ids = library.encode(text)
    assert mistral.encode(text, add_special_tokens=False) == ids
    assert mistral.decode(ids) == library.decode(ids)


def words():
    # A text that does not change when the project's own does.
    text = (ROOT / "LICENSE").read_text()
    more = ["naïve ½ 你好 ﬁn  ＡＢＣ", "<html> {a: [1, 2]} x < y > z; a_b = c * 3 / 4 # $%&@!?"]
    return [line for line in text.splitlines() if line.strip()] + more * 3


def train(folder, **options):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words()),
        model_writer=written,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 600, **options},
    )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return folder


TRAINED = {
    "bpe": {"model_type": "bpe"},
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.98},
    "bpe, spaces kept": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "unigram": {"model_type": "unigram"},
    "unigram, bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "unigram, no prefix": {"model_type": "unigram", "add_dummy_prefix": False},
    "other ends": {"model_type": "bpe", "bos_id": -1, "eos_id": 0, "unk_id": 1},
}


@pytest.mark.parametrize("name", TRAINED)
def test_ids_of_a_trained_model_equal_those_of_the_library(name, tmp_path):
    folder = train(tmp_path / "model", **TRAINED[name])
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    assert ours.vocab_size == theirs.get_piece_size()
    chance = random.Random(name)
    vocabulary = " ".join(words()).split()
    for i in range(400):
        text = " ".join(chance.choices(vocabulary, k=chance.randrange(12)))
        if i % 2:
            text = "".join(chance.choices(text + "  \n\t é½ﬁ你🦙Ａ", k=30))
        if any(special in text for special in ours.special_texts):
            continue
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids).strip() == theirs.decode(ids).replace(" \u2047 ", "").strip()


def test_user_defined_and_control_pieces_are_added_tokens(tmp_path):
    folder = train(tmp_path / "model", user_defined_symbols=["<tool>"], control_symbols=["<end>"])
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    tool, end = theirs.piece_to_id("<tool>"), theirs.piece_to_id("<end>")
    ids = ours.encode("a<tool>b<end>", add_special_tokens=False)
    assert tool in ids
    assert ids[-1] == end
    assert end in ours.special_ids
    assert tool not in ours.special_ids
    assert end not in ours.encode("a<end>", parse_special=False)
    assert (
        ours.raw(ours.encode("a<end>", add_special_tokens=False, parse_special=False)) == "a<end>"
    )


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_the_files_beside_the_model_are_honoured(tmp_path):
    folder = train(tmp_path / "model", model_type="bpe")
    size = Tokenizer.from_folder(folder).vocab_size
    write(
        folder,
        "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": True,
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                str(size): {"content": "<|end|>", "special": True, "rstrip": True},
                str(size + 1): {"content": "<think>", "special": False},
            },
        },
    )
    write(folder, "added_tokens.json", {"<more>": size + 2})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|end|>  <think><more>") == [size, size + 1, size + 2, size]
    assert tokenizer.special_texts["<|end|>"] == size
    assert size + 1 not in tokenizer.special_ids


def test_the_word_start_after_a_special_token(tmp_path):
    folder = train(tmp_path / "model", model_type="bpe", remove_extra_whitespaces=False)
    legacy = Tokenizer.from_folder(folder).encode("</s>the", add_special_tokens=False)
    write(folder, "tokenizer_config.json", {"legacy": False})
    tokenizer = Tokenizer.from_folder(folder)
    later = tokenizer.encode("</s>the", add_special_tokens=False)
    start = tokenizer.encode("the", add_special_tokens=False)
    assert legacy[1:] == start == reference(folder).encode("the")
    assert later[1:] == tokenizer.encode_after("x", "the") != start


def test_names_of_model_files(tmp_path):
    trained = train(tmp_path / "model", model_type="bpe") / "tokenizer.model"
    for name in ("tokenizer.model", "tokenizer.model.v3", "x_240323.model.v2", "spiece.model"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        shutil.copy(trained, folder / name)
        assert Tokenizer.from_folder(folder).vocab_size == 600


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no pieces"),
        (b"\x0a\xff", "no SentencePiece model"),
        (b"\x0a\x05ab", "a field of 5 bytes"),
        (b"\x0b", "field type 3"),
        (b"hello world", "no SentencePiece model"),
    ],
)
def test_a_broken_model_is_a_model_error(tmp_path, data, message):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_other_kinds_and_wrong_ids_are_refused(tmp_path):
    folder = train(tmp_path / "words", model_type="char", vocab_size=100, hard_vocab_limit=False)
    with pytest.raises(ModelError, match=r"model type 4.*expected Unigram"):
        Tokenizer.from_folder(folder)
    folder = train(tmp_path / "model", model_type="bpe")
    write(folder, "added_tokens.json", {"<more>": 1000})
    with pytest.raises(ModelError, match=r"'<more>' has id 1000, expected 600"):
        Tokenizer.from_folder(folder)
