"""Added tokens that only the files beside a vocabulary name, against transformers."""

import io
import json

import pytest
from chat_models import CHATML, chat_model, make_tokenizer

import lmchat
from lmchat.errors import ModelError
from lmchat.text.spellings import is_mark
from lmchat.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
SIZE = make_tokenizer().get_vocab_size(with_added_tokens=True)
TEXTS = [
    "<|user|>\n Hi<|end|> \n<|im_start|> x <think>ab</think>",
    "a <|end|>  b<|user|><|user|> c",
    " chat <|im_end|> and the assistant! <|user |>",
    "",
]


def entry(content, **flags):
    unset = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **unset, **flags}


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def made(folder, config, **files):
    """Writes the folder of a tokenizer, and returns our tokenizer and the reference's."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    for name, value in files.items():
        write(folder, f"{name}.json", value)
    return Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)


CONFIGS = {
    "more tokens": {
        "added_tokens_decoder": {
            str(SIZE): entry("<|user|>", special=True),
            str(SIZE + 1): entry("<|end|>", special=True, rstrip=True),
            str(SIZE + 2): entry("<think>"),
            str(SIZE + 3): entry("</think>", lstrip=True),
        }
    },
    "in another order": {
        "added_tokens_decoder": {
            str(SIZE + 1): entry("<|end|>", special=True),
            str(SIZE): entry("<|user|>"),
        }
    },
    "other flags": {
        "added_tokens_decoder": {
            "1": entry("<|im_start|>", special=True, rstrip=True),
            "2": entry("<|im_end|>", special=True, lstrip=True),
        }
    },
    "words of the vocabulary": {
        "added_tokens_decoder": {str(SIZE): entry("<|user|>", special=True)},
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_the_config_alone_get_the_ids_of_the_reference(name, tmp_path):
    ours, theirs = made(tmp_path, CONFIGS[name])
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.raw(ids) == theirs.decode(ids, skip_special_tokens=False), text
    named = CONFIGS[name]["added_tokens_decoder"]
    for i, token in named.items():
        assert ours.added_texts[token["content"]] == int(i)
        assert (int(i) in ours.special_ids) == token["special"]


def test_a_special_token_that_is_a_word_of_the_vocabulary_is_found_whole(tmp_path):
    backend = make_tokenizer()
    described = json.loads(backend.to_str())
    described["model"]["vocab"]["</s>"] = SIZE
    folder = tmp_path
    write(folder, "tokenizer.json", described)
    config = {"eos_token": "</s>", "pad_token": "!", "additional_special_tokens": ["<|im_end|>"]}
    write(folder, "tokenizer_config.json", config)
    ours = Tokenizer.from_folder(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = "a</s>b</s>"
    assert ours.encode(text) == theirs.encode(text)
    assert SIZE in ours.special_ids
    # The reference hides every "!" of this folder.
    assert ours.decode(ours.encode("Hi!")) == "Hi!"


def test_the_prompt_of_a_template_has_the_tokens_of_the_config(tmp_path):
    folder = chat_model(tmp_path / "model")
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"] = [t for t in described["added_tokens"] if t["id"] != 1]
    write(folder, "tokenizer.json", described)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"1": entry("<|im_start|>", special=True)}
    write(folder, "tokenizer_config.json", config)
    with lmchat.ChatEngine(folder, threads=1, cache_memory="16MiB", store="memory") as engine:
        session = engine.session("s")
        session.send("Hi <|im_start|>", max_new_tokens=1)
        assert session.token_ids.count(1) == CHATML.count("<|im_start|>")


def test_an_id_of_another_token_keeps_it(tmp_path):
    decoder = {"5": entry("<|old|>", special=True), str(SIZE): entry("<|user|>")}
    before = make_tokenizer()
    ours, _ = made(tmp_path, {"added_tokens_decoder": decoder}, added_tokens={"<more>": SIZE + 1})
    text = f"<|old|> {before.id_to_token(5)} <|user|><more>"
    assert ours.added_texts.keys() >= {"<|user|>", "<more>"}
    assert "<|old|>" not in ours.added_texts
    assert ours.encode("<|user|><more>") == [SIZE, SIZE + 1]
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder is \[1\], expected an object"),
        ({"added_tokens_decoder": {"1": "<s>"}}, "added_tokens_decoder has '<s>' for '1'"),
        ({"added_tokens_decoder": {"1": {"content": 3}}}, "expected an object with the token's"),
        ({"added_tokens_decoder": {"-1": entry("<x>")}}, "a token has the id '-1', expected"),
        ({"added_tokens_decoder": {"9" * 20: entry("<x>")}}, "a token has the id '9999"),
        ({"added_tokens_decoder": {"9999": entry("<x>")}}, f"'<x>' has id 9999, expected {SIZE}"),
        ({"added_tokens_decoder": {"9999": entry("\ud800")}}, "tokenizer.json"),
    ],
)
def test_wrong_entries_are_refused_by_name(config, match, tmp_path):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(ModelError, match=match):
        Tokenizer.from_folder(tmp_path)


def test_marks_have_letters_and_other_signs():
    marks = ["<|user|>", "[INST]", "<s>", "]~b]", "<｜User｜>", "### Instruction:", "▁<EOT>"]
    assert all(map(is_mark, marks))
    assert not any(map(is_mark, ["user", "!", "\n\n", "▁▁", "```", "▁the", "", "12"]))


def test_pieces_of_a_sentencepiece_model_take_the_names_of_the_config(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a chat of two users, and of an assistant"] * 9),
        model_writer=written, model_type="bpe", vocab_size=60, minloglevel=2, num_threads=1,
        user_defined_symbols=["[UNUSED_1]", "[UNUSED_2]"], hard_vocab_limit=False,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    library = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    first, second = map(library.piece_to_id, ("[UNUSED_1]", "[UNUSED_2]"))
    decoder = {
        str(first): entry("<|im_start|>", special=True),
        str(second): entry("<|im_end|>", special=True),
    }
    for config in ({"eos_token": "[UNUSED_2]"}, {"additional_special_tokens": ["[UNUSED_2]"]}):
        write(tmp_path, "tokenizer_config.json", config)
        assert second in Tokenizer.from_folder(tmp_path).special_ids
    write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": decoder})
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode("<|im_start|>a chat<|im_end|>", add_special_tokens=False) == [
        first, *library.encode("a chat"), second,
    ]  # fmt: skip
    assert {first, second} <= ours.special_ids
    assert ours.vocab_size == len(library)
