"""Tokenizers and chat templates against recorded ids, whole decodes, and transformers."""

import concurrent.futures
import datetime
import functools
import json
import string
import sys
import threading
import unicodedata

import pytest
from assets import asset, tokenizer_folder
from hypothesis import given, settings
from hypothesis import strategies as st

import lmchat.text.template
import lmchat.text.tokenizer
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.errors import ContextFull, InvalidRequest, ModelError

# Byte-level, byte fallback, byte fallback with a BOS, the same from a SentencePiece model, and one
# that starts words at the start of a text only.
NAMES = ["qwen2.5", "phi-3-mini", "stories260K", "mistral-v3", "first-only"]


def loaded(name, scratch):
    if name == "mistral-v3":
        return Tokenizer.from_folder(asset("tokenizers/mistral"))
    if name != "first-only":
        return Tokenizer.from_folder(tokenizer_folder(name, scratch))
    folder = tokenizer_folder("phi-3-mini", scratch)
    described = json.loads((folder / "tokenizer.json").read_text())
    space = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    described |= {"normalizer": None, "pre_tokenizer": space}
    (scratch / "tokenizer.json").write_text(json.dumps(described))
    return Tokenizer.from_folder(scratch)


@pytest.fixture(scope="module", params=NAMES)
def named(request, tmp_path_factory):
    return request.param, loaded(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(named):
    return named[1]


def test_ids_equal_the_recorded_ones(named):
    name, tokenizer = named
    goldens = json.loads(asset("tokenizers/tokenizer_goldens.json").read_text())
    if name not in goldens["ids"]:
        pytest.skip(f"no recorded ids for {name}")
    for text, ids in zip(goldens["texts"], goldens["ids"][name], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_of_any_tokens_join_to_the_whole_text(tokenizer, data):
    # Bytes of every kind are frequent, so that broken and long characters are.
    raw = st.sampled_from([i for i in range(300) if i < tokenizer.vocab_size])
    ids = data.draw(st.lists(raw | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces, rest = [], list(ids)
    while rest:
        count = data.draw(st.integers(1, 3))
        pieces.append(stream.push(rest[:count]))
        rest = rest[count:]
    pieces.append(stream.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_join_to_the_text(tokenizer):
    text = "naïve 你好 🦙🦙 and more"
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled, before = b"", None
    for token in ids:
        spelled += tokenizer.token_bytes(token, before)
        before = before if tokenizer.is_byte(token) else token
    assert spelled.decode() == tokenizer.decode(ids)
    for spelling, token in tokenizer.special_texts.items():
        assert tokenizer.token_bytes(token).decode() == spelling


def test_no_delta_shows_half_a_character(tokenizer):
    text = "naïve 你好 🦙🦙 កាន់ 👩‍👩‍👧 end"
    stream = tokenizer.stream()
    pieces = [stream.push([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert "\ufffd" not in "".join(pieces)
    assert ("".join(pieces) + stream.flush()).strip() == text


def test_each_delta_costs_its_own_tokens_only(tokenizer, monkeypatch):
    decoded = []
    whole = tokenizer.decode

    def counting(ids, **options):
        decoded.append(len(ids))
        return whole(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    ids = tokenizer.encode("Once upon a time 🦙 there was " * 200, add_special_tokens=False)
    stream = tokenizer.stream()
    for token in ids:
        stream.push([token])
    assert sum(decoded) <= 4 * len(ids)


def test_a_continuation_keeps_the_space_before_it(tmp_path):
    goldens = json.loads(asset("models/stories260K/golden.json").read_text())
    tokenizer = Tokenizer.from_folder(asset("models/stories260K/hf"))
    for golden in goldens["prompts"]:
        prompt = tokenizer.encode(golden["prompt"])
        assert prompt == golden["prompt_ids"]
        stream = tokenizer.stream(context=prompt)
        reply = stream.push(golden["greedy_ids"]) + stream.flush()
        assert golden["prompt"] + reply == golden["text"]


def test_a_character_cut_by_the_context_is_not_lost():
    tokenizer = Tokenizer.from_folder(asset("models/stories260K/hf"))
    cut, *rest = [i for i in tokenizer.encode("\U0001f600") if tokenizer.is_byte(i)]
    stream = tokenizer.stream(context=[*tokenizer.encode("Once"), cut])
    assert stream.push(rest) + stream.flush() == tokenizer.decode(rest)


def test_other_threads_run_while_a_text_is_encoded(tokenizer):
    go, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: go.wait() and ran.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no thread is made to give up the interpreter's lock
    try:
        go.set()
        for _ in range(100):
            tokenizer.encode("Once upon a time there was a text. " * 1000)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_what_cannot_fit_is_refused_at_a_bounded_cost(tokenizer, monkeypatch):
    encoded, whole = [], lmchat.text.tokenizer._encoding

    def encoding(backend, text, add_special_tokens=False):
        encoded.append(len(text))
        return whole(backend, text, add_special_tokens)

    monkeypatch.setattr(lmchat.text.tokenizer, "_encoding", encoding)
    for text in ("Once upon a time. " * 100_000, "é" * 1_000_000, "\u4e00" * 500_000):
        with pytest.raises(ContextFull):
            tokenizer.check_fits([text], 200)
        with pytest.raises(ContextFull):
            tokenizer.check_fits([text[i : i + 500] for i in range(0, len(text), 500)], 200)
    assert sum(encoded) <= 6 * 8 * 200


def test_what_fits_is_not_refused(tokenizer):
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))
    texts = [tokenizer.decode([i] * 200) for i in (longest, 300, 5)]
    texts += [" " * 200, "\n" * 200, "Once upon a time. " * 40, ""]
    for text in texts:
        if len(tokenizer.encode(text)) <= 200:
            tokenizer.check_fits([text], 200)
            tokenizer.check_fits(["", text], 200)
    tokenizer.check_fits(["\ud800"], 200)  # refused by `encode()`


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="expected Unicode"):
        tokenizer.encode("caf\udce9")
    for context, text in (("caf\udce9", "x"), ("x", "caf\udce9"), ("", "caf\udce9")):
        with pytest.raises(InvalidRequest, match="expected Unicode"):
            tokenizer.encode_after(context, text)


WORDS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "é",
    "e\u0301",
    "🦙",
    "你好。",
    "Hello",
    " world",
    "ing",
    "12",
]
WORDS += ["<", "|", "user", "s", "'s", "▁", "\x01", "a b c. " * 40]


@st.composite
def mixed(draw, tokenizer):
    """Words, random characters and spellings of added tokens."""
    added = [t.content for t in tokenizer._backend.get_added_tokens_decoder().values()]
    spelled = st.sampled_from([*list(tokenizer.special_texts)[:8], *added[:40], *WORDS])
    return "".join(draw(st.lists(spelled | st.text(max_size=6), max_size=10)))


def same_text(*texts):
    # SentencePiece tokenizers write a space as U+2581, and cannot tell the two apart.
    return len({unicodedata.normalize("NFC", text.replace("▁", " ")) for text in texts}) == 1


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_text_after_a_context_is_encoded_as_in_one_piece(tokenizer, data):
    context, text = data.draw(mixed(tokenizer)), data.draw(mixed(tokenizer))
    whole = tokenizer.encode(context + text, add_special_tokens=False)
    before = tokenizer.encode(context, add_special_tokens=False)
    after = tokenizer.encode_after(context, text)
    if whole[: len(before)] == before:
        assert after == whole[len(before) :]
    # Where an added token swallows the spaces beside it, the joined ids may still show them.
    joined = tokenizer.raw(before + after)
    assert same_text(joined, tokenizer.raw(whole)) or same_text(joined, context + text)


def added_in(tokenizer, text):
    added = tokenizer._backend.get_added_tokens_decoder().values()
    return any(token.content in text for token in added if not token.special)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_spellings_of_special_tokens_can_be_ordinary_text(tokenizer, data):
    context, text = data.draw(mixed(tokenizer)), data.draw(mixed(tokenizer))
    special = tokenizer.special_ids - {tokenizer.special_texts.get("<unk>")}
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert special.isdisjoint(ids)
    after = tokenizer.encode_after(context, text, parse_special=False)
    assert special.isdisjoint(after)
    if not added_in(tokenizer, context + text):
        assert same_text(tokenizer.decode(ids), text) or text.startswith((" ", "▁"))
        before = tokenizer.encode(context, add_special_tokens=False)
        # After a special token a word may start, as in one piece.
        if context and before and before[-1] not in tokenizer.special_ids:
            joined = tokenizer.raw(before + after)
            assert same_text(joined, tokenizer.raw(before) + text)


def test_a_special_token_written_by_the_user_round_trips(tokenizer):
    special = tokenizer.special_ids - {tokenizer.special_texts.get("<unk>")}
    for spelling, index in tokenizer.special_texts.items():
        text = f"say {spelling}{spelling} now"
        assert index in tokenizer.encode(text)
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == text
        assert special.isdisjoint(ids)
        # Split by the border, it is not put together again.
        after = tokenizer.encode_after(spelling[:-1], spelling[-1:] + "x", parse_special=False)
        assert tokenizer.raw(after) == spelling[-1:] + "x"
        own = tokenizer.encode("", add_special_tokens=True)
        assert tokenizer.encode(text, parse_special=False)[: len(own)] == own
    assert tokenizer.special_texts.keys() >= {tokenizer.raw([i]) for i in special}


def test_no_word_starts_after_a_text():
    tokenizer = loaded("mistral-v3", None)
    start = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode_after("", "the") == start
    assert tokenizer.encode_after("[/INST]", "the") == start
    for context in ("by ", "by\n", "by", "[INST]", "a" * 5000):
        ids = tokenizer.encode(context, add_special_tokens=False)
        text = tokenizer.raw(ids + tokenizer.encode_after(context, "the"))
        expected = context + (" the" if context == "[INST]" else "the")
        assert text == expected


def test_only_the_end_of_a_context_is_encoded(tokenizer, monkeypatch):
    encoded = []
    ids = lmchat.text.tokenizer._ids

    def counting(backend, text):
        encoded.append(len(text))
        return ids(backend, text)

    monkeypatch.setattr(lmchat.text.tokenizer, "_ids", counting)
    for unit in ("word ", "word", "你", "  ", "\n", "123"):
        context = unit * 40_000
        tokenizer.encode_after(context, "next")
        assert sum(encoded) < 5_000
        encoded.clear()


def test_a_tokenizer_serves_threads(tokenizer):
    spelling = next(iter(tokenizer.special_texts))
    texts = [f"{spelling} {i} {spelling}" for i in range(40)]

    def both(text):
        return [tokenizer.encode(text, parse_special=flag) for flag in (True, False)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, texts * 5)) == [both(text) for text in texts * 5]


def test_a_missing_or_broken_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match="tokenizer.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def transformers_render(source, messages, tokens, **variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=source, **tokens, **variables
    )
    return texts[0]


@functools.cache
def our_template(source):
    return ChatTemplate(source, TOKENS)


def our_render(source, messages, tokens, **variables):
    assert tokens is TOKENS
    return our_template(source).render(messages, **variables)


CHATS = [
    [{"role": "user", "content": "Hi <b>&there</b>"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  2 + 2?  "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "naïve 你好 🦙"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def outcome(render, *arguments, **named):
    """The text, or None when the template refuses the messages."""
    try:
        return render(*arguments, **named)
    except Exception:
        return None


def test_real_templates_render_as_in_transformers():
    paths = sorted(asset("chat_templates/jinja").glob("*.jinja"))
    assert len(paths) > 100
    rendered = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for messages in CHATS:
            for prompt in (True, False):
                theirs = outcome(
                    transformers_render, source, messages, TOKENS, add_generation_prompt=prompt
                )
                ours = outcome(our_render, source, messages, TOKENS, add_generation_prompt=prompt)
                assert ours == theirs, f"{path.name}, generation prompt {prompt}"
                rendered += ours is not None
    assert rendered > 3 * len(paths)


class RecordingDay(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 7, 10)


def test_recorded_cases_render_to_their_texts(monkeypatch):
    monkeypatch.setattr(lmchat.text.template, "datetime", RecordingDay)
    cases = json.loads(asset("chat_templates/cases/hf_jinja_e2e_cases.json").read_text())
    for case in cases:
        if case["hf_jinja2"] != "match":
            continue
        context = dict(case["context"])
        messages = context.pop("messages", [])
        # Where a case leaves the flag undefined, templates differ in what that means.
        prompts = [context.pop("add_generation_prompt", None)]
        prompts = [False, True] if prompts == [None] else prompts
        template = ChatTemplate(case["chat_template"])
        texts = [template.render(messages, add_generation_prompt=p, **context) for p in prompts]
        assert case["expected"] in texts, case["name"]


def test_the_generation_tag_shows_its_body_and_keeps_its_names():
    source = "{% generation %}{% set x = 1 %}hi{% endgeneration %}{{ x is defined }}"
    assert ChatTemplate(source).render([]) == transformers_render(source, [], {}) == "hiFalse"


def test_templates_cannot_reach_python():
    source = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate("{{ messages.append(1) }}").render([])


def test_a_template_refuses_in_its_own_words():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(source).render([])
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% if %}")


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_where_a_folder_keeps_its_template(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    write(
        tmp_path,
        "tokenizer_config.json",
        {
            "bos_token": {"content": "<s>"},
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "{{ bos_token }}config"},
            ],
        },
    )
    assert ChatTemplate.from_folder(tmp_path).render([]) == "<s>config"
    write(tmp_path, "chat_template.json", {"chat_template": "{{ bos_token }}json"})
    assert ChatTemplate.from_folder(tmp_path).render([]) == "<s>json"
    write(tmp_path, "chat_template.jinja", "{{ bos_token }}jinja")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "<s>jinja"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 3}, "expected text"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, "none is 'default'"),
        ("[]", "expected an object"),
        ("{", "JSON"),
    ],
)
def test_a_broken_template_entry_is_a_model_error(tmp_path, config, message):
    write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(ModelError, match=message):
        ChatTemplate.from_folder(tmp_path)


def test_the_tojson_filter_and_the_clock():
    value = {"b": "é<>", "a": string.digits}
    source = "{{ tools | tojson(indent=1) }} {{ strftime_now('%Y') | length }}"
    expected = json.dumps(value, ensure_ascii=False, indent=1) + " 4"
    assert ChatTemplate(source).render([], tools=value) == expected
    assert lmchat.text.template.special_tokens("nowhere") == {}


def test_an_end_that_is_no_special_token_by_itself_is_special(tmp_path):
    folder = tokenizer_folder("phi-3-mini", tmp_path / "phi")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == 2
    typed = tokenizer.encode("a</s>b", add_special_tokens=False, parse_special=False)
    assert 2 not in typed
    assert tokenizer.decode(typed) == "a</s>b"
    assert tokenizer.decode([*tokenizer.encode("a", add_special_tokens=False), 2]) == "a"
    stream = tokenizer.stream()
    assert stream.push([*tokenizer.encode("a", add_special_tokens=False), 2]) == "a"
