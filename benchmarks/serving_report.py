"""Criteria and Markdown of the serving benchmark."""

from __future__ import annotations

from typing import Any

from disturbance import lines_of
from report import header

from lmchat.cli.bench.serving.figures import CAPACITY_SHARE

LOW, HIGH, NEAR = 0.1, 0.8, 0.9  # fractions of the capacity
FLAT = 1.5  # medians at HIGH / those at LOW, at most
TAIL = 3.0  # P99 TTFT above the capacity / that at NEAR, at most
REFUSAL_SECONDS = 0.05
EQUAL_GOODPUT = 0.03

Rates = dict[float, dict[str, Any]]
"""Fraction of the capacity -> figures."""


def criteria(servers: dict[str, Rates], own: str) -> list[dict[str, Any]]:
    """Returns each criterion with its value, its limit and whether it is met.

    Args:
        servers: Name of a server -> its figures.
        own: Name of the server that is judged.
    """
    rates = servers[own]
    rows: list[dict[str, Any]] = []

    def add(what: str, value: float | None, limit: float, at_least: bool = False) -> None:
        met = value is not None and (value >= limit if at_least else value <= limit)
        sign = ">=" if at_least else "<="
        rows.append({"what": what, "value": value, "limit": f"{sign} {limit:g}", "met": met})

    if 1.0 in rates:  # the capacity was found by shorter runs
        share = rates[1.0]["finished_share"]
        add("share of turns that finish at the capacity", share, CAPACITY_SHARE, at_least=True)
    for fraction in sorted(each for each in rates if LOW < each <= HIGH):
        for name in ("tpot", "ttft"):
            value = ratio(quantile(rates[fraction], name), quantile(rates.get(LOW), name))
            add(f"median {name.upper()} at {fraction:.0%} / at {LOW:.0%} of capacity", value, FLAT)
    for fraction in sorted(each for each in rates if each > 1.0):
        tail = quantile(rates[fraction], "ttft", "p99")
        value = ratio(tail, quantile(rates.get(NEAR), "ttft", "p99"))
        add(f"P99 TTFT at {fraction:.0%} / at {NEAR:.0%} of capacity", value, TAIL)
        if rates[fraction]["refused"]:
            seconds = quantile(rates[fraction], "refusal", "p99")
            add(f"P99 seconds to 429 at {fraction:.0%} of capacity", seconds, REFUSAL_SECONDS)
        add(f"failed turns at {fraction:.0%} of capacity", rates[fraction]["failed"], 0)
    for name, theirs in servers.items():
        for fraction in sorted(rates.keys() & theirs.keys()) if name != own else ():
            mine, peer = rates[fraction], theirs[fraction]
            both = mine["finished_share"] == peer["finished_share"] == 1.0
            what = f"goodput at {fraction:.0%} of capacity / that of {name}"
            value = ratio(mine["goodput"], peer["goodput"])
            add(what, value, 1 - EQUAL_GOODPUT if both else 1.0, at_least=True)
            if value is None and mine["goodput"] > 0:  # theirs is 0
                rows[-1]["met"] = True
    return rows


def quantile(figures: dict[str, Any] | None, name: str, which: str = "median") -> float | None:
    spread = figures and figures[name]
    return float(spread[which]) if spread else None


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def markdown(result: dict[str, Any], labels: dict[str, str], picture: str) -> str:
    """Returns the whole report."""
    lines = header("Servers under load", result, "One server at a time, the client beside it.")
    lines += [
        "",
        f"Qwen2.5-0.5B shape with random bf16 weights, {result['slots']} slots. Conversations of "
        f"{result['turns']} turns: {result['lengths']}, think time exponential with mean "
        f"{result['think']:g} s, {result['minutes']:g} minutes per rate. lmchat keeps sessions, "
        "the others get the history again. "
        f"Capacity of lmchat: **{result['capacity']:.3g} turns per second**.",
        "",
        f"![TTFT, TPOT and goodput against the rate]({picture})",
    ]
    if result["criteria"]:
        lines += ["", "| criterion | value | limit | met |", "|---|---|---|---|"]
        for row in result["criteria"]:
            value = "-" if row["value"] is None else f"{row['value']:.3g}"
            met = "yes" if row["met"] else "**no**"
            lines.append(f"| {row['what']} | {value} | {row['limit']} | {met} |")
    for title, part in (("Chats", "chats"), ("Prompts and replies of the trace", "trace")):
        if result[part]:
            lines += ["", f"## {title}", "", *table(result[part], labels)]
    lines += ["", *lines_of(result["disturbances"])]
    for name, reason in result["failures"].items():
        lines += ["", f"{labels[name]} failed: {reason.splitlines()[0]}"]
    return "\n".join(lines) + "\n"


def table(servers: dict[str, list[dict[str, Any]]], labels: dict[str, str]) -> list[str]:
    heads = (
        "turns/s", "finished", "429", "failed", "TTFT ms median / P99", "TPOT ms median / P99",
        "output tok/s", "goodput", "cached", "client lag P99 ms",
    )  # fmt: skip
    lines = ["| server | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, rates in servers.items():
        for each in rates:
            cached, prompt, lag = each["cached_tokens"], each["prompt_tokens"], each["lag"]
            cells = (
                f"{each['rate']:.3g}",
                "-" if each["finished_share"] is None else f"{each['finished_share']:.1%}",
                str(each["refused"]),
                str(each["failed"]),
                pair(each["ttft"]),
                pair(each["tpot"]),
                f"{each['output_tokens_per_second']:.1f}",
                f"{each['goodput']:.1f}",
                "-" if cached is None or not prompt else f"{cached / prompt:.0%}",
                "-" if lag is None else f"{lag['p99'] * 1e3:.1f}{'*' * each['lagging']}",
            )
            lines.append(f"| {labels[name]} | " + " | ".join(cells) + " |")
    return lines


def pair(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['median'] * 1e3:.0f} / {spread['p99'] * 1e3:.0f}"
