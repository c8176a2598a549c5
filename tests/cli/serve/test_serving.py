"""`lmchat serve` as a process: its start, its end by signals, its socket, its log."""

import contextlib
import re
import signal
import socket
import subprocess

import command
import httpx
from serving_process import poll_ready, serving

import lmchat

LONG = {"text_input": "Once", "max_tokens": 600, "ignore_eos": True}


@contextlib.contextmanager
def streaming(url, **settings):
    """Yields the lines of a long reply that has begun."""
    path = "/v2/models/memo/generate_stream"
    with httpx.stream("POST", url + path, json={**LONG, **settings}, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        yield lines


def test_sigterm_lets_running_replies_finish():
    with serving() as (process, url):
        with streaming(url) as lines:
            process.send_signal(signal.SIGTERM)
            refused = poll_ready(url)
            assert refused.status_code == 503
            body = {"text_input": "x", "max_tokens": 1}
            assert httpx.post(url + "/v2/models/memo/generate", json=body).status_code == 503
            assert httpx.get(url + "/health").status_code == 200
            assert "lmchat:num_requests_running" in httpx.get(url + "/metrics").text
            assert sum(1 for _ in lines) > 100
        assert process.wait(60) == 0


def test_sighup_lets_running_replies_finish_however_often_it_comes():
    with serving() as (process, url):
        with streaming(url) as lines:
            process.send_signal(signal.SIGHUP)
            assert poll_ready(url).status_code == 503
            process.send_signal(signal.SIGHUP)
            assert sum(1 for _ in lines) > 100
        assert process.wait(60) == 0


def test_a_server_that_ignores_sighup_runs_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving() as (process, url):
            process.send_signal(signal.SIGHUP)
            with streaming(url) as lines:
                assert sum(1 for _ in lines) > 100
            assert httpx.get(url + "/ready").status_code == 200
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_the_time_to_drain_replies_are_cut_and_the_end_is_orderly():
    with serving("--drain-seconds", "0") as (process, url), streaming(url) as lines:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert sum(1 for _ in lines) < 600


def test_detached_replies_finish_too(data_dir):
    with serving() as (process, url):
        made = httpx.post(url + "/v1/conversations", json={}).json()["id"]
        body = {
            "model": "memo", "conversation": made, "input": "Hello!", "background": True,
            "max_output_tokens": 64,
        }  # fmt: skip
        assert httpx.post(url + "/v1/responses", json=body, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with lmchat.ChatEngine("memo", store=data_dir) as engine:
        (info,) = engine.sessions("local", hidden=True)
        *_, reply = engine.session(info.name).turns
    assert reply.finish_reason in ("stop", "length")


def test_a_second_signal_exits_at_once_and_keeps_the_turn(data_dir):
    with serving() as (process, url):
        made = httpx.post(url + "/v1/conversations", json={}).json()["id"]
        body = {"model": "memo", "conversation": made, "input": "Hello!", "max_output_tokens": 16}
        reply = httpx.post(url + "/v1/responses", json=body, timeout=60).json()
        shown = reply["output"][-1]["content"][0]["text"]
        with streaming(url):
            process.send_signal(signal.SIGTERM)
            poll_ready(url)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
    with lmchat.ChatEngine("memo", store=data_dir) as engine:
        (info,) = engine.sessions("local", hidden=True)
        turns = engine.session(info.name).turns
    assert [turn.text for turn in turns] == ["Hello!", shown]


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as used:
        done = command.lmchat("serve", "--port", str(used.getsockname()[1]))
    assert done.returncode == 2
    assert re.fullmatch(r"lmchat: port \d+ of 127.0.0.1 is in use.*\n", done.stderr)


def test_localhost_is_served_at_each_of_its_addresses():
    with serving("--host", "localhost") as (_, url):
        port = httpx.URL(url).port
        for host in {address[4][0] for address in socket.getaddrinfo("localhost", port)}:
            with socket.create_connection((host, port), 60):
                pass
        assert httpx.get(url + "/health").status_code == 200


def test_ctrl_c_while_the_model_loads_exits_at_once(tmp_path):
    code = (
        "import conftest, os, signal, threading, lmchat.engine\n"
        "def load(*a, **k):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Event().wait()\n"
        "lmchat.engine.ChatEngine.__init__ = load\n"
        "from lmchat.cli.app import app\n"
        "app(['serve', '--port', '0'])\n"
    )
    done = subprocess.run(
        [command.LMCHAT[0], "-c", code],
        env=command.ENVIRONMENT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr == "lmchat: interrupted\n"


def test_a_unix_socket_serves_and_is_removed(tmp_path):
    path = tmp_path / "socket"
    with serving("--uds", str(path)) as (process, url):
        assert url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/version").json() == {"version": lmchat.__version__}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not path.exists()


def test_the_log_has_one_line_per_request_and_no_prompt():
    with serving("--api-key", "ann:secret-of-ann") as (process, url):
        headers = {"Authorization": "Bearer secret-of-ann"}
        body = {"text_input": "a private prompt", "max_tokens": 2}
        path = "/v2/models/memo/generate?private=query"
        assert httpx.post(url + path, json=body, headers=headers, timeout=60).status_code == 200
        assert httpx.get(url + "/v1/a-private-path").status_code == 401
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    lines = log.splitlines()
    assert re.search(r"INFO .*POST /v2/models/\{model\}/generate 200 \d\.\d+ s owner=ann", log)
    assert len(lines) == 2
    assert "private" not in log
    assert "secret" not in log
