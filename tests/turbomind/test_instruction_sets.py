"""The instruction sets of this machine, and why AMX is not among them."""

from __future__ import annotations

import errno
import json
import logging
import re
from pathlib import Path

import pytest
from checkpoints import TINY

import turbomind
from turbomind import _C, describe
from turbomind.loading.loader import float16_note


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((False, False, 0), ""),
        ((True, True, 0), ""),
        ((True, False, 0), "the system does not save its registers"),
        ((True, True, errno.EPERM), r"refuses it to this process \(arch_prctl: Operation not perm"),
        ((True, True, errno.EINVAL), r"\(arch_prctl: Invalid argument\); Linux before 5.16 and"),
    ],
)
def test_the_reason_why_amx_is_not_used(facts: tuple[bool, bool, int], words: str) -> None:
    found = _C.amx_hindrance_of(*facts)
    assert re.search(words, found) if words else found == ""


def test_amx_is_used_or_a_reason_is_given() -> None:
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("the processor has no AMX, or the system does not list it")
    assert "amx" in _C.available_isas() or _C.amx_hindrance() != ""


@pytest.mark.parametrize(
    ("dtype", "isa", "noted"),
    [
        ("float16", "avx512_bf16", True),
        ("float16", "amx", True),
        ("float16", "avx512", False),
        ("bfloat16", "amx", False),
    ],
)
def test_float16_is_noted_where_bfloat16_is_faster(
    dtype: str, isa: str, noted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "torch_dtype": dtype}))
    assert ("dtype 'bfloat16'" in float16_note(describe(path), isa)) == noted


def test_an_engine_logs_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "amx_hindrance", lambda: "this processor has AMX, but")
    monkeypatch.delenv("TURBOMIND_ISA", raising=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    with caplog.at_level(logging.WARNING):
        turbomind.Engine(path, load_format="dummy", device="cpu", cache_memory="2MiB").close()
    assert [r.message for r in caplog.records] == ["this processor has AMX, but"]
