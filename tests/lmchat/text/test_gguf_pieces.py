"""The pieces into which byte-level BPE tokenizers of GGUF files cut texts."""

import gguf_files
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from lmchat.text.formats.gguf_pieces import CHARACTERS, PIECES
from lmchat.text.formats.gguf_tokenizer import read_tokenizer
from turbomind.gguf.file import GgufFile

TEXTS = (
    "I'm 1234567 years old, ISN'T it?  \n\n  Yes!",
    "\u4f60\u597d hello \u4e16\u754c\u30ab\u30bf\u30ab\u30ca 123 \uac00\uac01",
    "HelloWorld fooBar x+y=z; #include <a.h>\n\treturn;",
    "a  b\t c\r\n d \u00dcn\u00efco\u0308de \u0939\u093f\u0928\u094d\u0926\u0940",
)


def cut(name: str, text: str) -> list[str]:
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in PIECES[name].patterns
    ]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


def cut_again(pattern: str, text: str) -> list[str]:
    """The matches and what lies between them, by another library of regular expressions."""
    regex = pytest.importorskip("regex")
    pieces, at = [], 0
    for match in regex.compile(pattern, regex.V1).finditer(text):
        pieces += [text[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in [*pieces, text[at:]] if piece]


@pytest.mark.parametrize("name", PIECES)
def test_patterns_apply_one_after_the_other(name):
    for text in TEXTS:
        pieces = [text]
        for pattern in PIECES[name].patterns:
            pieces = [part for piece in pieces for part in cut_again(pattern, piece)]
        assert cut(name, text) == pieces


# By the tokenizer.json of the models, or the tests of llama.cpp's converter.
@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (["gpt-2", "mpt", "exaone4"], "I'M 123 a's", ["I", "'", "M", " 123", " a", "'s"]),
        (["smollm", "starcoder", "command-r"], "v 12", ["v", " ", "1", "2"]),
        (["llama-bpe", "falcon3", "glm4", "dbrx"], "I'M 1234", ["I", "'M", " ", "123", "4"]),
        (["qwen2", "deepseek-r1-qwen", "megrez"], "I'M 12", ["I", "'M", " ", "1", "2"]),
        (["qwen35"], "\u0939\u093f\u0928", ["\u0939\u093f\u0928"]),
        (["qwen2"], "\u0939\u093f\u0928", ["\u0939", "\u093f\u0928"]),
        (["gpt-4o", "minimax-m2", "tiny_aya"], "HelloWorld's", ["Hello", "World's"]),
        (["tekken"], "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        (["deepseek-v3", "hunyuan-dense"], "a=b \u4f60123", ["a", "=b", " ", "\u4f60", "123"]),
        (["tiny_aya", "superbpe", "afmoe"], "1234567", ["1", "234", "567"]),
        (["kimi-k2"], "\u4f60\u597dabc", ["\u4f60\u597d", "abc"]),
        (["seed-coder"], "a!\n\nb", ["a", "!", "\n\n", "b"]),
        (["qwen2"], "a!\n\nb", ["a", "!\n\n", "b"]),
        (["default"], "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        (["falcon"], "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        (["bloom"], "Hi, you", ["Hi", ",", " you"]),
    ],
)  # fmt: skip
def test_words_and_digits_of_the_models(names, text, expected):
    for name in names:
        assert cut(name, text) == expected, name


@pytest.mark.parametrize("name", sorted({*PIECES, *CHARACTERS}))
def test_every_name_gives_a_tokenizer_that_returns_its_text(name, tmp_path):
    """All bytes are tokens; names without the byte alphabet have characters."""
    plain = name in CHARACTERS or not PIECES[name].bytes
    alphabet = (
        ["a", "b", "1", "\u2581", "ab"]
        if plain
        else [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    )
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.token_type": [1] * len(alphabet),
        "tokenizer.ggml.merges": ["a b"],
    }
    path = gguf_files.write_metadata(tmp_path / "tokenizer.gguf", metadata)
    tokenizer = read_tokenizer(GgufFile(path))
    text = "ab1ba" if plain else TEXTS[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("ab") == [len(alphabet) - 1]
