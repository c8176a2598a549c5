"""The nvcc part of the build: it is optional, no kernel of a step spills or has a stack frame, and
the machine code of kernels is as their sources mean it.

Shares the extension's build folder, so the kernels that are built already are only looked at.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from assets import ROOT
from driver_builds import CMAKE, JOBS, PATH, PLAIN, locked
from sass_listing import Instruction, Kernel, find_tools, read_kernels

from turbomind import _C

ENVIRONMENT = os.environ | {"PATH": PATH}
pytestmark = [
    pytest.mark.timeout(1800),  # the first build compiles every kernel
    pytest.mark.skipif(CMAKE is None, reason="cmake is not installed"),
]

# Kernels that every step, or every page that moves, waits for.
HOT = {
    "add_terms",
    "attend_decode",
    "attend_tiles",
    "choose_experts",
    "combine_rows",
    "copy_whole_pages",
    "embed_rows",
    "gate",
    "gather_rows",
    "gemm",
    "gemm_groups",
    "logprob_rows",
    "merge_attention",
    "move_page_tokens",
    "multiply_gate_rows",
    "meet_only",
    "next_tokens",
    "order_rows",
    "rank_columns",
    "rank_sum_norm_rows",
    "rank_sum_norm_wide_rows",
    "rank_sum_rows",
    "rms_norm_rows",
    "rms_norm_wide_rows",
    "rope_write_heads",
    "sample_best",
    "sample_cut",
    "sample_pick",
    "scale_and_cap_rows",
    "scaled_add_rows",
    "skinny",
    "skinny_groups",
}
# Once when a GPU is opened; in tests only; what its memory is measured with.
COLD = {"probe_device", "delay_next", "read_memory", "copy_memory"}

# What kernels may access in device memory before their wait, by load_constant and copy_constant16.
EARLY = {
    "attend_decode": {"LDG"},
    "merge_attention": {"LDG"},
    "rank_sum_norm_rows": {"LDG"},
    "rms_norm_rows": {"LDG"},
    "rope_write_heads": {"LDG"},
    "skinny": {"LDGSTS"},
}
# Accesses to device memory; LD, ST and ATOM are those whose kind of memory nvcc could not tell.
GLOBAL = {"LDG", "LDGSTS", "STG", "ATOMG", "RED", "UBLKCP"}
GENERIC = {"LD", "ST", "ATOM"}
SLAB_COPIES = 8  # of a thread, where no key of a split is out of reach
COPY_INSTRUCTIONS = 8  # at most, per copy

ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\S+)' for '(?P<arch>\w+)'\n"
    r".*Function properties for (?P=kernel)\n"
    r"\s*(?P<frame>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    fresh = [] if (folder / "CMakeCache.txt").exists() else ["-G", "Ninja", "-DTM_BUILD_PYTHON=OFF"]
    return run("cmake", "-S", str(ROOT), "-B", str(folder), *fresh, *options)


def plain_name(mangled: str) -> str:
    """The kernel's own name: the last identifier of the mangled path to it."""
    place, name = mangled.index("_ZN") + 3, ""
    while length := re.match(r"\d+", mangled[place:]):
        place += length.end()
        name = mangled[place : place + int(length[0])]
        place += int(length[0])
    return name


@pytest.fixture(scope="module")
def reports():
    """Reports of ptxas by (mangled name of the kernel, architecture)."""
    with locked(PLAIN):
        done = configure(PLAIN)
        assert done.returncode == 0, done.stderr[-4000:]
        if without := re.search(r"CUDA kernels: only emulated \((.*)\)", done.stdout, re.S):
            pytest.skip(without[1])
        done = run("cmake", "--build", str(PLAIN), "--parallel", JOBS, "--target", "cuda_kernels")
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    texts = [path.read_text() for path in sorted((PLAIN / "cuda").glob("*_cuda.ptxas"))]
    entries = [entry for text in texts for entry in ENTRY.finditer(text)]
    assert len(entries) == sum(text.count("Compiling entry function") for text in texts)
    return {(entry["kernel"], entry["arch"]): entry for entry in entries}


@pytest.fixture(scope="module")
def kernels(reports) -> list[Kernel]:
    """The machine code of all kernels for compute capability 9.0, which overlaps kernels."""
    if "sm_90a" not in {arch for _, arch in reports}:
        pytest.skip("TM_CUDA_ARCHS has no 90a-real")
    path = find_tools()
    if path is None:
        pytest.skip("no cuobjdump and nvdisasm: pip install -r requirements/test.txt")
    objects = sorted((PLAIN / "cuda").glob("*_cuda.o"))
    found = list(read_kernels(objects, "sm_90a", path))
    assert {kernel.name for kernel in found} == {name for name, arch in reports if arch == "sm_90a"}
    return found


def is_wait(one: Instruction) -> bool:
    return one.kind == "ACQBULK" and not one.predicate


def test_every_path_of_a_kernel_waits(kernels):
    bad = []
    for kernel in kernels:
        early = kernel.reached_without(is_wait)
        name = plain_name(kernel.name)
        if any(one.kind == "EXIT" for one in early):
            bad.append(f"{kernel.name} may end without griddepcontrol.wait")
        accessed = {one.kind for one in early} & (GLOBAL | GENERIC)
        if accessed != EARLY.get(name, set()):
            bad.append(f"{kernel.name} has {accessed} before griddepcontrol.wait")
    assert not bad, "\n".join(bad)


def test_no_load_bypasses_coherence(kernels):
    """A load of the read-only path may return what memory held before the previous kernel."""
    bad = [
        f"{kernel.name}: {one.name} {one.operands}"
        for kernel in kernels
        for one in kernel.code
        if (one.kind == "LDG" and "CONSTANT" in one.name) or one.kind in GENERIC
    ]
    assert not bad, "\n".join(bad)


def test_a_post_to_other_devices_has_one_fence(kernels):
    """A store that releases to the system contains the fence; a second one costs a microsecond."""
    bad, posting = [], 0
    for kernel in kernels:
        posts = sum(one.kind == "STG" and "STRONG.SYS" in one.name for one in kernel.code)
        fences = sum(one.kind == "MEMBAR" and "SYS" in one.name for one in kernel.code)
        posting += posts > 0
        if posts != fences:
            bad.append(f"{kernel.name}: {fences} fences, {posts} posts")
    assert not bad, "\n".join(bad)
    assert posting >= 5  # every kernel that begins with an exchange between ranks


def most_fragments(kernel: Kernel, transposed: bool) -> int:
    """Returns the most ldmatrix results that wait for their first mma at once."""
    waiting: set[int] = set()
    most = 0
    for one in kernel.code:
        if one.kind == "LDSM" and ("MT88" in one.name) == transposed:
            waiting.add(one.registers[0])
        elif one.kind == "HMMA":
            read = one.registers[1:3]
            waiting -= {register for r in read for register in (r, r - 2)}
        most = max(most, len(waiting))
    return most


ATTENTION = ("attend_decode", "attend_tiles")


def test_attention_loads_fragments_ahead(kernels):
    """Of a left side and two right sides the second is loaded while the first is multiplied."""
    bad = [
        f"{kernel.name}: {most} {what}, expected {expected}"
        for kernel in kernels
        if plain_name(kernel.name) in ATTENTION
        for what, transposed, expected in (("of K", False, 3), ("of V", True, 2))
        if (most := most_fragments(kernel, transposed)) < expected
    ]
    assert not bad, "fragments in registers at once\n" + "\n".join(bad)


def test_attention_copies_whole_slabs_without_conditions(kernels):
    bad = []
    for kernel in kernels:
        if plain_name(kernel.name) not in ATTENTION:
            continue
        copies = [sum(one.kind == "LDGSTS" for one in block) for block in kernel.blocks]
        whole = [len(b) for b, n in zip(kernel.blocks, copies, strict=True) if n == SLAB_COPIES]
        if not whole:
            bad.append(f"{kernel.name}: no block of {SLAB_COPIES} copies, at most {max(copies)}")
        elif max(whole) > SLAB_COPIES * COPY_INSTRUCTIONS:
            bad.append(f"{kernel.name}: {max(whole)} instructions for {SLAB_COPIES} copies")
    assert not bad, "\n".join(bad)


# Loads of 16 bytes by a thread of a sum: its pieces of the rows of four ranks.
PARTS_IN_FLIGHT = {"rank_sum_rows": 4, "rank_sum_norm_rows": 16, "rank_sum_norm_wide_rows": 16}


def test_sums_of_ranks_load_all_parts_before_they_add(kernels):
    """Each wait for a load is a round trip to the memory of another device."""
    bad = []
    for kernel in kernels:
        expected = PARTS_IN_FLIGHT.get(plain_name(kernel.name))
        if expected is None:
            continue
        kinds = [one.kind for one in kernel.code]
        met = kinds.index("BAR")  # all ranks have come
        loads = kernel.code[met : kinds.index("FADD", met)]
        wide = sum(one.kind == "LDG" and ".128" in one.name for one in loads)
        if wide < expected or any(one.kind == "STG" for one in loads):
            bad.append(f"{kernel.name}: {wide} loads of 16 bytes, expected {expected} and no store")
    assert not bad, "\n".join(bad)


def test_every_kernel_is_hot_or_cold(reports):
    assert {plain_name(kernel) for kernel, _ in reports} == HOT | COLD
    kernels = {kernel for kernel, _ in reports}
    for arch in {arch for _, arch in reports}:
        assert {kernel for kernel, of in reports if of == arch} == kernels


def test_hot_kernels_do_not_spill(reports):
    bad = [
        f"{kernel} for {arch}: {entry['frame']} bytes stack frame, "
        f"{entry['stores']} and {entry['loads']} bytes spilled"
        for (kernel, arch), entry in reports.items()
        if plain_name(kernel) in HOT and {entry["frame"], entry["stores"], entry["loads"]} != {"0"}
    ]
    assert not bad, "\n".join(bad)


def test_assembly_that_accesses_memory_is_ordered():
    """Without the clobber the compiler may move the access over plain stores and barriers."""
    source = (ROOT / "cpp" / "cuda" / "kernel_nvcc.h").read_text()
    found = [one for one in re.findall(r"asm[^;]*?\(.*?\);\n", source, re.S) if "[%" in one]
    assert len(found) >= 9
    assert [one for one in found if "volatile" not in one or '"memory"' not in one] == []


def test_a_toolkit_that_does_not_work_is_fatal_only_when_asked_for(tmp_path):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'nvcc: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    toolkit = tmp_path / "toolkit"
    toolkit.mkdir()
    part = [f"-DTM_NVCC={broken}", f"-DTM_CUDA_INCLUDE={toolkit}", f"-DTM_CUDART={toolkit}"]
    folder = tmp_path / "build"
    done = configure(folder, "-DTM_CUDA=AUTO", *part)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "only emulated" in done.stdout
    assert "out of order" in done.stdout
    done = configure(folder, "-DTM_CUDA=ON")
    assert done.returncode != 0
    assert "out of order" in done.stderr
    done = configure(folder, "-DTM_CUDA=OFF")
    assert done.returncode == 0
    assert "only emulated (TM_CUDA is OFF)" in done.stdout
    done = configure(folder, "-DTM_CUDA=maybe")
    assert done.returncode != 0
    assert "got 'maybe', expected AUTO, ON or OFF" in done.stderr


def test_devices_and_status_agree():
    devices = _C.gpu_devices()
    real = [device for device in devices if device.kind == "cuda"]
    assert [device.kind for device in devices if device not in real] == ["emulated"] * 4
    assert _C.cuda_status().startswith("no CUDA device: ") == (not real)
    for device in devices:
        assert device.total_bytes > 0
        assert device.multiprocessors > 0
