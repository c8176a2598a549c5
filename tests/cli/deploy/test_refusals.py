"""What `lmchat deploy` refuses before anything starts."""

import os
import socket

import pytest
from deployment import needs_haproxy
from devices import FakeGpus
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.deploy import placement, proxy, registry
from lmchat.errors import Error, InvalidRequest, NotFound


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Fails where a process is started; only the version of HAProxy may be asked for."""

    def refuse(*_arguments, **_options):
        raise AssertionError("a process was started")

    monkeypatch.setattr("lmchat.deploy.process.Process.supervise", refuse)


def refused(*arguments):
    done = CliRunner().invoke(app, ["deploy", *arguments])
    assert isinstance(done.exception, Error), done.output
    return str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas is 0, expected 1 to 1024"),
        (["--replicas", "1025"], "--replicas is 1025, expected 1 to 1024"),
        (["--replicas", "1000000000"], "--replicas is 1000000000, expected 1 to 1024"),
        (["--replicas", "2", "--host", "0.0.0.0"], "which other machines can reach, and there is"),
        (["--replicas", "2", "--cache-memory", "1TiB"], "that each of 2 replicas may use now"),
        (["--replicas", "2", "--cache-memory", "many"], "cache_memory is 'many'"),
        (["--replicas", "2", "--max-batch-size", "0"], "max_batch_size is 0"),
        (["--replicas", "2", "--start-seconds", "0"], "--start-seconds is 0.0, expected more"),
        (["--replicas", "2", "--drain-seconds", "-1"], "--drain-seconds is -1.0"),
        (["--replicas", "2", "--device", "cuda:1"], "device is 'cuda:1' for 2 replicas"),
        (
            ["--replicas", "2", "--device", "cuda:0,1", "--tp", "2"],
            "device is 'cuda:0,1' for 2 replicas, expected 'cuda'",
        ),
        (["--replicas", "1", "--device", "cuda:0,1", "--tp", "3"], "tp is 3, expected 2, the num"),
        (["./status", "--replicas", "1"], "./status"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    "option",
    [
        ("--threads", "0"), ("--max-context-tokens", "0"), ("--step-ms", "-1"),
        ("--step-ms", "nan"), ("--max-batch-size", "5000"), ("--prefill-chunk", "0"),
        ("--load-format", "half"),
        ("--max-queue", "-1"), ("--max-wait", "0"), ("--host-memory", "lots"), ("--tp", "0"),
        ("--quantize", "int3"), ("--group-size", "7"), ("--dtype", "int8"), ("--isa", "z80"),
        ("--device", "tpu"), ("--kv-dtype", "int8"), ("--disk-quota", "much"), ("--port", "70000"),
        ("--rope-length", "0"), ("--limit", "x=1"), ("--log-level", "loud"), ("--model-name", ""),
        ("--allow-origin", "x"), ("--root-path", "x"), ("--cache-memory", "0"),
        ("--api-keys", "/no/such/file"),
    ],
)  # fmt: skip
def test_an_option_that_serve_refuses_is_refused_in_its_words(option, monkeypatch, tmp_path):
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path))
    served = CliRunner().invoke(app, ["serve", "--port", "0", *option])
    assert isinstance(served.exception, Error), served.output
    assert refused("--replicas", "2", *option) == str(served.exception)


def test_a_page_that_other_machines_reach_needs_a_key():
    pytest.importorskip("gradio")
    message = refused("--replicas", "2", "--web", "--host", "0.0.0.0", "--insecure")
    assert "--host is '0.0.0.0', which other machines can reach: the page needs a key" in message


def test_a_page_needs_its_packages(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "the page needs gradio" in refused("--replicas", "2", "--web")


@pytest.mark.parametrize("option", ["--api-key=ann:12345678", "--uds=socket"])
def test_options_that_a_deployment_does_not_have_are_unknown(option):
    done = CliRunner().invoke(app, ["deploy", "memo", "--replicas", "2", option])
    assert done.exit_code == 2
    assert "No such option" in done.output


def test_more_replicas_than_gpus_are_refused(monkeypatch):
    class Gpu:
        kind = "cuda"

    monkeypatch.setattr("lmchat.deploy.placement._C.gpu_devices", lambda: [Gpu(), Gpu()])
    monkeypatch.delenv("TURBOMIND_DEVICE")
    assert "--replicas is 3, expected at most 2, the number of GPUs" in refused("--replicas", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    found = [place.environment["CUDA_VISIBLE_DEVICES"] for place in placement.places(2, None, {})]
    assert found == ["5", "7"]


def test_each_replica_has_a_gpu_for_each_rank(monkeypatch):
    """Neighbouring GPUs, which its process sees as the first ones."""
    FakeGpus("5 CUDA devices").install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def found(replicas, **options):
        placed = placement.places(replicas, None, options)
        visible = [place.environment["CUDA_VISIBLE_DEVICES"] for place in placed]
        assert [place.device for place in placed] == [f"GPU {gpus}" for gpus in visible]
        assert {place.cache_memory for place in placed} == {None}
        return visible

    for device in ("auto", "cuda"):
        assert found(2, device=device, tp=2) == ["0,1", "2,3"]
        assert found(1, device=device, tp=5) == ["0,1,2,3,4"]
        assert found(5, device=device) == ["0", "1", "2", "3", "4"]
    monkeypatch.setenv("TURBOMIND_TP", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-ab,3,1,0")
    assert found(2) == ["7,GPU-ab", "3,1"]
    with pytest.raises(InvalidRequest, match="is 3 with tp 2, 6 GPUs, expected at most 5"):
        found(3)
    with pytest.raises(InvalidRequest, match="is 2 with tp 3, 6 GPUs, expected at most 5"):
        found(2, tp=3)
    with pytest.raises(InvalidRequest, match="tp is 6, expected at most 5, the GPUs of device"):
        found(1, tp=6, device="cuda")
    [place] = placement.places(1, None, {"device": "cuda:3,1"})
    assert (place.device, place.visible) == ("cuda:3,1", None)
    assert placement.places(2, None, {"device": "cpu"})[0].device.startswith("CPU ")


def test_a_missing_haproxy_is_refused(monkeypatch):
    monkeypatch.setattr(proxy, "_programs", lambda: iter(()))
    assert "there is no HAProxy" in refused("--replicas", "1")


@needs_haproxy
def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused("--replicas=1", f"--port={port}")


@needs_haproxy
def test_a_second_deployment_is_refused_and_the_folder_of_a_dead_one_removed(data_dir):
    with registry.claimed() as claim:
        assert f"a deployment runs on {data_dir}, process {os.getpid()}" in refused("--replicas=1")
    folder = claim.folder
    assert not folder.exists()
    folder.mkdir()
    (data_dir / "deployment").write_text(f'{{"pid": 1, "folder": "{folder}"}}')
    with registry.claimed() as claim:
        assert not folder.exists()
        assert claim.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("command", ["status", "restart", "stop"])
def test_without_a_deployment_there_is_nothing_to_show_or_stop(command, data_dir):
    for content in (None, "", "[]", '{"pid": 1, "folder": "/no/such"}'):
        if content is not None:
            (data_dir / "deployment").write_text(content)
        assert f"no deployment runs on {data_dir}" in refused(command)


def test_a_folder_for_sockets_has_a_short_path(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with registry.claimed() as claim:
        assert len(os.fsencode(claim.folder / "replica-9999")) <= 107


def test_replicas_get_neighbouring_cores_and_share_them_only_if_there_are_few():
    cores = [frozenset({n, n + 5}) for n in range(5)]
    assert placement.split(cores, 2) == [{0, 1, 5, 6}, {2, 3, 4, 7, 8, 9}]
    assert placement.split(cores, 5) == cores
    assert placement.split(cores[:2], 3) == [cores[0], cores[1], cores[0]]


def test_replicas_share_the_free_memory(monkeypatch):
    monkeypatch.setattr(placement, "available_memory", lambda: 8 << 30)
    shares = [
        {place.cache_memory for place in placement.places(n, None, {"cache_memory": "50%"})}
        for n in (1, 2, 4)
    ]
    assert [len(share) for share in shares] == [1, 1, 1]
    one, two, four = (share.pop() for share in shares)
    assert 3 << 30 < one < 4 << 30
    assert 2 * four < two < one / 2
    with pytest.raises(InvalidRequest, match="that each of 5 replicas may use now: lower cache_me"):
        placement.places(5, None, {"cache_memory": "1700MiB"})


def test_the_error_of_status_is_that_of_a_missing_object():
    with pytest.raises(NotFound):
        registry.status()
