"""Memory that an engine needs, against limits of control groups and free memory."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from checkpoints import TINY, prompt

import turbomind
from turbomind import _C, InvalidRequest
from turbomind.config.defaults import CPU, CacheSize
from turbomind.machine import available_memory, physical_cores, physical_memory

MIB = 1 << 20


def system(root: Path, cgroup: str, free: int, files: dict[str, str]) -> Path:
    """Writes a tree with the files of /proc and /sys that are read."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {free // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(most: object, used: int, cached: int = 0) -> dict[str, str]:
    """Returns the files of a control group, version 2."""
    stat = f"anon 5\nactive_file {cached // 3}\ninactive_file {cached - cached // 3}\n"
    return {"memory.max": f"{most}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def group_of_v1(most: int, used: int, cached: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{most}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"cache 1\nactive_file 1\ntotal_active_file {cached // 3}\n"
        f"total_inactive_file {cached - cached // 3}\n",
    }


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


CASES = {
    "no limit": ("0::/a\n", under("a", group("max", 5)), 800 * MIB),
    "own group": ("0::/a/b\n", under("a/b", group(300 * MIB, 100 * MIB)), 200 * MIB),
    "group above": (
        "0::/a/b\n",
        under("a/b", group("max", 0)) | under("a", group(100 * MIB, 60 * MIB)),
        40 * MIB,
    ),
    "files can be dropped": ("0::/a\n", under("a", group(90 * MIB, 80 * MIB, 30 * MIB)), 40 * MIB),
    "more used than allowed": ("0::/a\n", under("a", group(10 * MIB, 20 * MIB)), 0),
    "a container that is its own root": ("0::/outside\n", group(70 * MIB, 0), 70 * MIB),
    "version 1": (
        "5:cpu:/x\n4:cpuset,memory:/x\n0::/\n",
        under("memory/x", group_of_v1(64 * MIB, 14 * MIB, 6 * MIB)),
        56 * MIB,
    ),
    "version 1 without a limit": (
        "4:memory:/x\n",
        under("memory/x", group_of_v1(0x7FFFFFFFFFFFF000, 14 * MIB)),
        800 * MIB,
    ),
    "damaged": ("4:memory:/x\n", under("memory/x", {"memory.limit_in_bytes": "?"}), 800 * MIB),
}


@pytest.mark.parametrize("name", CASES)
def test_available_memory_is_what_every_limit_leaves(name: str, tmp_path: Path) -> None:
    cgroup, files, expected = CASES[name]
    assert available_memory(system(tmp_path, cgroup, 800 * MIB, files)) == expected


CPU_CASES: dict[str, tuple[str, dict[str, str], int | None]] = {
    "no limit": ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
    "no files": ("0::/a\n", {}, None),
    "a container that is its own root": ("0::/outside\n", {"cpu.max": "300000 100000\n"}, 3),
    "a group that is not seen": ("0::/../../x\n", {"cpu.max": "200000 100000\n"}, 2),
    "a unit of systemd": ("0::/s.slice/u.service\n", {"s.slice/u.service/cpu.max": "9 3\n"}, 3),
    "the slice above": (
        "0::/s.slice/u.service\n",
        {"s.slice/u.service/cpu.max": "max 100000\n", "s.slice/cpu.max": "400000 100000\n"},
        4,
    ),
    "the smallest of two": ("0::/a/b\n", {"a/b/cpu.max": "5 1\n", "a/cpu.max": "2 1\n"}, 2),
    "rounded down": ("0::/\n", {"cpu.max": "199999 100000\n"}, 1),
    "less than one": ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
    "version 1": (
        "5:cpu,cpuacct:/x/y\n4:cpuset:/\n0::/\n",
        {"cpu/x/cpu.cfs_quota_us": "250000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
        2,
    ),
    "version 1 without a limit": (
        "5:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "damaged": ("0::/\n", {"cpu.max": "?\n"}, None),
}


@pytest.mark.parametrize("name", CPU_CASES)
def test_the_quota_is_the_smallest_of_the_groups_rounded_down(name: str, tmp_path: Path) -> None:
    cgroup, files, expected = CPU_CASES[name]
    assert _C.cpu_quota(str(system(tmp_path, cgroup, MIB, files))) == expected


def test_threads_are_at_most_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [frozenset({cpu}) for cpu in range(4)]
    monkeypatch.setattr("turbomind.machine.cores", lambda: cores)
    for quota, threads in ((None, 4), (1, 1), (3, 3), (9, 4)):
        monkeypatch.setattr(_C, "cpu_quota", lambda _root, quota=quota: quota)
        assert physical_cores() == threads


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_available_memory_is_what_the_limits_of_the_process_leave(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(kind: int) -> tuple[int, int]:
        most = 300 * MIB if kind == limit else resource.RLIM_INFINITY
        return most, most

    monkeypatch.setattr(resource, "getrlimit", limits)
    root = system(tmp_path, "", 800 * MIB, {})
    (root / "proc/self/status").write_text("VmSize:\t102400 kB\nVmData:\t 102400 kB\n")
    assert available_memory(root) == 200 * MIB


def test_without_proc_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == physical_memory()


@pytest.fixture(name="config")
def made_config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def limited(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    for module in ("turbomind.engine.plan", "turbomind.config.defaults"):
        monkeypatch.setattr(f"{module}.available_memory", lambda: available)


def test_an_engine_that_does_not_fit_is_refused_with_the_parts(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 400 * MIB)
    options = {"load_format": "dummy", "device": "cpu", "threads": 1}
    with pytest.raises(
        InvalidRequest,
        match=r"needs \d+ MiB of memory: weights as float32 \d MiB \(dtype\), KV cache 300 MiB "
        r"\(cache_memory\), host tier 250 MiB \(host_memory\), steps \d\d MiB \(prefill_chunk\); "
        r"expected at most the 400 MiB that this process may use now: "
        r"lower dtype or cache_memory or host_memory or prefill_chunk",
    ):
        turbomind.Engine(config, cache_memory="300MiB", host_memory="250MiB", **options)
    turbomind.Engine(config, cache_memory="300MiB", **options).close()


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 40 * MIB)
    monkeypatch.setattr("turbomind.engine.plan.load", None)
    with pytest.raises(InvalidRequest, match="weights as float32"):
        turbomind.Engine(config, load_format="dummy", device="cpu", dtype="float32")


def test_steps_include_the_work_memory_of_attention(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 40 * MIB)
    needed = []
    for threads in (1, 64):
        with pytest.raises(InvalidRequest, match=r"steps \d+ MiB") as refusal:
            turbomind.Engine(
                config, load_format="dummy", device="cpu", threads=threads, cache_memory="40MiB"
            )
        needed.append(int(str(refusal.value).split("steps ")[1].split()[0]))
    expected = [_C.attention_scratch_bytes(_C.resolve_isa("auto"), t, 16, 16) for t in (1, 64)]
    assert needed[1] - needed[0] == pytest.approx((expected[1] - expected[0]) / MIB, abs=1.1)


def test_a_cache_of_all_memory_fits_while_the_free_memory_shrinks(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(400 * MIB, 0, -MIB))
    for module in ("turbomind.engine.plan", "turbomind.config.defaults"):
        monkeypatch.setattr(f"{module}.available_memory", lambda: next(left))
    options = {"load_format": "dummy", "device": "cpu", "threads": 1}
    turbomind.Engine(config, cache_memory="100%", **options).close()


def test_the_default_cache_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1000 * MIB)
    assert CacheSize(None).on_host() == 800 * MIB
    assert CacheSize(None).on_host(needed=2000 * MIB) == 0
    assert CacheSize("2GiB").on_host() == 2 << 30
    limited(monkeypatch, 100 << 30)
    assert CacheSize(None, CPU).on_host() == 2 << 30


def test_the_default_cache_leaves_room_for_steps_and_the_host_tier(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 600 * MIB)
    options = {"load_format": "dummy", "device": "cpu", "threads": 1, "host_memory": "100MiB"}
    for cache_memory, share in ((None, 0.8), ("100%", 1.0)):
        with turbomind.Engine(config, cache_memory=cache_memory, **options) as engine:
            used = engine.stats().cache_bytes
        assert used < share * (600 - 100 - 48) * MIB  # steps need more than 48 MiB


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits come in pieces of 64 rows."""
    monkeypatch.setattr("turbomind.config.memory_budget._LOGITS", 1)


@pytest.mark.parametrize("reuse", [True, False])
def test_logits_in_pieces_are_those_of_one_piece(
    reuse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with turbomind.Engine(
        tmp_path, load_format="dummy", cache_memory="8MiB", prefix_reuse=reuse, device="cpu"
    ) as engine:
        ids = prompt(250, engine.vocab_size)
        whole = engine.logits(ids, salt="one")
        monkeypatch.setattr("turbomind.config.memory_budget._LOGITS", 1)
        before = engine.stats().tokens_prefilled
        pieces = list(engine.iter_logits(ids, salt="other", priority=1))
        assert [len(piece) for piece in pieces] == [64, 64, 64, 58]
        assert np.array_equal(np.concatenate(pieces), whole)
        assert engine.stats().tokens_prefilled - before == 250, "nothing is computed twice"
        assert np.array_equal(engine.logits(ids, salt="third"), whole)
        assert engine.stats().handles == 0


def test_other_requests_run_between_pieces_of_logits(small_pieces: None, tmp_path: Path) -> None:
    """A reader that takes no further piece delays no other request."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with turbomind.Engine(
        tmp_path, load_format="dummy", cache_memory="8MiB", device="cpu"
    ) as engine:
        pieces = engine.iter_logits(prompt(200, engine.vocab_size))
        next(pieces)
        assert engine.generate([1, 2], max_new_tokens=2, ignore_eos=True).token_ids
        assert engine.stats().slots == 0
        pieces.close()
        assert engine.stats().handles == 0


def test_logits_that_do_not_fit_are_refused_with_their_size(
    small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with turbomind.Engine(
        tmp_path, load_format="dummy", cache_memory="8MiB", device="cpu"
    ) as engine:
        ids = prompt(200, engine.vocab_size)
        needed = 4 * engine.vocab_size * (200 + 64)
        monkeypatch.setattr("turbomind.config.memory_budget.available_memory", lambda: needed - 1)
        with pytest.raises(InvalidRequest, match="the logits of 200 tokens need .* iter_logits"):
            engine.logits(ids)
        assert sum(len(piece) for piece in engine.iter_logits(ids)) == 200
        with pytest.raises(InvalidRequest, match="token_ids is empty"):
            next(engine.iter_logits([]))
        with pytest.raises(InvalidRequest, match="temperature"):
            next(engine.iter_logits(ids, temperature=1.0))
