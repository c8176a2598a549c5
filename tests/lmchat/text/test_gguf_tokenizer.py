"""Tokenizers and templates of GGUF files, against recorded ids and the folders' own."""

import json
import re
import struct

import gguf_files
import pytest
import sentencepiece
import tokenizers
from assets import ROOT, asset, tokenizer_folder
from chat_models import CHATML, chat_model, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

import lmchat
from lmchat.errors import ModelError
from lmchat.text.formats.gguf_tokenizer import (
    read_template,
    read_tokenizer,
    special_tokens,
)
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.gguf.file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
OPTIONS = {"threads": 1, "cache_memory": "32MiB", "store": "memory"}
# The splitting rules of Llama 3, GPT-4o and Tekken, as their tokenizer.json have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = GPT4O.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DIGITS = pre_tokenizers.Digits(individual_digits=True)
RULES = {
    "gpt-2": None, "llama-bpe": LLAMA3, "dbrx": LLAMA3, "gpt-4o": GPT4O, "tekken": TEKKEN,
    "refact": DIGITS,
}  # fmt: skip


def opened(path, metadata):
    return GgufFile(gguf_files.write_metadata(path / "tokenizer.gguf", metadata))


def stories(path):
    """Returns the metadata of the llama2.c tokenizer: scores and texts after a length."""
    data = path.read_bytes()
    pieces, at = [], 4
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        text = data[at + 8 : at + 8 + size].decode().replace(" ", "\u2581")
        at += 8 + size
        i = len(pieces)
        kind = (UNKNOWN, CONTROL, CONTROL)[i] if i < 3 else BYTE if i < 259 else NORMAL
        name = ("<unk>", "<s>", "</s>")[i] if i < 3 else text
        pieces.append((f"<0x{i - 3:02X}>" if kind == BYTE else name, score, kind))
    return gguf_files.sentencepiece(pieces)


def mistral(path):
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def kind(i):
        if model.is_unknown(i):
            return UNKNOWN
        return CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL

    return gguf_files.sentencepiece(
        [(model.id_to_piece(i), model.get_score(i), kind(i)) for i in range(len(model))]
    )


def read(name, scratch):
    """Returns the tokenizer of an asset, through a GGUF file."""
    if name == "phi-3-mini":
        return read_tokenizer(GgufFile(asset("tokenizers/gguf_vocab/ggml-vocab-phi-3.gguf")))
    if name == "qwen2.5":
        metadata = gguf_files.byte_level(tokenizer_folder(name, scratch), "qwen2")
        # Its files fill the vocabulary up with tokens that no text has.
        unused = [f"[PAD{i}]" for i in range(len(metadata["tokenizer.ggml.tokens"]), 151936)]
        metadata["tokenizer.ggml.tokens"] += unused
        metadata["tokenizer.ggml.token_type"] += [UNUSED] * len(unused)
    elif name == "stories260K":
        metadata = stories(asset("models/stories260K/tok512.bin"))
    else:
        model = asset("tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3")
        metadata = mistral(model)
    return read_tokenizer(opened(scratch, metadata))


@pytest.mark.parametrize("name", ["qwen2.5", "phi-3-mini", "stories260K", "mistral-v3"])
def test_ids_equal_the_recorded_ones(name, tmp_path):
    tokenizer = read(name, tmp_path)
    goldens = json.loads(asset("tokenizers/tokenizer_goldens.json").read_text())
    for text, ids in zip(goldens["texts"], goldens["ids"][name], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
    starts = tokenizer.encode("hi")[0] == tokenizer.special_texts.get("<s>")
    assert starts == (name != "qwen2.5")


def test_special_tokens_of_a_real_file_are_those_of_its_folder():
    file = GgufFile(asset("tokenizers/gguf_vocab/ggml-vocab-phi-3.gguf"))
    ours, folder = read_tokenizer(file), Tokenizer.from_folder(asset("tokenizers/phi-3-mini"))
    names = {text: i for text, i in ours.special_texts.items() if not text.startswith("[PAD")}
    # An end by its spelling, as in llama.cpp; an ordinary added token of the folder.
    assert names == {**folder.special_texts, "</s>": 2}
    text = "<|user|>\nHi<|end|>\n<|assistant|>"
    assert [i for i in ours.encode(text) if i in ours.special_ids] == [1, 32010, 32007, 32001]


# --- white space beside marks ---------------------------------------------------------------------

PHI3 = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
PHI3 += [(f"<0x{i:02X}>", 0.0, BYTE) for i in range(256)] + [("\u2581", -1.0, NORMAL)]
PHI3 += [(text, 0.0, CONTROL) for text in ("<|endoftext|>", "<|user|>", "<|end|>")]
PHI3 += [("<|placeholder1|>", 0.0, USER_DEFINED)]
STRIPPED = r"(<\|user\|>|<\|end\|>|<\|placeholder1\|>|</s>)\s+"


@pytest.mark.parametrize(
    "file",
    [
        {"general.architecture": "phi3"},
        {"general.name": "Phi3 mini"},
        {"general.name": "my Phi-3.5 chat"},
        {"general.name": "Phi 4"},
    ],
)
def test_white_space_after_the_marks_of_phi3_is_dropped(file, tmp_path):
    (tmp_path / "plain").mkdir()
    plain = read_tokenizer(opened(tmp_path / "plain", gguf_files.sentencepiece(PHI3)))
    ours = read_tokenizer(opened(tmp_path, {**gguf_files.sentencepiece(PHI3), **file}))
    for text in (
        "<|user|>\nHi<|end|>\n<|user|> \t\nx",
        "<|endoftext|> a<s> b<unk> c</s>  d <|placeholder1|>  e",
        " \n<|user|>",
        "<|end|><|user|>\n",
    ):
        bare = re.sub(STRIPPED, r"\1", text)
        expected = text if file == {"general.name": "Phi 4"} else bare
        assert ours.encode(text) == plain.encode(expected), text
    assert ours.special_ids == plain.special_ids


def test_prompts_of_phi3_have_the_ids_of_its_folder():
    ours = read_tokenizer(GgufFile(asset("tokenizers/gguf_vocab/ggml-vocab-phi-3.gguf")))
    folder = Tokenizer.from_folder(asset("tokenizers/phi-3-mini"))
    template = ChatTemplate.from_folder(asset("tokenizers/phi-3-mini"))
    for question in ("What is the capital of France?", "  indented\n\nlines\n", "日本語 🙂"):
        chat = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!\n\nHow?")]
        chat.append(("user", question))
        text = template.render([{"role": role, "content": content} for role, content in chat])
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == folder.encode(text, add_special_tokens=False)
        assert ours.encode("<|user|>\n", add_special_tokens=False) == [32010]


def test_white_space_beside_the_marks_of_phi4_is_dropped(tmp_path):
    backend = trained(LLAMA3)
    backend.add_special_tokens(["<|im_start|>", "<|im_sep|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    metadata = gguf_files.byte_level(tmp_path, "dbrx")
    plain = read_tokenizer(opened(tmp_path, metadata))
    ours = read_tokenizer(opened(tmp_path, {**metadata, "general.architecture": "phi3"}))
    text = "a <|im_start|> user <|im_sep|>\n b "
    bare = "a<|im_start|>user<|im_sep|>b "
    assert ours.encode(text) == plain.encode(bare) != plain.encode(text)


# --- byte-level BPE ------------------------------------------------------------------------------


def trained(pieces, is_whole=True):
    """Returns a byte-level BPE with a splitting rule, trained on the project's licence."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pieces is not None and is_whole))
    is_regex = isinstance(pieces, str)
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_regex)]
    if is_regex:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated"))
    elif pieces is not None:
        steps.insert(0, pieces)
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|begin_of_text|>", "<|eot_id|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (ROOT / "LICENSE").read_text()
    backend.train_from_iterator([*text.splitlines(), "1234567 2024-11-24\n\n\n  x"] * 3, trainer)
    return backend


@pytest.fixture(scope="module", params=RULES)
def pair(request, tmp_path_factory):
    """Returns a folder's tokenizer and that of its GGUF file."""
    path = tmp_path_factory.mktemp("tokenizer")
    backend = trained(RULES[request.param], request.param in ("llama-bpe", "tekken"))
    backend.save(str(path / "tokenizer.json"))
    metadata = gguf_files.byte_level(path, request.param)
    return backend, read_tokenizer(opened(path, metadata))


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["It's", "HTTPServer", "don'T", "a/b/", "\u0301", "\u0663\u0664", "WE'LL",
                         " License", "\n", "\r\n", "  ", "\t", "12345", "a1b22", "你好", "é",
                         "e\u0301", "...", "!\n", "<|eot_id|>", "naïve"])
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    ).map("".join)
)  # fmt: skip
def test_byte_level_ids_equal_those_of_the_folder(pair, text):
    theirs, ours = pair
    ids = theirs.encode(text).ids
    assert ours.encode(text) == ids
    assert ours.raw(ids) == text


# --- BPE of characters ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma_pair(tmp_path_factory):
    """Returns the reference's tokenizer of Gemma and that of a GGUF file with its tokens."""
    import transformers

    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special + bytes_, show_progress=False
    )
    text = (ROOT / "LICENSE").read_text()
    backend.train_from_iterator([*text.split("\n\n"), "x = 12\n\n\n  y\t"] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    theirs = transformers.GemmaTokenizer(
        vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]],
        extra_special_tokens=["<|turn>", "<turn|>"], mask_token="<unk>", add_bos_token=True,
    )  # fmt: skip
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [CONTROL if each in special else BYTE if each in bytes_ else NORMAL for each in tokens]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    path = tmp_path_factory.mktemp("gemma")
    return theirs, read_tokenizer(opened(path, metadata)), metadata


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["License", " the", "  ", "\n", "\n\n", "\u2581", "\t", "12", "你", "é",
                         "e\u0301", "<|turn>", "<turn|>", "<turn", "...", "\r\n"])
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    ).map("".join)
)  # fmt: skip
def test_ids_of_gemma_equal_those_of_the_reference(gemma_pair, text):
    theirs, ours, _ = gemma_pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.raw(ours.encode(text)[1:]) == text.replace("\u2581", " ")


def test_tokens_of_gemma_may_have_two_ids(gemma_pair, tmp_path):
    theirs, _, metadata = gemma_pair
    first = metadata["tokenizer.ggml.tokens"].index("L")
    twice = dict(metadata)
    for key, value in (("tokens", "L"), ("scores", 0.0), ("token_type", NORMAL)):
        twice[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    ids = theirs.encode("L")
    assert first in ids
    last = len(metadata["tokenizer.ggml.tokens"])
    assert read_tokenizer(opened(tmp_path, twice)).encode("L") == [
        last if i == first else i for i in ids
    ]


# --- settings -------------------------------------------------------------------------------------


def test_llama3_texts_begin_with_a_bos_unless_the_file_says_no(tmp_path):
    backend = trained(LLAMA3)
    backend.save(str(tmp_path / "tokenizer.json"))
    metadata = gguf_files.byte_level(tmp_path, "llama-bpe")
    metadata["tokenizer.ggml.bos_token_id"] = 0
    assert read_tokenizer(opened(tmp_path, metadata)).encode("x")[0] != 0
    del metadata["tokenizer.ggml.add_bos_token"]
    tokenizer = read_tokenizer(opened(tmp_path, metadata))
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.encode("x", add_special_tokens=False)[0] != 0


def test_a_whole_tokenizer_json_in_the_file_wins(tmp_path):
    backend = trained(None)
    metadata = {
        "tokenizer.huggingface.json": backend.to_str(),
        "tokenizer.ggml.model": "unheard",
    }
    assert read_tokenizer(opened(tmp_path, metadata)).encode("a b") == backend.encode("a b").ids
    metadata["tokenizer.huggingface.json"] = "{}"
    with pytest.raises(ModelError, match="tokenizer.huggingface.json"):
        read_tokenizer(opened(tmp_path, metadata))


def small(**changes):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    metadata |= {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ggml__model": "bert"}, "ggml.model is 'bert', expected 'llama', 'gpt2' or 'gemma4'"),
        ({"ggml__model": None}, "ggml.model is absent"),
        ({"ggml__pre": "mtp"}, "ggml.pre is 'mtp', expected one of a.x-4.0, afmoe, bailingmoe"),
        ({"ggml__tokens": None}, "ggml.tokens is absent, expected an array"),
        ({"ggml__tokens": "ab"}, "ggml.tokens is 'ab', expected an array"),
        ({"ggml__tokens": ["a", "b", "a"]}, "ggml.tokens has 'a' twice"),
        ({"ggml__token_type": [1, 1]}, "ggml.token_type has 2 values, expected one for each of 3"),
        ({"ggml__merges": ["a c"]}, "ggml.merges has 'a c', expected two tokens that make a third"),
        ({"ggml__merges": ["ab"]}, "ggml.merges has 'ab'"),
        ({"ggml__eos_token_id": "b"}, "eos_token_id is 'b', expected the id of a token"),
        ({"ggml__add_bos_token": 1}, "ggml.add_bos_token is 1, expected a bool"),
        ({"ggml__model": "llama", "ggml__scores": [0.5]}, "ggml.scores has 1 values"),
    ],
)
def test_wrong_metadata_are_refused_by_name(changes, match, tmp_path):
    with pytest.raises(ModelError, match=match):
        read_tokenizer(opened(tmp_path, small(**changes)))


def test_a_very_long_token_is_cut_where_both_parts_are_pieces(tmp_path):
    """A reader that tries all cuts takes a minute for 300,000 characters."""
    texts = ["<unk>", "a", "ab", "b", "ab" * 150_000, "abab"]
    pieces = [(text, -float(i), NORMAL if i else UNKNOWN) for i, text in enumerate(texts)]
    metadata = gguf_files.sentencepiece(pieces) | {
        "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    tokenizer = read_tokenizer(opened(tmp_path, metadata))
    assert tokenizer.encode("ababb") == [5, 3]


@pytest.mark.parametrize("index", [0xFFFFFFFF, 3, 1 << 31])
def test_an_id_without_a_token_is_not_set(index, tmp_path):
    names = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")
    ids = {f"ggml__{name}_token_id": index for name in names}
    metadata = small(**ids, ggml__add_bos_token=True, chat_template="{{ eos_token }}|{{ x }}")
    file = opened(tmp_path, metadata)
    assert special_tokens(file) == {}
    assert read_tokenizer(file).encode("ab") == [2]  # no BOS in front
    assert read_template(file).render([]) == "|"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_without_types_are_ordinary_but_for_bytes_and_named_ones(kind, tmp_path):
    spellings = ["<unk>", "</s>", "<0x63>", "a", "b", "ab"]
    changes = {"ggml__model": kind, "ggml__tokens": spellings, "ggml__token_type": None}
    changes |= {"ggml__unknown_token_id": 0, "ggml__eos_token_id": 1, "ggml__scores": None}
    changes |= {"ggml__add_bos_token": False, "ggml__add_space_prefix": False}
    tokenizer = read_tokenizer(opened(tmp_path, small(**changes)))
    assert tokenizer.encode("ab</s>a") == [5, 1, 3]
    assert tokenizer.decode([5, 1, 3]) == "aba"
    assert (tokenizer.encode("c") == [2]) == (kind == "llama")  # the byte of c


def test_a_file_without_a_pre_tokenizer_is_cut_as_old_files_are(tmp_path, caplog):
    tokens = [*"ab12", "12", "ab"]
    changes = {"ggml__tokens": tokens, "ggml__token_type": None, "ggml__merges": ["a b", "1 2"]}
    named, absent = (
        read_tokenizer(opened(tmp_path, small(**changes, ggml__pre=pre)))
        for pre in ("default", None)
    )
    assert absent.encode("ab12112") == named.encode("ab12112") == [5, 4, 2, 4]
    assert [record.message for record in caplog.records if "pre is absent" in record.message]


def test_templates_come_from_the_metadata(tmp_path):
    assert read_template(opened(tmp_path, small())) is None
    changes = {"chat_template": "{{ eos_token }}", "ggml__eos_token_id": 2}
    assert read_template(opened(tmp_path, small(**changes))).render([]) == "ab"
    with pytest.raises(ModelError, match="tokenizer.chat_template is 1"):
        read_template(opened(tmp_path, small(chat_template=1)))


# --- chats ---------------------------------------------------------------------------------------


def converse(model, device):
    with lmchat.ChatEngine(model, device=device, **OPTIONS) as engine:
        session = engine.session("s", system="You are brief.")
        for question in ("Plan a day in Kyoto.", "And with 2 children?"):
            session.send(question, max_new_tokens=12, temperature=0)
        return session.token_ids, [turn.text for turn in session.turns]


def test_a_chat_has_equal_token_ids_from_a_folder_and_its_file(tmp_path, device):
    folder = chat_model(tmp_path / "folder")
    path = tmp_path / "model.gguf"
    gguf_files.write_gguf(folder, path, tokenizer=gguf_files.byte_level(folder, "gpt-2"))
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "tokenizer.model"):
        path.with_name(name).write_text("no JSON")  # files beside a GGUF file are not read
    expected = converse(folder, device)
    assert converse(path, device) == expected
    assert len(expected[0]) > 60
    assert CHATML.startswith("{% for")
    assert make_tokenizer().decode(expected[0]).count("assistant") >= 2
