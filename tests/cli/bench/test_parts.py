"""Parts of the benchmarks of sessions: disk, arrivals, figures."""

import gzip
import lzma
import statistics

import numpy as np
import pytest
from assets import asset

from lmchat.cli.bench import (
    disk,
    kv_tiers_bench,
    memory_pressure_bench,
    memory_pressure_mode,
    workload,
)
from lmchat.cli.bench.workload import Limits, Row
from lmchat.store import temporary
from turbomind.errors import InvalidRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


# --- the disk ----


def on_disk(folder):
    if disk.filesystem(folder) in disk.IN_MEMORY:
        pytest.skip("files are in memory here")


def test_dropped_files_are_out_of_the_page_cache(tmp_path):
    on_disk(tmp_path)
    (tmp_path / "below").mkdir()
    sizes = {"a": 3 << 20, "below/b": 70_001, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
        assert disk.resident_bytes(tmp_path / name) == size
    assert disk.resident_share(tmp_path) == 1
    dropped = disk.drop_files(tmp_path)
    assert dropped.bytes == sum(sizes.values())
    assert dropped.verified
    assert disk.resident_share(tmp_path) < 0.01
    (tmp_path / "a").read_bytes()
    assert disk.resident_bytes(tmp_path / "a") == 3 << 20


@pytest.mark.parametrize(
    ("resident", "verified"), [(0, True), (10, True), (11, False), (None, False)]
)
def test_a_drop_is_verified_only_if_the_system_reports_it(resident, verified):
    assert disk.Dropped(1000, resident).verified is verified


def test_the_probe_reads_all_of_its_file_from_the_disk(tmp_path, monkeypatch):
    on_disk(tmp_path)
    monkeypatch.setattr(disk, "PROBE_BYTES", (4 << 20, 8 << 20))
    assert [disk.ReadProbe(tmp_path, mib << 20).size >> 20 for mib in (1, 6, 99)] == [4, 6, 8]
    probe = disk.ReadProbe(tmp_path, 5 << 20)
    for _ in range(2):
        rate, verified = probe.measure()
        assert verified
        assert rate > 0
        assert disk.resident_share(tmp_path) == 1


def test_scratch_folders_are_in_the_data_directory_where_the_system_has_none(monkeypatch, data_dir):
    monkeypatch.setattr(temporary, "system_folders", list)
    monkeypatch.setattr(temporary, "_own", None)
    with disk.scratch(None) as folder:
        assert folder.is_relative_to(data_dir / "tmp")
    temporary._leave()


def test_scratch_folders_leave_nothing(tmp_path):
    with disk.scratch(str(tmp_path)) as folder:
        (folder / "pages").mkdir()
        (folder / "pages" / "x").write_text("x")
        assert len(disk.fsync_seconds(folder, 3)) == 3
        assert disk.disk_facts(folder)["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidRequest, match="no/such"), disk.scratch("/no/such"):
        pass


# --- the workload -----


def write_trace(path, opener, lines):
    with opener(path, "wt") as file:
        file.write(HEADER + "".join(lines))
    return str(path)


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_traces_are_read_plain_and_compressed(tmp_path, suffix, opener):
    lines = [
        "2023-11-16 18:15:50.9951690,396,109\n",  # out of order, as in traces of several servers
        "2023-11-16 18:15:46.6805900,374,44\n",
        "2023-11-16 18:16:46,91,16\n",
    ]
    rows = workload.read_trace(write_trace(tmp_path / f"t.csv{suffix}", opener, lines))
    assert [(row.context, row.generated) for row in rows] == [(374, 44), (396, 109), (91, 16)]
    assert [row.seconds for row in rows] == pytest.approx([0, 4.314579, 59.31941])


def test_the_shared_trace_is_read_whole():
    rows = workload.read_trace(str(asset("traces/AzureLLMInferenceTrace_conv.csv.xz")))
    assert len(rows) == 19_366
    assert statistics.median(row.context for row in rows) == 1020
    assert 58 * 60 < rows[-1].seconds < 59 * 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n1,2,3\n", "no column TIMESTAMP"),
        (HEADER + "yesterday,1,2\n", "yesterday"),
        (HEADER + "2023-11-16 18:15:50,many,2\n", "many"),
        (HEADER + "2023-11-16 18:15:50,1\n", "expected a CSV"),
        (HEADER + "2023-11-16 18:15:50,1,2\n", "two rows"),
        ("", "no column"),
    ],
)
def test_other_files_are_rejected_as_traces(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        workload.read_trace(str(tmp_path / "t.csv"))


def test_a_file_with_a_wrong_compression_suffix_is_rejected(tmp_path):
    for name in ("t.csv.xz", "t.csv.gz", "t.csv.bz2"):
        (tmp_path / name).write_text(HEADER)
        with pytest.raises(InvalidRequest, match="expected a CSV"):
            workload.read_trace(str(tmp_path / name))


def test_generated_rows_have_the_documented_lengths():
    rows = workload.generated_rows(20_000, seed=3)
    logs = np.log([row.context for row in rows])
    assert np.exp(logs.mean()) == pytest.approx(workload.CONTEXT[0], rel=0.03)
    assert logs.std() == pytest.approx(workload.CONTEXT[1], rel=0.03)
    gaps = np.diff([row.seconds for row in rows])
    assert gaps.min() >= 0
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as of independent arrivals
    assert (
        rows == workload.generated_rows(20_000, seed=3) != workload.generated_rows(20_000, seed=4)
    )


def test_arrivals_have_the_intervals_and_limits_of_the_trace():
    rows = [Row(10, 1, 5), Row(11, 1, 90), Row(17, 1, 0), Row(20, 1, 7), Row(99, 1, 1)]
    found = workload.arrivals(rows, 4, 5.0, sessions=3, limits=Limits(100, 16), seed=1)
    assert [each.at for each in found] == [0, 0.5, 3.5, 5.0]
    assert [each.reply for each in found] == [5, 16, 1, 7]
    assert all(0 <= each.session < 3 and 1 <= each.new <= 256 for each in found)
    many = workload.generated_rows(3000, seed=0)
    found = workload.arrivals(many, 3000, 9.0, sessions=3, limits=Limits(100, 16), seed=1)
    counts = np.bincount([each.session for each in found])
    assert counts.min() > 900  # uniform
    assert statistics.median(each.new for each in found) == pytest.approx(32, abs=3)


def test_contexts_are_those_of_the_trace_within_limit_and_budget():
    rows = [Row(i, context, 1) for i, context in enumerate([1, 50, 500, 70, 80])]
    limits = Limits(history=100, reply=1)
    assert workload.histories(rows, 9, 10_000, limits) == [16, 50, 100, 70, 80]
    assert workload.histories(rows, 3, 10_000, limits) == [16, 50, 100]
    assert workload.histories(rows, 9, 170, limits) == [16, 50, 100]


# --- figures ----


def test_percentiles_are_measured_values():
    random = np.random.default_rng(0)
    for count in (1, 2, 9, 10, 11, 100, 101):
        values = random.random(count).tolist()
        found = memory_pressure_mode.figures(values)
        for share in (50, 90, 99):
            expected = np.percentile(values, share, method="inverted_cdf")
            assert found[f"p{share}"] == expected
        assert found["mean"] == pytest.approx(np.mean(values))
        assert found["max"] == max(values)


def test_recomputed_tokens_are_the_context_without_cached_kv():
    # 100 tokens of context, 1 of a reply without KV yet, 20 new ones.
    asked = memory_pressure_mode.TurnResult(1.0, False, new=20, prompt=121, reused=70, loaded=30)
    assert (asked.past, asked.again) == (100, 30)
    summed = memory_pressure_mode.summary([asked, asked], {"host": 1, "disk": 3})
    assert summed["past_tokens"] == 200
    assert summed["again_tokens"] == 60
    assert summed["hit_rates"] == pytest.approx({"device": 0.4, "host": 0.075, "disk": 0.225})


def test_comparisons_are_with_the_other_modes():
    modes = {
        name: {"ttft": {"mean": mean, "p90": p90}}
        for name, mean, p90 in [("tiers", 1, 7), ("none", 4, 14), ("lru", 0.5, 10)]
    }
    assert memory_pressure_bench.compare(modes) == pytest.approx(
        {"mean_below_none": 0.75, "p90_below_none": 0.5, "mean_below_lru": -1, "p90_below_lru": 0.3}
    )
    del modes["tiers"]
    assert memory_pressure_bench.compare(modes) == {}


def test_the_bound_of_a_restore():
    assert kv_tiers_bench.bound_seconds(96 << 20, 1e9, 0.05) == pytest.approx(
        0.05 + 0.100663296 / 0.8
    )
