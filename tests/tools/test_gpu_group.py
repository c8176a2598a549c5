"""Phase `group` of tools/gpu_check.py, with ranks of the CPU: what it checks and measures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assets import ROOT
from gpu import group, tables
from gpu.group import Group, groups_of
from gpu.settings import Settings

import turbomind

ONE_GPU = ["cuda:0,0", "cuda:0,0"]  # in turns, and waiting
RANKS = [Group("one rank", "cpu", 1), Group("two ranks", "cpu", 2)]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(group, "groups_of", lambda settings, most: RANKS)
    work = str(tmp_path)
    return Settings("cuda_emulated", True, work, work, str(ROOT), work, "test", [1])


def lines_of(result: dict[str, Any]) -> list[str]:
    record = {"phases": [], "kernels": {}, "bars": []}
    phase = {"name": "group:tiny", "status": "ok", "seconds": 1.0, "error": "", "result": result}
    return tables.summary(record | {"phases": [phase]}).splitlines()


def test_ranks_are_checked_and_measured_beside_one(settings: Settings) -> None:
    result = group.run_phase(settings, "tiny")
    assert result == settings.result_of("group:tiny")
    assert (result["error"], len(result["checks"])) == ("", 6)
    assert all(check["ok"] for check in result["checks"])
    for name, ranks in (("one rank", 1), ("two ranks", 2)):
        assert len(result["engines"][name]["ranks"]) == ranks
        figures = [figure for figure in result["figures"] if figure["group"] == name]
        assert [(f["figure"], f.get("batch")) for f in figures] == [
            ("prefill", None), ("decode", 1), ("decode", 2),
        ]  # fmt: skip
        for figure in figures:
            assert ("reduce_ms" in figure) == (ranks == 2 and figure["figure"] == "decode")
            assert figure.get("reduce_ms", 1) > 0
            assert figure.get("wait_ms", 1) > 0
    lines = lines_of(result)
    assert "group tiny: 6 of 6 checks are right" in lines
    assert sum(line.startswith("group tiny decode 2, two ranks: ") for line in lines) == 1


def test_emulated_gpus_have_ranks_in_turns_and_each_its_own(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "groups_of", groups_of)
    result = group.run_phase(settings, "tiny")
    assert (result["error"], len(result["checks"])) == ("", 14)
    assert {engine["device"] for engine in result["engines"].values()} == {
        "cuda_emulated", "cuda_emulated:0,0", "cuda_emulated:0,1",
    }  # fmt: skip
    assert {
        name
        for name, engine in result["engines"].items()
        if f"{group.RANK_WAITS} is 1" in engine["library_note"]
    } == {"two ranks waiting on one GPU", "two ranks waiting on one GPU, deterministic"}
    assert group.RANK_WAITS not in os.environ


def test_logits_of_ranks_that_differ_are_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(turbomind.Engine):
        def logits(self, *arguments: Any, **params: Any) -> np.ndarray:
            logits = super().logits(*arguments, **params)
            return logits if self.tp == 1 else logits[:, ::-1]

    monkeypatch.setattr(turbomind, "Engine", Wrong)
    result = group.run_phase(settings, "tiny")
    assert result["error"] == "two ranks: logits of one rank; two ranks: tokens of one rank"
    assert any(line.startswith("WRONG: tiny: two ranks: logits") for line in lines_of(result))


def test_tokens_that_depend_on_the_batch_are_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(turbomind.Engine):
        def stream(self, token_ids: Any, **params: Any) -> turbomind.Stream:
            batched = params.get("salt") == "batched" and self.tp == 2
            return super().stream(token_ids[:-1] if batched else token_ids, **params)

    monkeypatch.setattr(turbomind, "Engine", Wrong)
    assert group.run_phase(settings, "tiny")["error"] == "two ranks: batched and alone"


@pytest.mark.parametrize(
    ("gpus", "most", "devices"),
    [
        (1, 8, ["cuda", *ONE_GPU]),
        (2, 8, ["cuda", *ONE_GPU, "cuda:0,1"]),
        (3, 8, ["cuda", *ONE_GPU, "cuda:0,1"]),
        (8, 8, ["cuda", *ONE_GPU, "cuda:0,1,2,3,4,5,6,7"]),
        (8, 4, ["cuda", *ONE_GPU, "cuda:0,1,2,3"]),
    ],
)
def test_each_gpu_has_a_rank(
    gpus: int, most: int, devices: list[str], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "gpu_count", lambda settings: gpus)
    groups = groups_of(replace(settings, device="cuda"), most)
    assert [each.device for each in groups] == devices
    assert [each.ranks for each in groups] == [max(1, name.count(",") + 1) for name in devices]
