"""The short table that a run prints at its end; the record has all figures."""

from __future__ import annotations

from typing import Any


def summary(record: dict[str, Any]) -> str:
    """Returns lines of at most 120 characters, the most important last."""
    results = {phase["name"]: phase["result"] for phase in record["phases"]}
    lines = [*_ops(results), *_speed(results), *_ceilings(results), *_end_to_end(record, results)]
    lines += _results(results) + _groups(results)
    lines += ["", "phases:"]
    for phase in record["phases"]:
        why = phase["error"] or (phase["result"] or {}).get("note", "")
        text = f"  {phase['name']:26} {phase['status']:14} {phase['seconds']:6.1f} s  {why}"
        lines.append(text[:160])
    passed = sum(kernel["passed"] for kernel in record["kernels"].values())
    lines.append(f"kernel files that passed: {passed} of {len(record['kernels'])}")
    lines += [_bar(bar) for bar in record["bars"]]
    return "\n".join(lines)


def _bar(bar: dict[str, Any]) -> str:
    text = f"  {bar['verdict']:5} {bar['bar']}: {bar['value']:.4g}"
    text += f" (pass {bar['pass']:.4g}, good {bar['good']:.4g}"
    return text + (f", an H200's times {bar['scale']:.2f})" if "scale" in bar else ")")


def _ops(results: dict[str, Any]) -> list[str]:
    bad = [run for run in results.get("ops", {}).get("runs", []) if run["status"] != "ok"]
    lines = [
        f"{run['driver']} seed {run['seed']}: {run['status']}: {run['tail'][-300:]}" for run in bad
    ]
    return lines[:10]


def _speed(results: dict[str, Any]) -> list[str]:
    lines = []
    for figure in results.get("speed", {}).get("figures", []):
        dims = " ".join(f"{name} {value}" for name, value in figure["dims"].items())
        head = f"{figure['op']} {figure['case']} {figure['path']} [{dims}]"
        if "ms" not in figure:
            lines.append(f"{head}: {figure['error']}"[:160])
            continue
        text = f"{head}: {figure['ms'] * 1e3:.1f} us"
        for name, label in (("of_bytes", "of copy"), ("of_flops", "of peak")):
            if figure.get(name):
                text += f", {figure[name]:.0%} {label}"
        if figure.get("torch_ms"):
            text += f", torch {figure['torch_ms'] * 1e3:.1f} us"
        lines.append(text[:160])
    return lines


def _ceilings(results: dict[str, Any]) -> list[str]:
    limits = results.get("ceilings", {}).get("limits", {})
    return [f"ceiling {name}: {value:.4g}" for name, value in limits.items()]


def _groups(results: dict[str, Any]) -> list[str]:
    """Lists what several ranks did wrong, and their times beside those of one rank."""
    lines = []
    for phase, found in results.items():
        kind, _, model = phase.partition(":")
        if kind != "group":
            continue
        lines += _checks(f"group {model}", found.get("checks", []))
        for figure in found.get("figures", []):
            size = figure.get("tokens", figure.get("batch"))
            text = f"group {model} {figure['figure']} {size}, {figure['group']}: "
            text += f"{figure['ms']:.3f} ms" if "ms" in figure else figure["skipped"]
            if "reduce_ms" in figure:
                text += f", sums {figure['reduce_ms']:.3f}, waits {figure['wait_ms']:.3f}"
            lines.append(text)
        if found.get("skipped"):
            lines.append(f"group {model}: {found['skipped']}")
    return lines


def _checks(name: str, checks: list[dict[str, Any]]) -> list[str]:
    """Lists the checks that failed, and how many are right."""
    lines = []
    for check in checks:
        if not check["ok"]:
            facts = {name: check[name] for name in check if name not in ("check", "ok")}
            lines.append(f"WRONG: {name.partition(' ')[2]}: {check['check']}: {facts}"[:300])
    right = sum(check["ok"] for check in checks)
    return [*lines, f"{name}: {right} of {len(checks)} checks are right"]


def _results(results: dict[str, Any]) -> list[str]:
    """Lists the checks that failed, and the time of decoding with parts switched off."""
    lines = []
    for phase, found in results.items():
        kind, _, model = phase.partition(":")
        if kind != "results":
            continue
        for figure in found.get("figures", []):
            lines.append(f"results {model}, {figure['engine']}: {figure['ms']:.3f} ms a token")
        if found.get("skipped"):
            lines.append(f"results {model}: {found['skipped']}")
        lines += _checks(f"results {model}", found.get("checks", []))
    return lines


def _end_to_end(record: dict[str, Any], results: dict[str, Any]) -> list[str]:
    lines = []
    for phase in record["phases"]:
        kind, _, model = phase["name"].partition(":")
        if kind not in ("end_to_end", "peers"):
            continue
        for figure in results[phase["name"]].get("figures", []):
            about = [
                f"{name} {value}"
                for name, value in figure.items()
                if name in ("tokens", "batch", "context", "how", "history", "new", "requests")
            ]
            about += ["deterministic"] if figure.get("deterministic") else []
            text = f"{kind} {model} {figure['figure']} {', '.join(about)}: "
            if "ms" not in figure:
                lines.append(text + str(figure.get("skipped")))
                continue
            text += f"{figure['ms']:.2f} ms"
            if "tokens_per_s" in figure:
                text += f", {figure['tokens_per_s']:.0f} tok/s"
            if "of_floor" in figure:
                text += f", {figure['of_floor']:.0%} of the floor's speed"
            lines.append(text)
    return lines
