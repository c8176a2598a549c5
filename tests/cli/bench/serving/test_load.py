"""The load is an open loop: checked in virtual time against a scripted server."""

import asyncio

import pytest
import virtual_time

from lmchat.cli.bench.serving.load import START_SECONDS, Load, Window
from lmchat.cli.bench.serving.schedule import Conversation, PlannedTurn
from lmchat.cli.bench.serving.turn import Outcome, Turn


def conversation(at, *turns):
    """Returns a conversation from pairs of message and think time."""
    return Conversation(at, tuple(PlannedTurn(text, 1, 5, think) for text, think in turns))


class Sender:
    """Answers each turn after some seconds, and records what was sent."""

    def __init__(self, loop, seconds, outcomes=()):
        self.loop = loop
        self.seconds = seconds
        self.outcomes = list(outcomes)
        self.sent = []

    async def __call__(self, request, due):
        self.sent.append((round(self.loop.time() - START_SECONDS, 6), request))
        turn = Turn(due)
        await asyncio.sleep(self.seconds)
        turn.ended = self.loop.time()
        turn.outcome = self.outcomes.pop(0) if self.outcomes else Outcome.FINISHED
        turn.text = f"reply to {request.messages[-1]['content']}"
        return turn


def load(conversations, window, seconds=1.0, session=None, outcomes=(), after=None):
    """Runs a load in virtual time; returns what was sent and what was observed.

    `after`: sets the stop event so many seconds after the start, and `act` may disturb the loop.
    """

    async def main(loop):
        sender = Sender(loop, seconds, outcomes)
        stop = asyncio.Event()
        if after is not None:
            loop.call_later(START_SECONDS + after, stop.set)
        observed = await Load(sender, conversations, window, session).run(stop)
        return sender.sent, observed, loop.time()

    return virtual_time.run(main)


def times(sent):
    return [at for at, _ in sent]


def test_slow_replies_do_not_delay_arrivals():
    conversations = [conversation(at, ("hi", 0)) for at in (0.0, 1.0, 1.5, 7.0)]
    sent, observed, ended = load(conversations, Window(0, 10), seconds=100.0)
    assert times(sent) == [0.0, 1.0, 1.5, 7.0]
    assert len(observed.measured()) == 4
    assert ended == pytest.approx(START_SECONDS + 107.0)  # it waits for all replies


def test_a_turn_is_due_a_think_time_after_the_reply_before_it():
    conversations = [conversation(2.0, ("a", 0), ("b", 3.0), ("c", 0.5))]
    sent, observed, _ = load(conversations, Window(0, 100), seconds=4.0)
    assert times(sent) == [2.0, 9.0, 13.5]
    assert [turn.due - START_SECONDS for turn in observed.turns] == pytest.approx([2.0, 9.0, 13.5])


def test_a_turn_sends_the_history_again():
    sent, _, _ = load([conversation(0.0, ("a", 0), ("b", 0))], Window(0, 100))
    first, second = (request for _, request in sent)
    assert first.messages == [{"role": "user", "content": "a"}]
    assert second.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "reply to a"},
        {"role": "user", "content": "b"},
    ]
    assert first.session is None
    assert first.max_tokens == 5


def test_with_sessions_only_the_new_message_is_sent():
    conversations = [conversation(0.0, ("a", 0), ("b", 0)), conversation(0.1, ("c", 0))]
    sent, _, _ = load(conversations, Window(0, 100), session="bench")
    assert [(r.session, [m["content"] for m in r.messages]) for _, r in sent] == [
        ("bench-0", ["a"]),
        ("bench-1", ["c"]),
        ("bench-0", ["b"]),
    ]


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.FAILED])
def test_a_conversation_goes_on_without_a_message_that_was_not_answered(outcome):
    conversations = [conversation(0.0, ("a", 0), ("b", 2.0), ("c", 0))]
    outcomes = [Outcome.FINISHED, outcome, Outcome.FINISHED]
    sent, observed, _ = load(conversations, Window(0, 100), outcomes=outcomes)
    assert [m["content"] for m in sent[2][1].messages] == ["a", "reply to a", "c"]
    assert [turn.outcome for turn in observed.turns] == outcomes


def test_no_turn_is_sent_after_the_window_and_those_of_the_warm_up_are_not_measured():
    conversations = [
        conversation(0.0, ("warm", 0), ("far", 50.0)),
        conversation(4.9, ("in", 0), ("out", 5.0)),
        conversation(10.0, ("late", 0)),
    ]
    sent, observed, ended = load(conversations, Window(2, 8))
    assert [request.messages[-1]["content"] for _, request in sent] == ["warm", "in"]
    assert [turn.text for turn in observed.measured()] == ["reply to in"]
    assert observed.end - observed.begin == pytest.approx(8.0)
    assert ended == pytest.approx(START_SECONDS + 10.0)  # it waits for no think time


def test_a_bound_of_requests_ends_the_window_early():
    conversations = [conversation(at, ("hi", 0), ("more", 60.0)) for at in (0.0, 1.0, 2.0, 3.0)]
    sent, observed, ended = load(conversations, Window(1, 50, requests=2), seconds=0.5)
    assert times(sent) == [0.0, 1.0, 2.0]  # the first is of the warm-up
    assert len(observed.measured()) == 2
    assert observed.end - observed.begin == pytest.approx(1.0)
    assert ended == pytest.approx(START_SECONDS + 2.5)


def test_a_stop_cuts_what_is_running_and_keeps_the_rest():
    conversations = [conversation(at, ("hi", 0)) for at in (0.0, 1.0, 2.0, 3.0)]
    sent, observed, ended = load(conversations, Window(0, 50), seconds=1.2, after=2.5)
    assert len(sent) == 3
    assert len(observed.measured()) == 2 - 1 + 1
    assert observed.interrupted == 1
    assert observed.end - observed.begin == pytest.approx(2.5)
    assert ended == pytest.approx(START_SECONDS + 2.5)


def test_an_error_of_the_client_is_raised():
    class Broken(Sender):
        async def __call__(self, request, due):
            raise ZeroDivisionError

    async def main(loop):
        run = Load(Broken(loop, 1.0), [conversation(0.0, ("a", 0))], Window(0, 5))
        await run.run(asyncio.Event())

    with pytest.raises(ZeroDivisionError):
        virtual_time.run(main)


def test_a_busy_event_loop_shows_as_lag():
    async def main(loop):
        loop.call_later(1.0, loop.advance, 0.3)
        run = Load(Sender(loop, 1.0), [conversation(0.0, ("a", 0))], Window(0, 2))
        return await run.run(asyncio.Event())

    lags = virtual_time.run(main).lags
    assert max(lags) == pytest.approx(0.3, abs=0.02)
    assert sorted(lags)[-2] < 0.001
