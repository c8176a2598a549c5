"""The criteria of the serving benchmark are judged by their limits."""

import sys

import pytest
from assets import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import serving_report


def spread(median, p99=None):
    return {"count": 9, "median": median, "p90": median, "p99": p99 or median}


def figures(ttft=0.1, tpot=0.03, p99=0.2, refused=0, goodput=100.0, share=1.0, failed=0):
    return {
        "ttft": spread(ttft, p99), "tpot": spread(tpot), "refused": refused, "failed": failed,
        "refusal": spread(0.01, 0.04) if refused else None, "goodput": goodput,
        "finished_share": share,
    }  # fmt: skip


GOOD = {
    0.1: figures(),
    0.8: figures(ttft=0.15, tpot=0.045),
    0.9: figures(p99=0.4),
    1.3: figures(p99=1.2, refused=5, share=0.8),
}


def unmet(servers):
    return [row["what"] for row in serving_report.criteria(servers, "lmchat") if not row["met"]]


def test_figures_at_the_limits_meet_all_criteria():
    peers = {0.1: figures(goodput=103.0), 1.3: figures(goodput=99.0, share=0.9)}
    rows = serving_report.criteria({"lmchat": GOOD, "vllm": peers}, "lmchat")
    assert [row["what"] for row in rows if not row["met"]] == []
    assert len(rows) == 7


@pytest.mark.parametrize(
    ("fraction", "changed", "what"),
    [
        (0.8, figures(ttft=0.16), "median TTFT at 80%"),
        (0.8, figures(tpot=0.05), "median TPOT at 80%"),
        (1.3, figures(p99=1.3, share=0.8), "P99 TTFT at 130%"),
        (1.3, figures(p99=1.0, share=0.8, failed=1), "failed turns at 130%"),
        (1.3, {**figures(refused=1), "refusal": spread(0.01, 0.06)}, "P99 seconds to 429"),
        (1.3, {**figures(), "ttft": None}, "P99 TTFT at 130%"),
    ],
)
def test_a_figure_beyond_its_limit_is_named(fraction, changed, what):
    (found,) = unmet({"lmchat": GOOD | {fraction: changed}})
    assert found.startswith(what)


def test_goodput_must_be_equal_where_all_turns_finish_and_higher_elsewhere():
    assert unmet({"lmchat": GOOD, "vllm": {0.1: figures(goodput=104.0)}})
    assert unmet({"lmchat": GOOD, "vllm": {0.1: figures(goodput=101.0, share=0.99)}})
    assert not unmet({"lmchat": GOOD, "vllm": {1.3: figures(goodput=0.0, share=0.1)}})
