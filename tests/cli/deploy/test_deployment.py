"""Deployments of memo as processes: routing, kills, status, keys, the end."""

import contextlib
import json
import os
import re
import select
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import http_raw
import httpx
import pytest
import stores
from deployment import (
    LONG,
    MOST,
    QUESTION,
    all_ready,
    created,
    deployed,
    needs_haproxy,
    streaming,
    tokens,
)

import lmchat
from lmchat.deploy import registry

pytestmark = needs_haproxy

KEY = "key-of-ann-0123456789"
ORIGIN = "app://notes.example"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def deployment():
    """Two replicas with a key, for all tests of this file but that of the launcher's death."""
    with (
        stores.folder() as home,
        deployed(
            home,
            "--replicas",
            "2",
            "--allow-origin",
            ORIGIN,
            env={"LMCHAT_API_KEY": f"ann:{KEY}"},
            headers=HEADERS,
        ) as found,  # fmt: skip
    ):
        yield found


@pytest.fixture
def client(deployment):
    with deployment.client() as client:
        yield client


def test_sessions_stay_with_their_replica(deployment, client):
    before, used, rounds = deployment.answered(), [0] * 40, []
    for turn in (1, 2):
        for n in range(40):
            body = {
                "model": "memo", "max_tokens": 4, "temperature": 0,
                "messages": [{"role": "user", "content": f"This is turn {turn} of {n}."}],
            }  # fmt: skip
            header = {"x-session-id": f"session {n}"}
            answer = client.post("/v1/chat/completions", json=body, headers=header)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= used[n] - 1  # all but the last token of the reply
            used[n] = usage["total_tokens"]
        here = [now - then for now, then in zip(deployment.answered(), before, strict=True)]
        assert sum(here) == 40 * turn
        assert all(12 * turn <= count <= 28 * turn for count in here)
        rounds.append(here)
    assert rounds[1] == [2 * count for count in rounds[0]]


@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_replica_costs_no_token_and_nothing_of_the_other_one(deployment, client, number):
    before = deployment.wait(all_ready)["replicas"]
    killed, other, whole = (deployment.session_at(client, n) for n in (number, 3 - number, 1))
    answer = client.post(f"{whole}/turns", json=QUESTION)
    assert answer.status_code == 200, answer.text
    expected = tokens(client, whole)
    assert len(expected) == MOST
    with (
        streaming(client, f"{killed}/turns") as parts,
        streaming(client, f"{other}/turns") as others,
    ):
        shown, seen = next(parts), next(others)
        os.kill(before[number - 1]["pid"], signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):  # noqa: PT012
            for part in parts:
                shown += part
        assert expected[: len(shown)] == shown
        assert len(shown) < MOST
        # With a key it is sent again where the dying process still accepted it.
        key = {"Idempotency-Key": f"continue {number}"}
        answer = client.post(f"{killed}/continue", json={}, headers=key)
        assert answer.status_code == 200, answer.text
        assert tokens(client, killed) == expected
        assert sum(others, seen) == expected
    after = deployment.wait(all_ready)["replicas"]
    assert [r["restarts"] for r in after] == [
        r["restarts"] + (r["replica"] == number) for r in before
    ]


def test_any_replica_stops_a_reply(deployment, client):
    path = deployment.session_at(client, 1)
    with deployment.direct(2) as other, streaming(client, f"{path}/turns") as parts:
        shown = next(parts)
        answer = other.post(f"{path}/stop").json()
        assert answer["stopped"]
        assert answer["reply"]["finish_reason"] == "cancelled"
        assert sum(parts, shown) == answer["reply"]["token_ids"]
        assert not other.post(f"{path}/stop").json()["stopped"]


def test_a_session_that_moves_is_counted(deployment, client):
    """Its tokens were loaded or computed again; Prometheus is told where each replica counts."""
    path = deployment.session_at(client, 1)
    known = client.get(path).json()["tokens"]

    def counted():
        done = deployment.lmchat("deploy", "status", "--targets")
        two, proxy = json.loads(done.stdout)[1:]
        assert two["targets"] == [deployment.url.removeprefix("http://")]
        assert two["labels"] == {"replica": "2", "__metrics_path__": "/replicas/2/metrics"}
        assert proxy["labels"]["__metrics_path__"] == "/proxy/metrics"
        lines = client.get(two["labels"]["__metrics_path__"]).text.splitlines()
        rows = (line.split("{") for line in lines if "taken_over" in line and line[0] != "#")
        return {name: float(rest.split()[-1]) for name, rest in rows if "_created" not in name}

    before = counted()
    with deployment.direct(2) as other:
        body = {"text": "Again.", "settings": {"max_new_tokens": 1}}
        assert other.post(f"{path}/turns", json=body).status_code == 200
    changed = {name: value - before[name] for name, value in counted().items()}
    assert changed["lmchat:sessions_taken_over_total"] == 1
    loaded = changed["lmchat:taken_over_loaded_tokens_total"]
    again = changed["lmchat:taken_over_recomputed_tokens_total"]
    assert loaded + again >= known - 1  # the token sampled last has no KV


def test_a_restart_breaks_nothing(deployment, client):
    """Streams end as they would, and requests are answered, while both replicas are replaced."""
    before = deployment.wait(all_ready)["replicas"]
    paths = [deployment.session_at(client, number) for number in (1, 2)]
    has_ended, statuses = threading.Event(), set()

    def ask():
        body = {"model": "memo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
        with deployment.client() as asker:
            while not has_ended.is_set():
                statuses.add(asker.post("/v1/chat/completions", json=body).status_code)
                statuses.add(asker.get(paths[0]).status_code)

    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        asking = pool.submit(ask)
        stack.callback(has_ended.set)
        streams = [stack.enter_context(streaming(client, f"{path}/turns")) for path in paths]
        counts = [len(next(parts)) for parts in streams]
        steps = deployment.restart()
        for count, parts in zip(counts, streams, strict=True):
            assert count + sum(map(len, parts)) == MOST
        has_ended.set()
        asking.result()
    assert statuses == {200}
    after = deployment.status()["replicas"]
    assert [line.split(",")[0] for line in steps if "ready" in line] == [
        "replica 1: ready", "replica 2: ready",
    ]  # fmt: skip
    for old, new in zip(before, after, strict=True):
        assert (new["state"], new["restarts"]) == ("ready", old["restarts"] + 1)
        assert new["pid"] != old["pid"]


def test_a_replica_that_is_not_there_is_not_restarted(deployment):
    done = deployment.lmchat("deploy", "restart", "3")
    assert done.returncode == 1
    assert "replica is 3, expected 1 to 2" in done.stderr


def test_a_client_that_disconnects_ends_its_reply(deployment, client):
    path = created(client, **LONG)
    headers = HEADERS | {"Host": "localhost", "Content-Type": "application/json"}
    with http_raw.connected(httpx.URL(deployment.url).port) as connection:
        body = json.dumps(QUESTION).encode()
        connection.sendall(http_raw.request("POST", f"{path}/turns", headers.items(), body))
        deployment.wait(lambda replicas: any(r["running"] for r in replicas))
    deployment.wait(lambda replicas: not any(r["running"] for r in replicas))
    assert len(tokens(client, path)) < MOST


def test_only_the_user_reaches_the_sockets(deployment):
    sockets = [path for path in deployment.folder.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} >= {"control", "haproxy", "replica-1", "replica-2"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}


def test_options_of_serve_reach_the_replicas(client):
    answer = client.get("/v1/models", headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_a_missing_key_is_refused(deployment):
    assert httpx.get(f"{deployment.url}/v1/models").status_code == 401


def test_no_key_is_in_the_list_of_processes(deployment):
    pids = [deployment.process.pid, *(r["pid"] for r in deployment.wait(all_ready)["replicas"])]
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert all(b"--uds=" in line for line in words[1:])
    assert not any(KEY.encode() in line for line in words)


def test_status_lists_the_replicas(deployment):
    done = deployment.lmchat("deploy", "status")
    assert done.returncode == 0, done.stderr
    title, head, *rows = done.stdout.splitlines()
    assert title == f"memo at {deployment.url}, process {deployment.process.pid}"
    assert head.split() == ["replica", "pid", "state", "device", "restarts", "running"]
    assert [row.split()[0] for row in rows] == ["1", "2"]


def test_a_second_deployment_is_refused(deployment):
    done = deployment.lmchat("deploy", "memo", "--replicas", "1", "--port", "0")
    assert done.returncode == 2
    assert (
        f"a deployment runs on {deployment.home}, process {deployment.process.pid}" in done.stderr
    )
    deployment.status()


def test_lines_of_the_log_have_time_level_and_replica(deployment):
    first = deployment.status()["replicas"][0]
    os.kill(first["pid"], signal.SIGKILL)
    deployment.wait(lambda found: all_ready(found) and found[0]["restarts"] > first["restarts"])
    line = r"\d{4}-\d\d-\d\d [\d:]{8},\d{3} (INFO|WARNING) +replica (\d)(:| ended with SIGKILL:) "
    matches = [(re.match(line, text), text) for text in deployment.log_lines()]
    assert [text for match, text in matches if not match] == []
    assert {(match[2], match[3] == ":") for match, _ in matches} >= {
        ("1", True),
        ("2", True),
        ("1", False),
    }


def test_stop_ends_everything(deployment, client):
    """It is the last test of the file that uses the deployment."""
    pids = [deployment.process.pid, *(r["pid"] for r in deployment.wait(all_ready)["replicas"])]
    path = created(client, **LONG)
    with streaming(client, f"{path}/turns") as parts:
        count = len(next(parts))
        deployment.stop()
        assert count + sum(map(len, parts)) == MOST  # running replies finish
    assert deployment.process.wait(60) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert deployment.lmchat("deploy", "status").returncode == 2
    with pytest.raises(httpx.ConnectError):
        client.get("/health")


def test_stop_now_waits_for_no_reply_and_keeps_what_was_shown(data_dir):
    with deployed(data_dir, "--replicas", "1", "--drain-seconds", "100000") as deployment:
        with deployment.client() as client:
            path = created(client, **LONG)
            with streaming(client, f"{path}/turns") as parts:
                shown = next(parts)
                deployment.stop("--now")
                with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012
                    for part in parts:
                        shown += part
        assert deployment.process.wait(60) == 0
    with lmchat.ChatEngine("memo", store=data_dir) as engine:
        reply = engine.session_by_id(path.rpartition("/")[2]).turns[-1]
        assert list(reply.token_ids[: len(shown)]) == shown
        assert len(shown) < MOST


def test_when_the_launcher_dies_replies_finish_and_everything_ends(data_dir):
    with deployed(data_dir, "--replicas", "1") as deployment:
        (replica,) = deployment.status()["replicas"]
        children = Path(f"/proc/{deployment.process.pid}/task/{deployment.process.pid}/children")
        control = deployment.folder / registry.CONTROL
        assert control.exists()
        ends = [os.pidfd_open(int(pid)) for pid in children.read_text().split()]
        assert len(ends) == 2  # the replica and HAProxy
        assert replica["running"] == 0
        with deployment.client() as client:
            path = created(client, **LONG)
            with streaming(client, f"{path}/turns") as parts:
                count = len(next(parts))
                deployment.process.kill()
                assert count + sum(map(len, parts)) == MOST
        for end in ends:
            assert select.select([end], [], [], 60)[0]
            os.close(end)
    with registry.claimed():
        assert not control.exists()  # the next launcher removes what this one could not
