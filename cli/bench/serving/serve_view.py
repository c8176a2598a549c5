"""Prints the report of `bench serve`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ...terminal.tables import ReportPrinter, figures
from .figures import CAPACITY_SHARE, LAG_LIMIT, LATENCIES

QUANTILES = ("median", "p90", "p99")
SOURCES = {
    "tokenize": "counted by the server's /tokenize",
    "usage": "estimated from the server's usage",
    "words": "in words, as the server reports neither tokens nor usage",
}


def show(report: dict[str, Any]) -> None:
    """Prints the tables of a report."""
    printer = ReportPrinter()
    for line in headline(report):
        printer.print(line)
    printer.print(_turns_table(report["rates"]))
    printer.print(_latency_table(report["rates"]))
    for line in notes(report):
        printer.print(line)


def headline(report: dict[str, Any]) -> list[str]:
    """Returns the description of the server and of the load, line by line."""
    plan, lengths = report["plan"], report["lengths"]
    server = f" ({report['server']})" if report["server"] else ""
    history = "kept in sessions" if plan["sessions"] else "sent again"
    turns = (
        f"{plan['turns']} turns per conversation, think time exponential with mean "
        f"{plan['think']:g} s, history {history}"
        if plan["turns"] > 1
        else "one turn per conversation"
    )
    lines = [
        f"{report['model']} at {report['url']}{server}",
        f"{lengths['source']}; {SOURCES[report['token_source']]}",
        f"{turns}; {plan['arrivals']} arrivals, {report['warmup_seconds']:.0f} s of warm-up and "
        f"{plan['duration']:g} s measured per rate, seed {plan['seed']}",
    ]
    if not report["fields"]["ignore_eos"]:
        lines.append("the server does not take ignore_eos: replies may be shorter than wanted")
    if not report["reports"]["usage"]:
        lines.append("the server reports no usage: an event counts as a token")
    return lines


def _turns_table(rates: list[dict[str, Any]]) -> Table:
    names = ("turns/s", "reached", "sent", "finished", "refused", "failed")
    speeds = ("output tok/s", "input tok/s", "goodput", "cached", "streams", "lag P99 ms")
    table = figures("Turns, throughput and the client's lag", *names, *speeds)
    for each in rates:
        lag = each["lag"]
        mark = "*" if each["lagging"] else ""
        table.add_row(
            f"{each['rate']:g}",
            f"{each['rate_reached']:.2f}",
            *(str(each[name]) for name in ("sent", "finished", "refused", "failed")),
            f"{each['output_tokens_per_second']:.1f}",
            f"{each['input_tokens_per_second']:.1f}",
            f"{each['goodput']:.1f}",
            _share(each["cached_tokens"], each["prompt_tokens"]),
            f"{each['streams']['mean']:.1f}",
            "-" if lag is None else f"{lag['p99'] * 1e3:.1f}{mark}",
        )
    return table


def _latency_table(rates: list[dict[str, Any]]) -> Table:
    heads = [f"{name.upper()} {q}" for name in LATENCIES for q in ("median", "P90", "P99")]
    heads = [head.replace("TOTAL", "total") for head in heads]
    table = figures("Latencies of finished turns, in ms", "turns/s", *heads)
    for each in rates:
        cells = [_ms(each[name], q) for name in LATENCIES for q in QUANTILES]
        table.add_row(f"{each['rate']:g}", *cells)
    return table


def notes(report: dict[str, Any]) -> list[str]:
    """Returns capacity, refusals, errors and the client's overhead, line by line."""
    plan, rates = report["plan"], report["rates"]
    lines = [
        f"goodput: output tokens/s of turns with TTFT <= {plan['ttft_limit']:g} s and TPOT <= "
        f"{plan['tpot_limit'] * 1e3:g} ms",
        _capacity(report["capacity"], rates),
    ]
    for each in rates:
        at = f"at {each['rate']:g} turns/s"
        if each["refusal"]:
            lines.append(f"{at}: refused after {_ms(each['refusal'], 'p99')} ms (P99)")
        if each["interrupted"]:
            lines.append(f"{at}: interrupted with {each['interrupted']} turns running")
        for kind, found in each["errors"].items():
            lines.append(f"{at}: {found['count']} x {kind}, such as: {found['example']}")
    if any(each["lagging"] for each in rates):
        lines.append(
            f"* the client lagged by more than {LAG_LIMIT * 1e3:g} ms (P99): its latencies are "
            "too high"
        )
    if overhead := report["overhead"]:
        lines += _overhead(overhead)
    return lines


def _capacity(capacity: float | None, rates: list[dict[str, Any]]) -> str:
    share = f"{CAPACITY_SHARE:.0%} of the turns finish"
    if capacity is None:
        return f"capacity: below the lowest rate; at none of the rates {share}"
    highest = capacity == max(each["rate"] for each in rates)
    return f"capacity: {'at least ' if highest else ''}{capacity:g} turns/s, where {share}"


def _overhead(overhead: dict[str, Any]) -> list[str]:
    """Returns what the client adds, at most: the null server works on the same loop."""
    ttft, itl = overhead["ttft"], overhead["itl"]
    return [
        f"the client with a null server, {overhead['streams']} streams and "
        f"{overhead['events_per_second']:.0f} events/s: adds at most {_ms(ttft, 'median')} ms "
        f"(P99 {_ms(ttft, 'p99')}) to the TTFT, {_ms(itl, 'median')} ms (P99 {_ms(itl, 'p99')}) "
        f"to the ITL; {overhead['cpu_per_event'] * 1e6:.0f} us of processor time per event"
    ]


def _ms(spread: dict[str, float] | None, quantile: str) -> str:
    if spread is None:
        return "-"
    value = spread[quantile] * 1e3
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _share(part: int | None, whole: int | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.0%}"
