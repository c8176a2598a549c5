"""Records of GPUs follow their schema, STATUS.md and README.md are up to date, and a program checks
every kernel."""

import json

import pytest
from assets import ROOT
from gpu import kernels

from lmchat.archive.schema import Schema

RECORDS = kernels.read_records()


def schema() -> Schema:
    return Schema(json.loads((kernels.RECORDS / "schema.json").read_text()))


@pytest.mark.parametrize("name", [*RECORDS])
def test_records_follow_the_schema(name):
    schema().check(RECORDS[name])
    assert not RECORDS[name]["emulated"]
    assert not RECORDS[name]["quick"]


def test_status_lists_the_kernels_without_a_record():
    """`python tools/gpu_check.py --status` writes it."""
    text = kernels.status_text(RECORDS)
    print(text)
    assert kernels.STATUS.read_text() == text


def test_the_readme_states_emulation_only_while_a_kernel_has_no_record():
    marked = kernels.MARK in (ROOT / "README.md").read_text()
    assert marked == bool(kernels.unchecked(RECORDS))


def test_every_kernel_has_programs_that_check_it():
    assert sorted(kernels.CHECKED_BY) == kernels.kernel_files(), "fill tools/gpu/kernels.py"
    for driver in kernels.drivers():
        assert len(list(ROOT.glob(f"cpp/tests/**/{driver}_main.cc"))) == 1, driver


def test_the_hash_of_a_kernel_covers_all_included_files():
    sources = kernels.sources_of("cpp/ops/attention_decode_cuda.cu")
    assert {
        "cpp/ops/attention_decode_cuda.cu",
        "cpp/ops/attention_tile_cuda.h",  # included by the file
        "cpp/ops/attention_cuda.h",  # included by that header
        "cpp/cuda/kernel_nvcc.h",
        "cpp/core/dtype.h",
    } <= set(sources)
    assert not [name for name in sources if "norm" in name]
    assert "cpp/cuda/kernel_emulated.h" not in sources  # nvcc does not compile it


@pytest.mark.parametrize(
    ("kernel", "planners"),
    [
        ("cpp/ops/attention_prefill_cuda.cu", {"cpp/ops/attention_cuda.cc"}),
        ("cpp/ops/sample_cuda.cu", {"cpp/model/device/device_sampler.cc"}),
        ("cpp/ops/norm_cuda.cu", {"cpp/ops/norm.cc"}),
        ("cpp/linear/gemm_cuda.cu", {"cpp/linear/linear_cuda.cc", "cpp/cuda/cublaslt.cc"}),
        ("cpp/cache/page_copy_cuda.cu", {"cpp/cache/page_copy_cuda.cc"}),
    ],
)
def test_the_hash_of_a_kernel_covers_its_planners(kernel, planners):
    launchers = {"cpp/cuda/toolkit/launcher.cc", "cpp/cuda/toolkit/cuda_gpu.cc"}
    sources = {name for name in kernels.sources_of(kernel) if name.endswith(".cc")}
    assert sources == planners | launchers


def test_a_changed_planner_changes_the_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    folder = tmp_path / "cpp" / "ops"
    folder.mkdir(parents=True)
    (folder / "a_cuda.cu").write_text("const ACuda kACuda{run};\n")
    (folder / "a.cc").write_text("TM_GPU_TABLE(ACuda, kACuda, a_cuda)\nint rows = 4;\n")
    (folder / "b.cc").write_text("int unrelated = 4;\n")
    before = kernels.source_hash("cpp/ops/a_cuda.cu")
    (folder / "b.cc").write_text("int unrelated = 5;\n")
    assert kernels.source_hash("cpp/ops/a_cuda.cu") == before
    (folder / "a.cc").write_text("TM_GPU_TABLE(ACuda, kACuda, a_cuda)\nint rows = 8;\n")
    assert kernels.source_hash("cpp/ops/a_cuda.cu") != before


def test_a_changed_header_invalidates_the_record(tmp_path, monkeypatch):
    """In a small tree a kernel passes, its header changes, and it passes again."""
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    folder = tmp_path / "cpp" / "ops"
    folder.mkdir(parents=True)
    (folder / "a_cuda.cu").write_text('#include "ops/a_cuda.h"\n')
    (folder / "a_cuda.h").write_text("#pragma once\n")
    monkeypatch.setattr(kernels, "CHECKED_BY", {"cpp/ops/a_cuda.cu": ("x_test", "y_test")})

    def record(emulated=False, **passed):
        return {
            "what": "check",
            "emulated": emulated,
            "kernels": kernels.kernel_table(passed),
        }

    name = "cpp/ops/a_cuda.cu"
    assert kernels.unchecked({}) == [name]
    assert "nothing was run on a GPU yet" in kernels.status_text({})
    assert kernels.unchecked({"1": record(x_test=True)}) == [name]
    assert kernels.unchecked({"1": record(x_test=True, y_test=False)}) == [name]
    assert kernels.unchecked({"1": record(x_test=True, y_test=True, emulated=True)}) == [name]
    first = {"1": record(x_test=True, y_test=True)}
    assert kernels.unchecked(first) == []
    assert "every kernel has passed" in kernels.status_text(first)
    (folder / "a_cuda.h").write_text("#pragma once\nint changed;\n")
    assert kernels.unchecked(first) == [name]
    assert f"`{name}`" in kernels.status_text(first)
    assert kernels.unchecked(first | {"2": record(x_test=True, y_test=True)}) == []
