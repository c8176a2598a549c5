"""Arrivals, think times and lengths follow the wanted distributions, and only the seed."""

import itertools
import random
import statistics

import pytest

from lmchat.cli.bench.serving import schedule
from lmchat.cli.bench.serving.lengths import FromQuestions, FromTrace, Generated, read_questions
from lmchat.cli.bench.serving.plan import Plan, parse_rates
from lmchat.cli.bench.serving.texts import Writer
from lmchat.cli.bench.workload import Row
from turbomind.errors import InvalidRequest

WRITER = Writer(("one", "two", "three", "four"), 1.0, "words")
LENGTHS = Generated(None, 128)


def planned(plan, rate=1.0, seconds=100.0, text_seed="1", lengths=LENGTHS):
    arrivals = schedule.poisson(rate / plan.turns, plan.seed)
    return schedule.schedule(plan, rate, seconds, arrivals, lengths, WRITER, text_seed)


def test_poisson_arrivals_have_exponential_gaps():
    times = [0.0, *itertools.islice(schedule.poisson(5.0, seed=0), 20_000)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03)
    assert sum(gap > 0.4 for gap in gaps) / len(gaps) == pytest.approx(0.1353, rel=0.05)  # e**-2
    # Counts per second have a variance equal to their mean.
    counts = [0] * int(times[-1])
    for at in times[1:]:
        if at < len(counts):
            counts[int(at)] += 1
    assert statistics.variance(counts) == pytest.approx(5.0, rel=0.1)


def test_another_rate_scales_the_same_process_and_another_seed_changes_it():
    slow, fast, other = (
        list(itertools.islice(schedule.poisson(rate, seed), 50))
        for rate, seed in ((1.0, 3), (4.0, 3), (1.0, 4))
    )
    assert fast == pytest.approx([at / 4 for at in slow])
    assert slow != other


def test_a_trace_keeps_its_intervals_and_fills_the_time():
    rows = [Row(s, 1, 1) for s in (10.0, 11.0, 14.0, 16.0, 30.0)]
    # Four requests in 20 s: the interval to the fifth is the last one.
    assert schedule.from_trace(rows, 0.2, 20.0) == [0.0, 1.0, 4.0, 6.0]
    assert schedule.from_trace(rows, 0.4, 10.0) == [0.0, 0.5, 2.0, 3.0]


def test_a_trace_that_is_too_short_is_repeated():
    rows = [Row(s, 1, 1) for s in (0.0, 1.0, 4.0, 6.0)]
    times = schedule.from_trace(rows, 2.0, 2000.0)
    assert len(times) == 4000
    assert times == sorted(times)
    assert 1990.0 < times[-1] < 2000.0
    gaps = [b - a for a, b in itertools.pairwise(times[:9])]
    # The mean interval of 2 s stands between repetitions.
    assert [gap / gaps[0] for gap in gaps] == pytest.approx([1, 3, 2, 2, 1, 3, 2, 2])


def test_a_trace_of_simultaneous_requests_repeats_in_bursts():
    rows = [Row(1.0, 1, 1)] * 3
    assert schedule.from_trace(rows, 3.0, 2.0) == pytest.approx([0, 0, 0, 1, 1, 1])
    assert schedule.from_trace(rows, 1.0, 2.0) == [0, 0]


def test_conversations_arrive_at_the_rate_of_turns_over_turns():
    plan = Plan("u", turns=6, think=10.0)
    found = planned(plan, rate=3.0, seconds=4000.0)
    assert len(found) == pytest.approx(3.0 / 6 * 4000, rel=0.1)
    assert all(len(each.turns) == 6 for each in found)
    assert {each.turns[0].think for each in found} == {0.0}
    thinks = [turn.think for each in found for turn in each.turns[1:]]
    assert statistics.mean(thinks) == pytest.approx(10.0, rel=0.05)
    assert statistics.stdev(thinks) == pytest.approx(10.0, rel=0.05)


def test_lengths_are_the_same_at_every_rate_and_texts_are_not():
    plan = Plan("u", turns=2, seed=5)
    slow, fast = planned(plan, rate=1.0), planned(plan, rate=2.0)
    pairs = list(zip(slow, fast, strict=False))
    assert pairs
    for one, two in pairs:
        assert [(t.message_tokens, t.reply_tokens, t.think) for t in one.turns] == [
            (t.message_tokens, t.reply_tokens, t.think) for t in two.turns
        ]
    assert all(one.turns[0].message != two.turns[0].message for one, two in pairs[:5])
    assert planned(plan) == slow
    assert planned(plan, text_seed="2") != slow


def test_generated_messages_are_log_normal_and_bounded():
    dice = random.Random(0)
    drawn = [LENGTHS.draw(i, dice) for i in range(5000)]
    assert statistics.median(message for message, _ in drawn) == pytest.approx(32, abs=1)
    assert {reply for _, reply in drawn} == {128}
    assert 1 <= min(drawn)[0] <= max(drawn)[0] <= 256
    assert Generated(40, 7).draw(0, dice) == (40, 7)


def test_lengths_of_questions_and_traces_are_cut_at_the_limits():
    plan = Plan("u", longest_message=50, longest_reply=20)
    lengths = FromTrace("t", [Row(0, 40, 9), Row(1, 900, 300)], None)
    found = planned(plan, lengths=lengths)
    assert [(c.turns[0].message_tokens, c.turns[0].reply_tokens) for c in found[:4]] == [
        (40, 9), (50, 20), (40, 9), (50, 20),
    ]  # fmt: skip
    assert len(found[1].turns[0].message.split()) == 50
    questions = FromQuestions("q", [3, 5], 8)
    drawn = {questions.draw(i, random.Random(i)) for i in range(50)}
    assert drawn == {(3, 8), (5, 8)}
    assert FromTrace("t", [Row(0, 40, 9)], 16).draw(5, random.Random(0)) == (40, 16)


def test_texts_have_the_wanted_number_of_tokens():
    writer = Writer(WRITER.words, 2.5, "tokenize")
    dice = random.Random(0)
    assert len(writer.text(100, dice).split()) == 40
    assert len(writer.text(1, dice).split()) == 1


def test_questions_are_read_and_checked(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["a b", "c"]}\n\n{"turns": ["d"]}\n')
    assert read_questions(str(path)) == ["a b", "c", "d"]
    for text in ("", "{}\n", "no\n", '{"turns": [3]}\n'):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match="--questions is .*expected JSON lines"):
            read_questions(str(path))
    with pytest.raises(InvalidRequest, match="--questions"):
        read_questions(str(tmp_path / "missing"))


def test_rates_are_sorted_and_checked():
    assert parse_rates("2, 0.5,1") == (0.5, 1.0, 2.0)
    for text in ("", "a", "0", "-1", "nan", "inf", "1,2000"):
        with pytest.raises(InvalidRequest, match="--rates is"):
            parse_rates(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "responses"}, "--endpoint is 'responses', expected chat or completions"),
        ({"arrivals": "even"}, "--arrivals is 'even'"),
        ({"arrivals": "trace"}, "expected --trace FILE with it"),
        ({"trace": "t", "turns": 2}, "--turns is 2 with --trace, expected 1"),
        ({"trace": "t", "questions": "q"}, "--trace and --questions are given, expected one"),
        ({"questions": "q", "message_tokens": 3}, "--questions and --message-tokens"),
        ({"sessions": True, "endpoint": "completions"}, "--sessions is given with --endpoint"),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(InvalidRequest, match=message):
        Plan("u", **options).check()


def test_the_warm_up_of_conversations_is_the_time_of_one():
    assert Plan("u").warmup_seconds(128) == 10
    assert Plan("u", turns=6, think=10).warmup_seconds(100) == 10 + 5 * 15
    assert Plan("u", turns=6, warmup=3).warmup_seconds(100) == 3
