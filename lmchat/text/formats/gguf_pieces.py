"""How byte-level BPE tokenizers of GGUF files cut a text into pieces, by `tokenizer.ggml.pre`.

The names are those of llama.cpp (src/llama-vocab.cpp), aliases included. A text is cut by one
regular expression after the other: matches and what lies between them are pieces. Tokens merge
inside a piece only. The expressions are those of the models' tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """The pre-tokenizer of a model.

    Attributes:
        patterns: Regular expressions, applied in turn.
        whole: A piece that is a token is taken whole, without merges.
        begins: A text begins with a BOS where the file does not say otherwise.
        composed: Texts are composed (NFC) before they are cut; files omit it.
        bytes: Tokens are spelled in the byte alphabet of GPT-2, else in UTF-8.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False
    bytes: bool = True


_END = r"|\s+(?!\S)|\s+"
_LINES = r"|\s*[\r\n]+" + _END
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _END
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _words(digits: str) -> str:
    return rf"{_SHORT}|{_WORD}|\p{{N}}{digits}|{_SIGNS}{_LINES}"


def _cases(short: str, digits: str, not_in: str = "", signs: str = r"[\r\n/]*") -> str:
    """Words end before a capital letter; `not_in` takes letters out of words."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_in}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_in}]"
    front = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{front}{upper}*{lower}+{short}|{front}{upper}+{lower}*{short}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+{signs}{_LINES}"
    )


_OPTIONAL = f"{_SHORT}?"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_SIGN = r"[!-/:-@\[-`{-~]"
_DEEPSEEK_FRONT = rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK_WORDS = rf"{_DEEPSEEK_FRONT}| ?[\p{{P}}\p{{S}}]+[\r\n]*{_LINES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}]"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK
)
_SOUTH_EAST = (  # scripts that write no spaces, as AFMoE takes them apart
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_SPACES = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"

_QWEN2, _LLAMA3 = _words(""), _words("{1,3}")
_GPT4O = _cases(_OPTIONAL, "{1,3}")
_KINDS: dict[str, Pieces] = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
    "gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4": Pieces(
        (_GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Pieces(
        (r"\p{N}", _GPT2)
    ),
    "default": Pieces((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": Pieces((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Pieces(
        (_LLAMA3,), whole=True, begins=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Pieces((_LLAMA3,)),
    "qwen2": Pieces((_QWEN2,), composed=True),
    "deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2": Pieces((_QWEN2,)),
    "qwen35": Pieces(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_LINES}",
        ),
        composed=True,
    ),
    "ufakzeka": Pieces((rf"{_WORD}|\p{{N}}|{_SIGNS}{_LINES}",)),
    "laguna": Pieces((r"[^\n]+|[\n]+", _QWEN2)),
    "minicpm5": Pieces((r"\p{N}{1,3}", _words("+")), whole=True),
    "jais-2": Pieces((rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+{_SPACES}",)),
    "seed-coder": Pieces((rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_LINES}",)),
    "bailingmoe bailingmoe2 llada-moe": Pieces(
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]{_END}",)
    ),
    "exaone-moe": Pieces(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_END}",
        )
    ),
    "tekken": Pieces((_cases("", ""),), whole=True, begins=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Pieces((_GPT4O,)),
    "granite-embed-multi-97m": Pieces((_GPT4O,), whole=True),
    "tiny_aya cohere2moe": Pieces((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "youtu": Pieces((_YOUTU, _cases(_OPTIONAL, "")), whole=True),
    "kimi-k2": Pieces((r"\p{Han}+|" + _cases(_OPTIONAL, "{1,3}", r"&&[^\p{Han}]", r"[\r\n]*"),)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Pieces((r"\p{N}{1,3}", _CJK, _DEEPSEEK_WORDS)),
    "spark2_5": Pieces(
        (
            r"\p{N}{1,3}",
            _CJK,
            rf"{_DEEPSEEK_FRONT}| ?[\p{{P}}\p{{S}}]+|[\r\n]{_END}",
            r"\p{N}",
        )
    ),
    "afmoe": Pieces(
        (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _SOUTH_EAST, _DEEPSEEK_WORDS),
    ),
    "deepseek-llm": Pieces(
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pieces((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "superbpe": Pieces((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "poro-chat bloom gpt3-finnish": Pieces((_BLOOM,)),
    "viking": Pieces((_BLOOM, r"\p{N}")),
    "chameleon": Pieces(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ),
    "whitespace": Pieces((r"\S+",), bytes=False),
}
PIECES = {name: pieces for names, pieces in _KINDS.items() for name in names.split()}
"""The pre-tokenizers by name."""
CHARACTERS = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Names of tokenizers that cut nothing and merge characters, with escaped spaces."""
ABSENT = "default"
"""The name that llama.cpp assumes in files without one."""
