"""GPUs by rank: the forms of a device, how many "auto" takes, and the memory of each."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from devices import FakeGpus

from turbomind import InvalidRequest
from turbomind.config import device as device_module
from turbomind.config.device import (
    DEVICE_VARIABLE,
    TP_VARIABLE,
    device_name,
    gpu_fault,
    gpu_options,
    named_device,
    rank_count,
)
from turbomind.config.facts import machine as machine_facts

pytestmark = pytest.mark.cpu_only("GPUs are named here")

Machine = Callable[..., FakeGpus]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Sets the machine's GPUs; at first there are 20."""

    def set_gpus(status: str, fault: Any = "") -> FakeGpus:
        gpus = FakeGpus(status, fault)
        gpus.install(monkeypatch)
        return gpus

    set_gpus("20 CUDA devices")
    yield set_gpus
    device_module._tried.cache_clear()


def chosen(device: object = "auto", tp: object = None, **options: Any) -> tuple[str, int]:
    """Returns the name of the device and the number of ranks."""
    gpus = gpu_options(device, tp=tp, **options)
    ranks = rank_count(tp, device)
    assert len(gpus) in (0, ranks)
    return device_name(gpus), ranks


@pytest.mark.parametrize(
    ("device", "tp", "name"),
    [
        ("cpu", 3, "cpu"),
        ("cuda", None, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda", 3, "cuda:0,1,2"),
        ("cuda:1", None, "cuda:1"),
        ("cuda:1", 1, "cuda:1"),
        ("cuda:0,1", None, "cuda:0,1"),
        ("cuda:0,1", 2, "cuda:0,1"),
        ("cuda:3,0,2", None, "cuda:3,0,2"),
        ("cuda:0,0", None, "cuda:0,0"),
        ("cuda:19,19,19", 3, "cuda:19,19,19"),
        ("cuda:007,1", None, "cuda:7,1"),
        ("cuda:" + ",".join(map(str, range(16))), 16, "cuda:" + ",".join(map(str, range(16)))),
        ("cuda_emulated", None, "cuda_emulated"),
        ("cuda_emulated", 2, "cuda_emulated:0,1"),
        ("cuda_emulated:0", None, "cuda_emulated"),
        ("cuda_emulated:2", None, "cuda_emulated:2"),
        ("cuda_emulated:1,0", None, "cuda_emulated:1,0"),
        ("cuda_emulated:0,0", 2, "cuda_emulated:0,0"),
    ],
)
def test_a_device_names_the_gpu_of_each_rank(
    device: str, tp: int | None, name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the ranks; the variables do as the options do."""
    ranks = tp if name == "cpu" else name.count(",") + 1
    assert chosen(device, tp) == (name, ranks)
    kinds = {gpu.kind for gpu in gpu_options(device, tp=tp)}
    assert kinds == ({"cpu": set(), "cuda": {"cuda"}}.get(device.split(":")[0], {"emulated"}))
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    assert chosen("auto", tp) == (name, ranks)
    assert named_device() == (device, f"the environment variable {DEVICE_VARIABLE}")
    if tp is not None:
        monkeypatch.setenv(TP_VARIABLE, str(tp))
        assert chosen() == chosen(device) == (name, ranks)


FORMS = "expected 'auto', 'cpu', 'cuda' or 'cuda:' and numbers with commas between them"


@pytest.mark.parametrize(
    ("device", "tp", "message"),
    [
        *((text, None, FORMS) for text in (
            "cuda:", "cuda:0,", "cuda:,0", "cuda:0,,1", "cuda: 0", "cuda:0, 1", "cuda:0 ",
            "cuda:-1", "cuda:+1", "cuda:0;1", "cuda:0-1", "cuda:0,x", "cuda,0",
            "CUDA:0,1", "cuda:²", "cuda:٣", "cuda:99999",
            "cpu:0", "auto:0,1", "cuda_emulated:", "cuda_emulated:a", "",
        )),
        ("cuda:0,0,1", None, "expected GPUs that all differ, or one for all ranks"),
        ("cuda_emulated:1,0,1", 3, "expected GPUs that all differ, or one for all ranks"),
        ("cuda:20", None, "expected GPUs from 0 to 19"),
        ("cuda:0,1,20", 3, "expected GPUs from 0 to 19"),
        ("cuda_emulated:0,4", None, "expected GPUs from 0 to 3"),
        ("cuda:" + ",".join(map(str, range(17))), None, "17 GPUs, expected at most 16"),
        ("cuda:" + ",".join("0" * 17), 17, "17 GPUs, expected at most 16"),
    ],
)  # fmt: skip
def test_other_devices_are_refused(
    device: str, tp: int | None, message: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chosen(device, tp)
    assert str(refusal.value) == f"device is {device!r}, {message}"
    if device:  # an empty variable is not set
        monkeypatch.setenv(DEVICE_VARIABLE, device)
        with pytest.raises(InvalidRequest) as refusal:
            chosen(tp=tp)
        name = f"the environment variable {DEVICE_VARIABLE}"
        assert str(refusal.value) == f"{name} is {device!r}, {message}"


@pytest.mark.parametrize("device", [None, 0, ("cuda:0", "cuda:1"), [0, 1], b"cuda"])
def test_a_device_is_a_string(device: object, machine: Machine) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"is {device!r}, expected a string")):
        chosen(device)


def test_another_number_of_ranks_than_of_gpus_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names what asks for the ranks and what lists the GPUs."""

    def message(*arguments: object) -> str:
        with pytest.raises(InvalidRequest) as refusal:
            chosen(*arguments)
        return str(refusal.value)

    tp, device = (f"the environment variable {name}" for name in (TP_VARIABLE, DEVICE_VARIABLE))
    several = "device is 'cuda:0,1'"
    assert message("cuda:0,1", 3) == f"tp is 3, expected 2, the number of GPUs: {several}"
    assert message("cuda:0,1", 1) == f"tp is 1, expected 2, the number of GPUs: {several}"
    assert message("cuda:5", 2) == "tp is 2, expected 1, the number of GPUs: device is 'cuda:5'"
    monkeypatch.setenv(TP_VARIABLE, "4")
    assert message("cuda:0,1") == f"{tp} is 4, expected 2, the number of GPUs: {several}"
    assert chosen("cuda:0,1", 2) == ("cuda:0,1", 2)
    assert chosen("cuda") == ("cuda:0,1,2,3", 4)
    assert chosen("cpu") == ("cpu", 4)
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda:0,1")
    listed = f"expected 2, the number of GPUs: {device} is 'cuda:0,1'"
    assert message() == f"{tp} is 4, {listed}"
    assert message("auto", 3) == f"tp is 3, {listed}"
    assert chosen("cuda:2,3,4,5") == ("cuda:2,3,4,5", 4)


def test_more_ranks_than_gpus_are_refused(machine: Machine) -> None:
    with pytest.raises(InvalidRequest, match="^tp is 17, expected at most 16, the GPUs of device "):
        chosen("cuda", 17)
    with pytest.raises(InvalidRequest, match="^tp is 5, expected at most 4, .* 'cuda_emulated'$"):
        chosen("cuda_emulated", 5)
    machine("2 CUDA devices")
    assert chosen("cuda", 2) == ("cuda:0,1", 2)
    with pytest.raises(InvalidRequest, match="^tp is 3, expected at most 2, the GPUs of device "):
        chosen("cuda", 3)
    machine("no CUDA device: no driver")
    for device in ("cuda:0,1", "cuda:7,7"):
        with pytest.raises(
            InvalidRequest, match=f"^device is '{device}', .*: no CUDA device: no dri"
        ):
            chosen(device)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_auto_tries_the_gpus_that_it_takes(
    tp: int, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = machine("4 CUDA devices", {4: "out of order"})
    names = [chosen(tp=tp) for _ in range(2)]
    assert names == [("cuda:" + ",".join(map(str, range(tp))), tp)] * 2
    assert gpus.tried == list(range(tp))
    assert caplog.records == []
    assert chosen(tp=tp, isa="portable") == chosen(tp=tp, dtype="float32") == ("cpu", tp)


def test_auto_is_the_cpu_where_a_gpu_of_a_rank_does_not_work(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = machine("4 CUDA devices", {1: "out of order"})
    with caplog.at_level(logging.WARNING):
        assert [chosen(tp=3) for _ in range(2)] == [("cpu", 3)] * 2
    assert gpus.tried == [0, 1]
    assert gpu_fault(3) == "cuda:1: out of order"
    [record] = caplog.records
    assert record.getMessage() == (
        "4 CUDA devices, but cuda:1 does not work, so the CPU computes: out of order"
    )
    assert chosen() == ("cuda:0", 1)
    assert chosen("cuda", 3) == ("cuda:0,1,2", 3)  # by name: opening it raises the error


def test_auto_is_the_cpu_where_there_are_fewer_gpus_than_ranks(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = machine("1 CUDA device")
    with caplog.at_level(logging.WARNING):
        assert [chosen(tp=2) for _ in range(2)] == [("cpu", 2)] * 2
    assert gpus.tried == []
    assert gpu_fault(2) == "1 CUDA device, expected 2 or more: tp is 2"
    assert [r.getMessage() for r in caplog.records] == [
        "1 CUDA device, but tp is 2, so the CPU computes"
    ]
    machine("no CUDA device: no driver")
    assert chosen(tp=2) == ("cpu", 2)
    assert gpu_fault(2) == "no CUDA device: no driver"
    assert len(caplog.records) == 1


def test_info_reports_why_auto_takes_no_gpus(machine: Machine) -> None:
    for status, tp, device, fault in (
        ("1 CUDA device", 2, "cpu", "1 CUDA device, expected 2 or more: tp is 2"),
        ("1 CUDA device", 1, "cuda:0", None),
        ("2 CUDA devices", 2, "cuda:0,1", None),
    ):
        machine(status)
        found = machine_facts("auto", tp)
        assert (found["device"], found["gpu_fault"]) == (device, fault)
