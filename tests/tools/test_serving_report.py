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
    1.0: figures(share=0.97),
    1.3: figures(p99=1.2, refused=5, share=0.8),
}


def unmet(servers):
    return [row["what"] for row in serving_report.criteria(servers, "lmchat") if not row["met"]]


def test_figures_at_the_limits_meet_all_criteria():
    peers = {0.1: figures(goodput=103.0), 1.3: figures(goodput=99.0, share=0.9)}
    rows = serving_report.criteria({"lmchat": GOOD, "vllm": peers}, "lmchat")
    assert [row["what"] for row in rows if not row["met"]] == []
    assert len(rows) == 8


@pytest.mark.parametrize(
    ("fraction", "changed", "what"),
    [
        (0.8, figures(ttft=0.16), "median TTFT at 80%"),
        (0.8, figures(tpot=0.05), "median TPOT at 80%"),
        (1.0, figures(share=0.96), "share of turns"),
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


def test_the_report_shows_criteria_tables_and_failures():
    rate = {
        **GOOD[1.3], "rate": 2.0, "cached_tokens": 5, "prompt_tokens": 10,
        "output_tokens_per_second": 90.0, "lag": spread(0.001), "lagging": True,
    }  # fmt: skip
    machine = {
        "cpu": "C", "cpu_family_model": "1/2", "isa": [], "cpus_used": [0, 1], "cpus_online": 2,
        "memory_gib": 8, "load_at_start": 0.1, "commit": "abc",
    }  # fmt: skip
    result = {
        "date": "2026-01-01", "machine": machine, "quick": False, "seconds": 60.0, "slots": 16,
        "turns": 6, "lengths": "m", "think": 10.0, "minutes": 5.0,
        "capacity": 1.9, "criteria": serving_report.criteria({"lmchat": GOOD}, "lmchat"),
        "chats": {"lmchat": [rate, {**rate, "lag": None, "ttft": None}]}, "trace": {},
        "disturbances": [],
        "failures": {"vllm": "not installed\nmore"},
    }  # fmt: skip
    text = serving_report.markdown(result, {"lmchat": "ours", "vllm": "theirs"}, "p.png")
    assert "| ours | 2 | 80.0% | 5 | 0 | 100 / 1200 | 30 / 30 | 90.0 | 100.0 | 50% | 1.0* |" in text
    assert "| median TTFT at 80% / at 10% of capacity | 1.5 | <= 1.5 | yes |" in text
    assert "1.9 turns per second" in text
    assert "theirs failed: not installed\n" in text
