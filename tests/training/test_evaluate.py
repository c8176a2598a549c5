"""Counts of `training.evaluate`: values in replies, loops, and the models it compares with."""

import json
import lzma
import random
import string
import subprocess
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

import training.tokenizer
from training import corpora, evaluate
from training.evaluation import bits, trials
from training.evaluation.matching import contains, is_text, loops, remembers
from training.evaluation.ngram import NGram
from training.evaluation.results import Opening, OpeningsResult, RecallResult, Talk
from training.model import Memo, Shape, save

# --- matching --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Your dog is called Rex.", "Rex"),
        ("rex!", "Rex"),
        ("It's Rex's bowl.", "Rex"),
        ("You live in  New\nYork.", "new york"),
        ("The code is B-12.", "B-12"),
        ("It was 5.", "5"),
        ("5, you said.", "5"),
        ("You paid $45.", "$45"),
        ("At 5:30.", "5:30"),
        ("It is -5 degrees.", "-5 degrees"),
        ("The 2nd of May.", "the 2nd of May"),
        ("(half past six)", "half past six"),
        ("Your gift is a vase", "vase"),
        ("It's ÉMILE", "Émile"),
        ("It is in your desk.", "in my desk"),
        ("It is in my desk.", "in my desk"),
        ("You may say May.", "May"),
    ],
)
def test_a_reply_contains_a_value_as_separate_words(reply, value):
    assert contains(reply, value)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Your dog is called Rexy.", "Rex"),
        ("Trex", "Rex"),
        ("15", "5"),
        ("50", "5"),
        ("It was 5.20 euros.", "5"),
        ("It was 2.5.", "5"),
        ("At 5:30.", "5"),
        ("At 5:30.", "30"),
        ("1,200", "200"),
        ("1,200", "1"),
        ("The code is B-12.", "12"),
        ("The code is 12-B.", "12"),
        ("It is -5 degrees.", "5 degrees"),
        ("A12B", "12"),
        ("the 22nd of May", "the 2nd of May"),
        ("It is in your desktop.", "in my desk"),
        ("", "Rex"),
        ("You may ask again.", "May"),
    ],
)
def test_a_part_of_a_word_or_number_does_not_count(reply, value):
    assert not contains(reply, value)


def test_an_answer_with_a_replaced_value_fails():
    assert remembers("It is Rome.", "Rome", ["Paris"])
    assert not remembers("It is Rome, not Paris.", "Rome", ["Paris"])
    assert not remembers("It is Paris.", "Rome", ["Paris"])
    assert remembers("It is Rome, for Parisians.", "Rome", ["Paris"])
    assert not remembers("Oslo. Rome.", "Rome", ["Paris", "Oslo"])


@pytest.mark.parametrize(
    "text",
    [
        "I like the sea and I like the sea and I like the sea.",
        "We went home early. We went home early.",
        "We went home early! we went home early",
        "So we met. I see you. I see you",
        "no no no no no no",
        "hahahahahahahahaha",
        "2" + "0" * 40,
        "one\ntwo\none\ntwo\n" * 4,
    ],
)
def test_a_repeated_text_counts_as_a_loop(text):
    assert loops(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes. Yes.",
        "I like the sea and I like the sea.",
        "We went home early. It was cold. We went home early.",
        "Ha ha ha!",
        "The number of apples is 2000000.",
        "code:" + " " * 20 + "indented" + "\n" * 12 + "end",
        "...",
    ],
)
def test_ordinary_text_does_not_loop(text):
    assert not loops(text)


@pytest.mark.parametrize("text", ["Hi.", "Grüße\n\tan alle", "a 🙂 b", "x\u200by"])
def test_visible_characters_are_text(text):
    assert is_text(text)


@pytest.mark.parametrize("text", ["", "  \n", "a\ufffd", "a\x00b", "a\x1b[0m", "a\x7f", "\x85."])
def test_invalid_characters_are_not_text(text):
    assert not is_text(text)


# --- n-grams ---------------------------------------------------------------------------------

SYMBOLS, BEGIN = 6, 5


def sequences(count, seed=1):
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        state, sequence = 0, []
        for _ in range(rng.randrange(1, 12)):
            state = (state + rng.choice((0, 1, 1, 2, 4))) % BEGIN
            sequence.append(state)
        found.append(sequence)
    return found


class Naive:
    """Interpolated modified Kneser-Ney by its textbook formulas, one n-gram at a time."""

    def __init__(self, training, order):
        self.order = order
        whole = Counter()
        for sequence in training:
            padded = [BEGIN] * (order - 1) + sequence
            for at in range(order - 1, len(padded)):
                whole[tuple(padded[at - order + 1 : at + 1])] += 1
        self.counts = {order: dict(whole)}
        for length in range(order - 1, 0, -1):
            before = defaultdict(set)
            for gram in self.counts[length + 1]:
                before[gram[1:]].add(gram[0])
            self.counts[length] = {gram: len(found) for gram, found in before.items()}

    def discount(self, length, count):
        n = [sum(c == k for c in self.counts[length].values()) for k in range(5)]
        if 0 in n[1:4]:
            return 0.5
        y = n[1] / (n[1] + 2 * n[2])
        k = min(count, 3)
        return min(max(k - (k + 1) * y * n[k + 1] / n[k], 0), k)

    def probability(self, context, symbol):
        length = len(context) + 1
        shorter = self.probability(context[1:], symbol) if context else 1 / (SYMBOLS - 1)
        followers = {g: c for g, c in self.counts[length].items() if g[:-1] == context}
        if not followers:
            return shorter
        total = sum(followers.values())
        count = followers.get((*context, symbol), 0)
        seen = count - self.discount(length, count) if count else 0
        left = sum(self.discount(length, c) for c in followers.values())
        return (seen + left * shorter) / total


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [2, 300])
def test_an_ngram_model_equals_the_textbook_formulas(order, count):
    training = sequences(count)
    model = NGram(training, symbols=SYMBOLS, begin=BEGIN, order=order)
    naive = Naive(training, order)
    for sequence in sequences(20, seed=2):
        padded = [BEGIN] * (order - 1) + sequence
        expected = [
            naive.probability(tuple(padded[at : at + order - 1]), symbol)
            for at, symbol in enumerate(sequence)
        ]
        np.testing.assert_allclose(model.probabilities(sequence), expected, rtol=1e-12)
        assert model.bits(sequence) == pytest.approx(-np.log2(expected).sum())


def test_ngram_probabilities_sum_to_one():
    model = NGram(sequences(100), symbols=SYMBOLS, begin=BEGIN, order=3)
    for context in ([], [0], [4, 4], [0, 1, 2, 3], [3, 0, 0, 0]):
        last = [model.probabilities([*context, symbol])[-1] for symbol in range(SYMBOLS - 1)]
        assert min(last) > 0
        assert sum(last) == pytest.approx(1, abs=1e-12)


def test_an_ngram_model_predicts_its_training_text():
    training = [[0, 1, 2, 3, 4] * 5] * 20
    model = NGram(training, symbols=SYMBOLS, begin=BEGIN, order=3)
    assert model.probabilities([0, 1, 2, 3])[-1] > 0.9
    assert model.bits([0, 1, 2, 3, 4]) < model.bits([4, 3, 2, 1, 0])


def test_an_ngram_model_refuses_too_many_symbols_or_no_text():
    with pytest.raises(ValueError, match="63 bits"):
        NGram([[1]], symbols=4097, begin=0, order=5)
    with pytest.raises(ValueError, match="no symbols"):
        NGram([], symbols=4, begin=0, order=2)


# --- xz, bytes -------------------------------------------------------------------------------


def test_xz_size_is_that_of_the_command():
    data = b"".join(b"%d bottles of beer on the wall\n" % n for n in range(2000))
    try:
        run = subprocess.run(["xz", "-9e", "-c"], input=data, capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("needs xz")
    assert abs(bits.xz_size(data) - len(run.stdout)) <= 16  # versions differ in a header field


def test_xz_is_cheaper_after_similar_text():
    rng = random.Random(1)

    def dialogue():
        text = " ".join(str(rng.randrange(10**6)) for _ in range(300))
        return [{"role": "user", "content": text}]

    known, other = [dialogue() for _ in range(5)], [dialogue() for _ in range(5)]
    again, new = bits.measure_xz(known, known[:2]), bits.measure_xz(known, other[:2])
    assert again.alone == pytest.approx(new.alone, rel=0.1)
    assert again.after_training < 0.1 * again.alone
    assert new.after_training > 0.8 * new.alone


def test_bytes_are_those_of_the_texts():
    talk = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ok\n"}]
    assert bits.text_bytes([talk, talk]) == 10


# --- trials ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("corrected", [False, True])
def test_wordings_make_trials(name, corrected):
    wordings = trials.read_wordings(name)
    made = trials.of_wordings(wordings, 120, 7, (), corrected=corrected)
    assert made == trials.of_wordings(wordings, 120, 7, (), corrected=corrected)
    assert Counter(trial.distance for trial in made) == dict.fromkeys(range(1, 7), 20)
    assert {trial.kind for trial in made} == {fact.kind for fact in wordings.facts}
    asks = {fact.kind: fact.ask for fact in wordings.facts}
    for trial in made:
        assert not any("{" in text for text in trial.users)
        assert trial.users[-1] in asks[trial.kind]
        assert trial.value in trial.users[-1 - trial.distance]
        assert not any(contains(text, trial.value) for text in trial.users[-trial.distance :])
        assert len(trial.stale) == corrected
        assert not any(contains(trial.value, old) for old in trial.stale)


def test_grammar_makes_trials():
    made = trials.of_grammar(60, 7, frozenset({"red", "blue"}))
    assert made == trials.of_grammar(60, 7, frozenset({"red", "blue"}))
    assert Counter(trial.distance for trial in made) == dict.fromkeys(range(1, 7), 10)
    assert all(trial.value in trial.users[-1 - trial.distance] for trial in made)
    for trial in trials.of_grammar(200, 7, (), corrected=True):
        assert trial.stale
        assert not any(contains(trial.value, old) for old in trial.stale)


def test_novelty_of_a_value_follows_from_its_held_out_words():
    held_out, trained = (
        next(word for word in map(str, range(100, 200)) if trials.is_held_out(word) == kept)
        for kept in (True, False)
    )
    name = next(
        v for v in (f"Zorb{a}x" for a in string.ascii_lowercase) if trials.is_held_out(v.casefold())
    )
    assert trials.novelty(held_out, ()) == "common"
    assert trials.novelty("Xiomara", ()) == "new"
    assert trials.novelty(f"{trained} and Xiomara", ()) == "new"
    assert trials.novelty(trained, ()) == "closed"
    assert trials.novelty("Tuesday", ()) == "closed"
    assert trials.novelty(name, ()) == "new"
    assert trials.novelty(name, {name.casefold()}) == "common"


# --- results ---------------------------------------------------------------------------------


def talk(answer, *, value="Rome", stale=(), novelty="new", distance=1, users=("a", "b")):
    trial = trials.Trial(users, "city", value, stale, distance, novelty)
    return Talk(trial, ("fine", answer))


def test_recall_counts_right_missing_and_stale_answers():
    result = RecallResult(
        "some",
        0.5,
        [
            talk("Rome."),
            talk("Oslo.", distance=2),
            talk("Rome, not Oslo.", stale=("Oslo",)),
            talk("Friday", value="Friday", novelty="closed"),
            talk("Rome", users=("a", "b", "c")),  # no room for the last one
        ],
    )
    found = result.as_json()
    assert (found["passed"], found["total"], found["missing"], found["stale"]) == (2, 5, 2, 1)
    assert (found["without_closed"]["passed"], found["without_closed"]["total"]) == (1, 4)
    assert found["distance"]["2"]["rate"] == 0
    assert found["distance"]["1"]["total"] == 4
    assert len(result.failures) == 3
    assert "expected 'Rome' after 1, not 'Oslo'" in result.failures[1].transcript()
    assert "worst:    city 2/5" in "\n".join(result.lines())
    json.dumps(found)


def test_a_secret_set_shows_no_kinds_nor_transcripts():
    result = RecallResult("some", 0.5, [talk("Oslo.")], secret=True)
    assert result.failures == []
    assert "city" not in "\n".join(result.lines()) + json.dumps(result.as_json())


def test_openings_count_loops_cuts_and_empty_replies():
    good, endless = Opening("hi", "Hello.", True), Opening("hi", "Hello.", False)
    circle, empty = Opening("hi", "I see you. I see you.", True), Opening("hi", "", True)
    result = OpeningsResult("some", [good, endless, circle, empty])
    assert {n: s.passed for n, s in result.shares.items()} == {
        "ended": 3,
        "no loop": 3,
        "valid text": 3,
        "all": 1,
    }
    assert result.failures == [endless, circle, empty]


def test_parts_are_ordered_and_unknown_ones_refused():
    assert evaluate.parts_of("bits, recall") == ["recall", "bits"]
    with pytest.raises(ValueError, match="'speed'"):
        evaluate.parts_of("recall,speed")


# --- the command -----------------------------------------------------------------------------


def write_dialogues(folder):
    folder.mkdir()
    for corpus in corpora.CORPORA:
        rng = random.Random(corpus.name)
        with lzma.open(folder / corpus.file, "wt", encoding="utf-8") as lines:
            for number in range(150):
                messages = [
                    {"role": role, "content": " ".join(rng.choices(("tea", "sun", "is"), k=9))}
                    for role in ("user", "assistant")
                ]
                row = {"id": f"{corpus.name}-{number}", "messages": messages}
                print(json.dumps(row), file=lines)
    return folder


def write_model(folder, dialogues, context):
    texts = [m["content"] for chat in corpora.read_all(dialogues) for m in chat]
    words = training.tokenizer.train(texts, vocabulary=280)
    shape = Shape(words.get_vocab_size(), 32, 1, 2, 1, 16, 48, context)
    torch.manual_seed(0)
    end = words.token_to_id(training.tokenizer.END)
    save(dict(Memo(shape).named_parameters()), shape, folder, bos_token_id=0, eos_token_id=end)
    training.tokenizer.save(words, folder, context)
    return folder


def test_the_command_writes_equal_figures_for_equal_arguments(tmp_path, capsys):
    dialogues = write_dialogues(tmp_path / "dialogues")
    # Some talks outgrow so short a context.
    model = write_model(tmp_path / "model", dialogues, context=512)
    found = []
    for name in ("one.json", "two.json"):
        options = ["--count", "6", "--threads", "1", "--failures", "1"]
        file = ["--json", str(tmp_path / name)]
        evaluate.main([str(model), "--dialogues", str(dialogues), *options, *file])
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0] == found[1]
    assert list(found[0]) == ["count", *evaluate.PARTS]
    assert found[0]["recall"]["total"] == found[0]["independent"]["b"]["total"] == 6
    assert {part["total"] for part in found[0]["corrected"].values()} == {3}
    assert found[0]["openings"]["sampled at temperature 1"]["all"]["total"] == 3
    of_all = found[0]["bits"]["corpora"]["all"]
    # Untrained weights, beside n-gram models of similar dialogues
    assert 0 < of_all["bytes_5gram"] < 1.5 < of_all["model"]
    assert "sampled at temperature 1" in capsys.readouterr().out
