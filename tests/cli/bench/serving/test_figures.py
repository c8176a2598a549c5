"""Figures are those of scripted turns."""

import pytest

from lmchat.cli.bench.serving.figures import Limits, capacity, figures, spread
from lmchat.cli.bench.serving.load import Observed
from lmchat.cli.bench.serving.turn import Outcome, Turn

LIMITS = Limits(ttft=1.0, tpot=0.15)


def finished(due, *times, counts=None, usage=None, cached=None, prompt=10):
    return Turn(
        due=due,
        ended=times[-1],
        outcome=Outcome.FINISHED,
        times=list(times),
        counts=counts or [None] * len(times),
        prompt_tokens=prompt,
        completion_tokens=usage,
        cached_tokens=cached,
    )


def failed(due, kind, error="why"):
    turn = Turn(due=due, ended=due + 1)
    turn.fail(kind, error)
    return turn


def refused(due, seconds, again=None):
    turn = Turn(due=due, ended=due + seconds)
    turn.refuse(again, "full")
    return turn


def of(*turns, begin=0.0, end=10.0, **rest):
    return figures(1.0, Observed(begin=begin, end=end, turns=list(turns), **rest), LIMITS)


def test_latencies_count_from_when_the_turn_was_due():
    report = of(finished(1.0, 1.5, 1.75, 2.25))
    assert report["ttft"] == {"count": 1, "median": 0.5, "p90": 0.5, "p99": 0.5}
    assert report["tpot"]["median"] == 0.375
    assert report["itl"]["count"] == 2
    assert report["itl"]["median"] == 0.375
    assert report["total"]["median"] == 1.25


def test_percentiles_are_interpolated():
    assert spread(range(101)) == {"count": 101, "median": 50, "p90": 90, "p99": 99}
    assert spread([3.0, None]) == {"count": 1, "median": 3, "p90": 3, "p99": 3}
    assert spread([None]) is None


def test_events_with_several_tokens_are_counted_by_their_lists():
    turn = finished(0.0, 1.0, 1.5, 2.0, counts=[1, 5, 2])
    assert turn.tokens == 8
    assert turn.tpot == pytest.approx(1.0 / 7)
    assert turn.gaps() == [0.1, 0.25]
    assert of(turn)["event_gap"] == 0.5


def test_events_without_lists_share_the_tokens_of_usage():
    turn = finished(0.0, 1.0, 1.5, 2.0, usage=12)
    assert turn.tpot == pytest.approx(1.0 / 11)
    assert turn.tokens_by_event() == [4.0] * 3
    assert turn.gaps() == [0.125, 0.125]


def test_without_usage_an_event_is_a_token():
    turn = finished(0.0, 1.0, 1.5, 2.0)
    assert (turn.tokens, turn.tpot) == (3, 0.5)
    assert finished(0.0, 1.0).tpot is None


def test_goodput_has_the_tokens_of_turns_within_both_limits():
    good = finished(0.0, 1.0, 1.1)
    late = finished(0.0, 1.01, 1.1)
    slow = finished(0.0, 0.5, 0.66)
    single = finished(0.0, 0.5)
    report = of(good, late, slow, single, failed(0.0, "timeout"))
    assert report["good"] == 2
    assert report["goodput"] == pytest.approx(3 / 10)


def test_only_turns_due_in_the_window_count_but_all_tokens_that_arrive_in_it_do():
    early = finished(4.0, 4.5, 5.0, 5.5, prompt=100)  # its last two tokens arrive in the window
    inside = finished(6.0, 7.0, 9.0, 14.0, prompt=30)  # its last one does not
    late = finished(10.0, 10.5, prompt=7)
    report = of(early, inside, late, begin=5.0, end=10.0)
    assert (report["sent"], report["finished"]) == (1, 1)
    assert report["rate_reached"] == 1 / 5
    assert report["output_tokens_per_second"] == 4 / 5
    assert report["input_tokens_per_second"] == 30 / 5
    assert report["streams"] == {"mean": pytest.approx((0.5 + 4.0) / 5), "most": 1}


def test_outcomes_refusals_and_errors_are_counted():
    report = of(
        finished(0.0, 1.0, cached=4),
        refused(1.0, 0.04, again=2.0),
        refused(2.0, 0.02),
        failed(3.0, "timeout", "first"),
        failed(4.0, "timeout", "second"),
        failed(5.0, "disconnected"),
        interrupted=2,
    )
    counts = [report[name] for name in ("sent", "finished", "refused", "failed", "interrupted")]
    assert counts == [6, 1, 2, 3, 2]
    assert report["refusal"]["median"] == pytest.approx(0.03)
    assert report["retry_after"] == {"count": 1, "median": 2, "p90": 2, "p99": 2}
    assert report["errors"] == {
        "timeout": {"count": 2, "example": "first"},
        "disconnected": {"count": 1, "example": "why"},
    }
    assert (report["cached_tokens"], report["prompt_tokens"]) == (4, 10)


def test_a_lagging_client_is_marked():
    assert not of(lags=[0.001] * 99 + [0.5])["lagging"]
    report = of(lags=[0.001] * 90 + [0.05] * 10)
    assert report["lagging"]
    assert report["lag"]["max"] == 0.05


def test_an_empty_window_has_no_figures():
    report = of(begin=5.0, end=3.0)  # stopped in the warm-up
    assert report["seconds"] == report["goodput"] == report["rate_reached"] == 0
    assert report["ttft"] is report["finished_share"] is report["lag"] is None


def test_capacity_is_the_highest_rate_at_which_turns_finish():
    shares = {0.5: 1.0, 1.0: 0.97, 2.0: 0.969, 4.0: None}
    rates = [{"rate": rate, "finished_share": share} for rate, share in shares.items()]
    assert capacity(rates) == 1.0
    assert capacity(rates[2:]) is None
