"""The choices of one request: each has its own text, tokens and end."""

import itertools
import random

import pytest

import lmchat
from lmchat.generation.generation import Generation
from lmchat.text.replies.reply_parser import ReplyParser
from turbomind import Event, InternalError, TokenLogprobs

PROMPT = "The lighthouse keeper"
SAMPLED = {"temperature": 1.3, "seed": 5, "max_new_tokens": 40, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine("memo", store="memory", threads=1) as engine:
        yield engine
        stats = engine.stats()
        assert (stats.slots, stats.waiting, stats.pages_referenced) == (0, 0, 0)
        assert not engine._running


def choices(reply):
    return [reply, *reply.others]


def check_parts(parts, reply):
    """The deltas of each choice, joined, are its reply."""
    for number, choice in enumerate(choices(reply)):
        deltas = [p for p in parts if isinstance(p, lmchat.Delta) and p.choice == number]
        assert "".join(d.text for d in deltas if d.kind == "text") == choice.text
        assert "".join(d.text for d in deltas if d.kind == "reasoning") == choice.reasoning
        assert [i for d in deltas for i in d.token_ids] == choice.token_ids
        assert tuple(i for d in deltas for i in d.logprobs) == choice.logprobs
        assert [d.seconds for d in deltas] == sorted(d.seconds for d in deltas)


def test_the_choices_of_one_request_are_those_of_the_core(engine):
    stream = engine.stream(PROMPT, n=5, **SAMPLED)
    parts = list(stream.events())
    reply = stream.result()
    check_parts(parts, reply)
    ids = engine.tokenizer.encode(PROMPT)
    wanted = engine.core.generate(ids, n=5, **SAMPLED)
    assert [c.token_ids for c in choices(reply)] == [c.token_ids for c in wanted.choices]
    assert len({tuple(c.token_ids) for c in choices(reply)}) > 1
    assert [c.usage.prompt_tokens for c in choices(reply)] == [len(ids), 0, 0, 0, 0]
    assert [c.usage.completion_tokens for c in choices(reply)] == [40] * 5
    assert all(c.timings.total >= c.timings.ttft > 0 and not c.others for c in reply.others)
    assert "".join(engine.stream(PROMPT, n=5, **SAMPLED)) == reply.text  # the first choice's


def test_a_stop_string_ends_one_choice_and_what_it_computes(engine, monkeypatch):
    whole = choices(engine.generate(PROMPT, n=4, **SAMPLED))
    stop = whole[2].text[5:8]
    cancelled = []
    cancel = lmchat.generation.generation.Stream.cancel

    def watched(stream, choice=None):
        cancelled.append(choice)
        cancel(stream, choice)

    monkeypatch.setattr(lmchat.generation.generation.Stream, "cancel", watched)
    stream = engine.stream(PROMPT, n=4, stop_strings=[stop], **SAMPLED)
    parts = list(stream.events())
    reply = stream.result()
    check_parts(parts, reply)
    cut = [number for number, one in enumerate(whole) if stop in one.text]
    assert 2 in cut
    assert set(cancelled) == set(cut)
    for number, (one, all_of_it) in enumerate(zip(choices(reply), whole, strict=True)):
        assert one.text == all_of_it.text.split(stop)[0]
        assert one.finish_reason == ("stop" if number in cut else "length")
        assert one.token_ids == all_of_it.token_ids[: len(one.token_ids)]


def test_a_stopped_choice_leaves_its_slot(engine):
    """One of two choices stops at its first text; the other one goes on alone, for 600 tokens."""
    settings = {**SAMPLED, "max_new_tokens": 600, "logprobs": None}
    first, second = choices(engine.generate(PROMPT, n=2, **settings))
    stop = next(t for t in (second.text[:k] for k in range(1, 200)) if t not in first.text)
    before = engine.stats().tokens_decoded
    reply = engine.generate(PROMPT, n=2, stop_strings=[stop], **settings)
    decoded = engine.stats().tokens_decoded - before
    assert [c.finish_reason for c in choices(reply)] == ["length", "stop"]
    assert (reply.text, reply.others[0].text) == (first.text, "")
    assert decoded < 2 * len(reply.token_ids)


def test_cancelling_ends_all_choices(engine):
    stream = engine.stream(PROMPT, n=3, **{**SAMPLED, "max_new_tokens": 1900})
    parts = list(itertools.islice(stream.events(), 6))
    reply = stream.stop()
    parts += stream.events()
    check_parts(parts, reply)
    assert {c.finish_reason for c in choices(reply)} == {"cancelled"}


def test_bad_requests_of_several_choices_raise(engine):
    with pytest.raises(lmchat.ContextFull):
        engine.generate(PROMPT, n=3, max_new_tokens=100_000)
    with pytest.raises(lmchat.InvalidRequest, match="^n is 257, expected"):
        engine.generate(PROMPT, n=257)
    chat = engine.session()
    chat.send("Hello", max_new_tokens=2)
    for verb in (chat.retry, chat.continue_, lambda **o: chat.send("x", **o), chat.set):
        with pytest.raises(lmchat.InvalidRequest, match=r"^n is 2, expected to be left out"):
            verb(n=2)
    with pytest.raises(lmchat.InvalidRequest, match=r"^n is 2, expected to be left out"):
        engine.session("n", settings={"n": 2})
    chat.delete()


class ScriptedStream:
    """A stream of scripted events; a cancelled choice ends with "cancelled"."""

    id = 1

    def __init__(self, choices):
        self.cancelled = set()
        self._choices = choices

    def cancel(self, choice=None):
        self.cancelled |= {choice} if choice is not None else set(range(self._choices))


def random_events(rng, ids, count):
    """Yields batches of events of `count` choices, which interleave; `cancelled` may end them."""
    cancelled = yield []
    left = {choice: list(ids[choice]) for choice in range(count)}
    clock = 0.0
    while left:
        batch = []
        for choice in list(left):
            clock += 1.0
            if choice in cancelled:
                del left[choice]
                batch.append(Event(choice, finish_reason="cancelled", terminal=not left,
                                   seconds=clock))  # fmt: skip
            elif left[choice] and rng.random() < 0.8:
                token = left[choice].pop(0)
                entry = (TokenLogprobs(-float(token)),)
                batch.append(Event(choice, (token,), entry, seconds=clock))
            elif not left[choice]:
                del left[choice]
                reason = rng.choice(["stop", "length"])
                batch.append(Event(choice, finish_reason=reason, terminal=not left, seconds=clock))
        cancelled = yield batch


@pytest.mark.parametrize("seed", range(40))
def test_random_replies_are_their_deltas(engine, seed):
    """With stop strings, held-back text, characters of several tokens, errors and cancels."""
    rng = random.Random(seed)
    tokenizer, count = engine.tokenizer, rng.choice([1, 1, 2, 5])
    text = "a lamp – né 灯台 🗼 the end of the lamp, and then the end"
    words = [word + " " for word in text.split()]
    ids = [
        tokenizer.encode("".join(rng.choices(words, k=rng.randint(0, 12)))) for _ in range(count)
    ]
    stops = rng.sample(["the end", "lamp, ", "灯台 né", "🗼", "nothing"], rng.randint(0, 3))
    replies = []
    generation = Generation(
        lambda work: work(), lambda outcome: outcome, lambda _: None, lambda: False, lambda: False
    )
    parsers = [ReplyParser(tokenizer, stop_strings=stops) for _ in range(count)]
    generation.prepare(parsers[0], others=parsers[1:])
    stream = ScriptedStream(count)
    generation.attach(stream)
    early, seen = generation.follow(), []
    batches = random_events(rng, ids, count)
    next(batches)
    broken = rng.random() < 0.2
    while not generation.done:
        batch = batches.send(stream.cancelled)
        if broken and rng.random() < 0.1:
            generation.refuse(InternalError("the journal"))
        generation.feed(batch)
        seen += early.take()
        if rng.random() < 0.02:
            generation.cancel()
    seen += early.take()
    try:
        outcome = generation.result()
    except lmchat.InternalError:
        assert not any(len(delta.token_ids) for delta in seen)
        return
    replies = [outcome, *outcome.others]
    check_parts(seen, outcome)
    check_parts(generation.follow().take(), outcome)
    for choice, one in enumerate(replies):
        assert ids[choice][: len(one.token_ids)] == one.token_ids
        assert one.usage.completion_tokens == len(one.token_ids)
        whole = ReplyParser(tokenizer, stop_strings=stops)
        whole.push(ids[choice][: len(ids[choice]) if one.finish_reason == "stop" else None])
        whole.finish()
        if one.finish_reason in ("stop", "length"):
            assert one.text == whole.text
            assert len(one.token_ids) == whole.stored_tokens


def test_choices_take_a_slot_each_and_the_next_request_waits_for_them():
    long = {**SAMPLED, "max_new_tokens": 400}
    with lmchat.ChatEngine("memo", store="memory", threads=1, max_batch_size=3) as engine:
        three = engine.start_generate(PROMPT, n=3, **long)
        waits = engine.start_generate(PROMPT, **SAMPLED)
        assert (engine.queue_stats().running, engine.queue_stats().waiting) == (1, 1)
        with three.follow() as follower:
            next(part for part in follower.events() if isinstance(part, lmchat.Delta))
        assert engine.queue_stats().waiting == 1
        three.cancel()
        waits.wait()
        assert waits.result().usage.completion_tokens == SAMPLED["max_new_tokens"]
        three.wait()
        stats = engine.queue_stats()
        assert (stats.running, stats.waiting, stats.paused) == (0, 0, 0)
