"""Replies as they arrive, against a plain reading of the whole text."""

import itertools

import pytest
import tokenizers
from assets import tokenizer_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from lmchat.errors import InvalidRequest
from lmchat.text.reasoning import ReasoningFormat
from lmchat.text.replies.reply_parser import ReplyParser
from lmchat.text.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|part|>", "<|body|>", "<|stop|>"]
SIGNS = {spelling: chr(0xF0000 + i) for i, spelling in enumerate(SPECIAL)}
THINK = ReasoningFormat("<think>", "</think>", ("<answer>",))
HEADED = ReasoningFormat(
    "<|part|>thought<|body|>", "<|end|>", ("<|part|>final<|body|>", "<|end|><|part|>final<|body|>")
)


def trained():
    """A byte-level tokenizer of a few hundred tokens with four special ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["a thought is final <think> </think> 你好 aab abc"] * 9, trainer)
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["built", "qwen2.5", "phi-3-mini", "stories260K"])
def tokenizer(request, tmp_path_factory):
    if request.param == "built":
        return trained()
    return Tokenizer.from_folder(
        tokenizer_folder(request.param, tmp_path_factory.mktemp("tokenizer"))
    )


@pytest.fixture(scope="module")
def built():
    return trained()


# --- the reference: everything at once, one character after the other --------------------------


def first_end(text, start, patterns, ends_after=0):
    """(begin, end) of the pattern that is complete first, the longest of those; None."""
    for end in range(max(start, ends_after) + 1, len(text) + 1):
        sizes = [len(p) for p in patterns if p and text[start:end].endswith(p)]
        if sizes:
            return end - max(sizes), end
    return None


def ranges(raw, form, in_reasoning):
    """[(kind, begin, end)] of `raw` between the markers."""
    kind, at, found = "reasoning" if in_reasoning else "text", 0, []
    while form is not None:
        patterns = [form.open, *form.skip] if kind == "text" else [form.close]
        hit = first_end(raw, at, patterns)
        if hit is None:
            break
        found.append((kind, at, hit[0]))
        if kind == "reasoning":
            kind = "text"
        elif raw[hit[0] : hit[1]] == form.open:
            kind = "reasoning"
        at = hit[1]
    return [*found, (kind, at, len(raw))]


def split_up(raw, form=None, in_reasoning=False):
    """{kind: [(character, its place)]} without the format's newlines and without signs."""
    parts = {"text": [], "reasoning": []}
    spans = ranges(raw, form, in_reasoning)
    for number, (kind, begin, end) in enumerate(spans):
        found = [(raw[i], i) for i in range(begin, end) if raw[i] not in SIGNS.values()]
        empty = all(char == "\n" for char, _ in found)
        if number > 0 or in_reasoning or (empty and len(spans) > 1):
            while found and found[0][0] == "\n":
                del found[0]
        if kind == "reasoning":
            while found and found[-1][0] == "\n":
                del found[-1]
            if found and parts[kind]:
                parts[kind].append(("\n", found[0][1]))
        parts[kind] += found
    return parts


def reference(raw, form=None, in_reasoning=False, stops=(), old=0):
    """(text, reasoning, stopped); a stop string that ends in the first `old` characters does not
    count."""
    parts = split_up(raw, form, in_reasoning)
    text = "".join(char for char, _ in parts["text"])
    new = sum(place < old for _, place in parts["text"])
    hit = first_end(text, 0, stops, new)
    if hit is None:
        return text, "".join(char for char, _ in parts["reasoning"]), False
    place = parts["text"][hit[1] - 1][1]
    reasoning = "".join(char for char, at in parts["reasoning"] if at < place)
    return text[: hit[0]], reasoning, True


def run(parser, ids, data=None):
    """All deltas of `ids` pushed in random pieces, joined by kind."""
    joined = {"text": "", "reasoning": ""}
    rest = list(ids)
    while rest:
        count = data.draw(st.integers(1, 4)) if data else 1
        for kind, text in parser.push(rest[:count]):
            assert text
            joined[kind] += text
        rest = rest[count:]
    for kind, text in parser.finish():
        joined[kind] += text
    return joined


def check(parser, ids, expected, data=None):
    joined = run(parser, ids, data)
    assert (parser.text, parser.reasoning, parser.stopped) == expected
    assert joined == {"text": expected[0], "reasoning": expected[1]}


# --- any tokens --------------------------------------------------------------------------------

WORDS = [
    "a", "b", "ab", "aab", " ", "\n", "\n\n", "🦙", "你好", "é", "\ufffd",
    "<think>", "</think>", "<answer>", "<th", "ink>", "</", "<", "thought", " a",
]  # fmt: skip
STOPS = st.lists(st.text("ab\n<🦙 ", min_size=1, max_size=4), max_size=4)


def draw_ids(data, tokenizer, words=WORDS, bytes_too=True):
    """Tokens of words, single bytes among them, which may be broken UTF-8."""
    piece = st.sampled_from(words).map(lambda w: tokenizer.encode(w, add_special_tokens=False))
    if bytes_too:
        piece |= st.integers(0, min(tokenizer.vocab_size, 300) - 1).map(lambda i: [i])
    return [i for ids in data.draw(st.lists(piece, max_size=20)) for i in ids]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_read_as_the_whole_text(tokenizer, data):
    ids = draw_ids(data, tokenizer)
    form = data.draw(st.sampled_from([None, THINK]))
    in_reasoning = form is not None and data.draw(st.booleans())
    stops = data.draw(STOPS)
    expected = reference(tokenizer.decode(ids), form, in_reasoning, stops)
    parser = ReplyParser(tokenizer, reasoning=form, in_reasoning=in_reasoning, stop_strings=stops)
    check(parser, ids, expected, data)
    assert not any(stop in parser.text for stop in stops)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_tokens_kept_are_the_fewest_that_cover_the_text(tokenizer, data):
    ids = draw_ids(data, tokenizer)
    form = data.draw(st.sampled_from([None, THINK]))
    stops = data.draw(STOPS)
    parser = ReplyParser(tokenizer, reasoning=form, stop_strings=stops)
    run(parser, ids)
    if not parser.stopped:
        assert parser.stored_tokens == len(ids)
        return
    assert parser.stored_tokens < len(ids) or stops
    covering = [
        n
        for n in range(len(ids) + 1)
        for text, reasoning, _ in [reference(tokenizer.decode(ids[:n]), form)]
        if text.startswith(parser.text) and reasoning.startswith(parser.reasoning)
    ]
    assert parser.stored_tokens in covering
    if form is None and "\ufffd" not in tokenizer.decode(ids):  # half a character covers as U+FFFD
        assert parser.stored_tokens == covering[0]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_continued_reply_says_only_what_is_new(tokenizer, data):
    ids = draw_ids(data, tokenizer, bytes_too=False)
    cut = data.draw(st.integers(0, len(ids)))
    form = data.draw(st.sampled_from([None, THINK]))
    stops = data.draw(STOPS)
    before = ReplyParser(tokenizer, reasoning=form)
    run(before, ids[:cut])
    parser = ReplyParser(tokenizer, reasoning=form, stop_strings=stops, resume=ids[:cut])
    joined = run(parser, ids[cut:], data)
    whole = tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids[:cut]):
        old = len(tokenizer.decode(ids[:cut]))
        expected = reference(whole, form, False, stops, old)
        assert (parser.text, parser.reasoning, parser.stopped) == expected
        for kind, shown in (("text", before.text), ("reasoning", before.reasoning)):
            now = getattr(parser, kind)
            came = [char for char, place in split_up(whole, form)[kind] if place < old]
            # Else half a marker or stop string had been shown as text.
            if now.startswith(shown) and "".join(came).startswith(shown):
                assert shown + joined[kind] == now
    if not parser.stopped:
        assert parser.stored_tokens == len(ids)
        fresh = ReplyParser(tokenizer, reasoning=form)
        run(fresh, ids)
        assert parser.reasoning_tokens == fresh.reasoning_tokens


def signed(text):
    """The text with one character for each special token."""
    for spelling, sign in SIGNS.items():
        text = text.replace(spelling, sign)
    return text


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_special_tokens_make_markers_and_are_not_shown(built, data):
    ids, raw = [], ""
    words = ["a", "\n", "thought", "final", "🦙", "<|end|>", "<|part|>", HEADED.open]
    for _ in range(data.draw(st.integers(0, 14))):
        if data.draw(st.booleans()):  # ordinary text, even where it spells a special token
            word = data.draw(st.sampled_from(words))
            ids += built.encode(word, add_special_tokens=False, parse_special=False)
            raw += word
        else:
            marker = data.draw(st.sampled_from([*SPECIAL, HEADED.open, *HEADED.skip]))
            ids += built.encode(marker, add_special_tokens=False)
            raw += signed(marker)
    stops = data.draw(st.lists(st.text("a\ntf", min_size=1, max_size=3), max_size=2))
    form = ReasoningFormat(
        signed(HEADED.open), signed(HEADED.close), tuple(map(signed, HEADED.skip))
    )
    expected = reference(raw, form, False, stops)
    check(ReplyParser(built, reasoning=HEADED, stop_strings=stops), ids, expected, data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "<answer>"]), max_size=12))
def test_reasoning_tokens_go_from_marker_to_marker(built, words):
    ids, expected, thinking = [], 0, False
    for word in words:
        new = built.encode(word, add_special_tokens=False)
        ids += new
        if thinking:
            expected += len(new)
            thinking = word != "</think>"
        elif word == "<think>":
            expected, thinking = expected + 1, True
    parser = ReplyParser(built, reasoning=THINK)
    run(parser, ids)
    assert parser.reasoning_tokens == expected


# --- single cases ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["ab", "b"], "xab", "x"),
        (["b", "ab"], "xab", "x"),
        (["aab"], "aaab", "a"),
        (["ab", "abc"], "xabc", "x"),
        (["abcd", "bc"], "abcd", "a"),
        (["abcd", "bx"], "abcabx", "abca"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["zz"], "az", "az"),
        (["abab"], "ababab", ""),
    ],
)
def test_which_stop_string_ends_the_text(built, stops, text, shown):
    parser = ReplyParser(built, stop_strings=stops)
    ids = built.encode(text)
    check(parser, ids, (shown, "", shown != text))
    if parser.stopped:
        assert parser.push(ids) == parser.finish() == []
        assert parser.text == shown


def test_a_stop_string_that_begins_inside_a_token_keeps_it(built):
    ids = [*built.encode("aab"), *built.encode(" thought")]
    assert len(ids) == 2
    for stop, text, count in [("b t", "aa", 1), ("ab", "a", 1), ("aab", "", 0), (" t", "aab", 1)]:
        parser = ReplyParser(built, stop_strings=[stop])
        parser.push(ids)
        assert (parser.text, parser.stored_tokens) == (text, count)


def test_tokens_kept_of_broken_characters(built):
    ids = [*built.encode("é")[:1] * 2, *built.encode("<|part|>b")]
    parser = ReplyParser(built, reasoning=HEADED, stop_strings=["b"])
    parser.push(ids)
    assert (parser.text, parser.stored_tokens) == ("\ufffd\ufffd", 2)


def test_tokens_kept_of_a_broken_run_of_bytes(tmp_path):
    fallback = Tokenizer.from_folder(tokenizer_folder("stories260K", tmp_path))
    byte = next(i for i in fallback.encode("🦙") if fallback.is_byte(i))
    ids = [byte, byte, byte, *fallback.encode("b", add_special_tokens=False)]
    parser = ReplyParser(fallback, stop_strings=["\ufffdb", "\ufffd b"])
    parser.push(ids)
    assert (parser.text, parser.stored_tokens) == ("\ufffd\ufffd", 2)


def test_an_empty_text_keeps_its_reasoning(built):
    thought = built.encode("<think>\nhm\n</think>")
    parser = ReplyParser(built, reasoning=THINK, stop_strings=["STOP"])
    parser.push([*thought, *built.encode("\n\nSTOP and more")])
    assert (parser.text, parser.reasoning, parser.stopped) == ("", "hm", True)
    assert parser.stored_tokens == len(thought)


def test_stop_strings_do_not_stop_the_reasoning(built):
    parser = ReplyParser(built, reasoning=THINK, in_reasoning=True, stop_strings=["b"])
    check(parser, built.encode("a b c</think>abc"), ("a", "a b c", True))


@pytest.mark.parametrize(
    ("raw", "text", "reasoning"),
    [
        ("<think>\nhm\n</think>\n\nHi\n", "Hi\n", "hm"),
        ("\n<think>a\n\nb</think>\n<answer>Hi", "Hi", "a\n\nb"),
        ("Well\n<think>a</think>\nso<think>b\n</think>.", "Well\nso.", "a\nb"),
        ("<think>never\n closed\n", "", "never\n closed"),
        ("\n\nplain </think> <thin", "\n\nplain </think> <thin", ""),
        ("<think></think>", "", ""),
        ("<<think>a<</think>b", "<b", "a<"),
    ],
)
def test_blocks_and_their_newlines(built, raw, text, reasoning):
    check(ReplyParser(built, reasoning=THINK), built.encode(raw), (text, reasoning, False))


def test_a_prompt_that_opens_the_block(built):
    parser = ReplyParser(built, reasoning=THINK, in_reasoning=True)
    check(parser, built.encode("\nhm\n</think>\n\nHi"), ("Hi", "hm", False))
    with pytest.raises(InvalidRequest, match="in_reasoning"):
        ReplyParser(built, in_reasoning=True)


def test_ordinary_text_that_spells_special_tokens_is_no_marker(built):
    parser = ReplyParser(built, reasoning=HEADED)
    ids = built.encode(HEADED.open + "a", parse_special=False)
    check(parser, ids, (HEADED.open + "a", "", False))
    parser = ReplyParser(built, reasoning=HEADED)
    ids = built.encode(HEADED.open + "a<|stop|><|end|><|part|>final<|body|>b<|part|>c<|stop|>")
    check(parser, ids, ("bc", "a", False))


def test_another_special_token_breaks_a_marker(built):
    ids = built.encode("<|part|><|stop|>thought<|body|>a")
    check(ReplyParser(built, reasoning=HEADED), ids, ("thoughta", "", False))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_special_tokens_are_spelled_but_for_hidden_ones(built, data):
    words = [*SPECIAL, "a", "ab", "\n", "🦙", "你好", "<|end|"]
    ids = draw_ids(data, built, words, bytes_too=False)
    hidden = {built.special_texts["<|stop|>"]}
    stops = data.draw(st.lists(st.sampled_from(["a<|end|>", "|><", "t|>a", "b"]), max_size=2))
    expected = reference(built.raw([i for i in ids if i not in hidden]), stops=stops)
    parser = ReplyParser(built, stop_strings=stops, hidden=hidden)
    check(parser, ids, expected, data)
    if parser.stopped:
        kept = [i for i in ids[: parser.stored_tokens] if i not in hidden]
        assert built.raw(kept).startswith(parser.text)


# --- stop strings that spell special tokens ------------------------------------------------------


def with_signs(text):
    for spelling, sign in SIGNS.items():
        text = text.replace(spelling, sign)
    return text


def hidden_reference(tokenizer, ids, stops):
    """(text, stopped): a stop string ends in the visible text, or in the text with the special
    tokens that it spells."""
    names = {i: text for text, i in tokenizer.special_texts.items()}
    signed = [stop for stop in map(with_signs, stops) if set(stop) & set(SIGNS.values())]
    relevant = {i: SIGNS[text] for i, text in names.items() if SIGNS[text] in "".join(signed)}
    counted = [i for i in ids if i in relevant or i not in names]
    raw = "".join(
        tokenizer.decode(list(run_)) if sign is None else "".join(sign for _ in run_)
        for sign, run_ in itertools.groupby(counted, relevant.get)
    )

    def visible(text):
        return "".join(char for char in text if char not in SIGNS.values())

    for end in range(1, len(raw) + 1):
        begins = [end - len(stop) for stop in signed if raw[:end].endswith(stop)]
        if raw[end - 1] not in SIGNS.values():
            for stop in stops:
                if visible(raw[:end]).endswith(stop):
                    begins.append(max(i for i in range(end) if visible(raw[i:end]) == stop))
        if begins:
            return visible(raw[: min(begins)]), True
    return visible(raw), False


HIDDEN_STOPS = ["<|stop|>", "a<|stop|>", "<|stop|>\n", "b<|end|><|part|>", "<|end|>a<|end|>", "ab",
                "<|stop", "<|body|>", ">", "🦙", "aa"]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_stop_string_ends_a_reply_at_special_tokens_that_it_spells(built, data):
    words = [*SPECIAL, "a", "b", "ab", "\n", "🦙", "<|sto", "p|>", "<|stop|>"]
    ids = draw_ids(data, built, words, bytes_too=False)
    literal = built.encode("<|stop|>", parse_special=False)
    at = data.draw(st.integers(0, len(ids)))
    ids[at:at] = data.draw(st.sampled_from([[], literal]))
    stops = data.draw(st.lists(st.sampled_from(HIDDEN_STOPS), min_size=1, max_size=3))
    text, stopped = hidden_reference(built, ids, stops)
    parser = ReplyParser(built, stop_strings=stops)
    check(parser, ids, (text, "", stopped), data)
    if stopped:
        assert built.decode(ids[: parser.stored_tokens]).startswith(text)
        fewer = built.decode(ids[: max(parser.stored_tokens - 1, 0)])
        assert not parser.stored_tokens or "\ufffd" in fewer or not fewer.startswith(text)


@pytest.mark.parametrize("form", [None, THINK, HEADED])
@pytest.mark.parametrize("name", ["built", "phi-3-mini"])
def test_a_special_token_in_a_stop_string_is_no_marker_and_none_in_reasoning(name, form, tmp_path):
    if name == "built":
        tokenizer, stop = trained(), "<|stop|>"
    else:
        tokenizer, stop = Tokenizer.from_folder(tokenizer_folder(name, tmp_path)), "<|system|>"
    if form is HEADED and name != "built":
        return
    stops = [f"a🦙{stop}", f"c{stop}c"]
    thought = f"{form.open}b{stop}c{form.close}" if form else ""
    parser = ReplyParser(tokenizer, reasoning=form, stop_strings=stops)
    ids = tokenizer.encode(f"{thought}ab🦙{stop}ba🦙{stop}a", add_special_tokens=False)
    joined = run(parser, ids)
    assert parser.stopped
    assert joined["text"].replace(" ", "") == "ab🦙b"
    assert joined["reasoning"].replace(" ", "") == ("bc" if form else "")
    kept = tokenizer.decode(ids[: parser.stored_tokens]).replace(" ", "")
    assert kept.removesuffix("a").endswith("ab🦙b")  # "ba" may be one token


def test_a_marker_in_a_stop_string_still_marks(built):
    parser = ReplyParser(built, reasoning=HEADED, stop_strings=["<|end|>", "\ud800"])
    check(parser, built.encode(HEADED.open + "a<|end|>b<|end|>c"), ("b", "a", True))
    hidden = [built.special_texts["<|stop|>"]]
    parser = ReplyParser(built, stop_strings=["a<|end|><|stop|>b"], hidden=hidden)
    check(parser, built.encode("xa<|end|><|stop|>bc"), ("x", "", True))


def test_a_continued_reply_ends_at_the_next_hidden_token(built):
    old, new = built.encode("a<|stop|>b"), built.encode("c<|stop|>d")
    parser = ReplyParser(built, stop_strings=["<|stop|>"], resume=old)
    assert run(parser, new) == {"text": "c", "reasoning": ""}
    assert (parser.text, parser.stopped, parser.stored_tokens) == ("abc", True, len(old) + 1)


def test_spelled_special_tokens_are_no_markers_and_markers_are_not_spelled(built):
    hidden = [built.special_texts["<|stop|>"]]

    def shown(text):
        parser = ReplyParser(built, reasoning=HEADED, hidden=hidden)
        joined = run(parser, built.encode(text))
        assert joined == {"text": parser.text, "reasoning": parser.reasoning}
        return parser.text, parser.reasoning

    assert shown(HEADED.open + "a<|end|>b") == ("b", "a")
    assert shown("<|body|>a<|stop|>") == ("<|body|>a", "")
    assert shown("<|part|>thought<|stop|><|body|>b") == ("<|part|>thought<|body|>b", "")
    assert shown("<|part|><|part|>final<|body|>b<|part|>") == ("<|part|>b<|part|>", "")
    assert shown(HEADED.open + "a<|body|>b<|end|>c") == ("c", "a<|body|>b")


def test_special_tokens_between_runs_of_bytes(tmp_path):
    tokenizer = Tokenizer.from_folder(tokenizer_folder("phi-3-mini", tmp_path))
    form = ReasoningFormat("<|assistant|>", "<|end|>")
    ids = tokenizer.encode("🦙<|assistant|>🦙🦙<|end|>🦙 a🦙", add_special_tokens=False)
    assert sum(map(tokenizer.is_byte, ids)) == 5 * 4
    check(ReplyParser(tokenizer, reasoning=form), ids, ("🦙 🦙 a🦙", " 🦙🦙", False))


def test_nothing_is_shown_before_it_is_sure(built):
    parser = ReplyParser(built, reasoning=THINK, stop_strings=["a llama"])
    shown = [parser.push([i]) for i in built.encode("so a lla")]
    assert "".join(text for deltas in shown for _, text in deltas) == "so "
    assert parser.finish() == [("text", "a lla")]
    assert parser.finish() == []


def test_a_whole_character_of_bytes_is_not_reported_twice(tokenizer):
    old, new = (tokenizer.encode(text, add_special_tokens=False) for text in ("a🦙", "🦙"))
    byte_runs = [i for i in new if i in old]
    parser = ReplyParser(tokenizer, resume=old)
    joined = run(parser, byte_runs)
    assert joined["text"] == "🦙"
    assert parser.text.endswith("a🦙🦙")


def test_a_completion_keeps_the_space_before_it(tokenizer):
    context = tokenizer.encode("Once upon")
    word = tokenizer.encode("Once upon a", add_special_tokens=True)[len(context) :]
    parser = ReplyParser(tokenizer, context=context)
    assert run(parser, word)["text"] == " a"


def test_buffers_stay_small(built):
    stops = ["aaaaab", "\n\n\n", "<|", "User:", "thought b", "final.", "ab<", "</x>"]
    parser = ReplyParser(built, reasoning=THINK, stop_strings=stops)
    ids = built.encode("a thought is final, aaaa thought <th </answer>\n\n a" * 410)
    assert len(ids) > 10_000
    parser.push(ids)
    assert not parser.stopped
    held = len(parser._tail) + len(parser._ends) + len(parser._marker) + len(parser._pieces)
    assert held < 40
