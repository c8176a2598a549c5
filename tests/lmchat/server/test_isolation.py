"""Requests that take long hold no thread, file or place that requests of other owners need."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from http_raw import PATIENCE, connected, request
from http_server import RunningServer

from lmchat.aio.threads import shared
from lmchat.generation.ticket import Ticket
from lmchat.server import Limits, ServerConfig, archive_limit
from lmchat.sessions.session import Session

KEYS = {"a" * 24: "ann", "b" * 24: "bob"}
ANN, BOB = KEYS


@pytest.fixture
def server():
    limits = replace(Limits(), archives=2)
    with RunningServer(ServerConfig(keys=KEYS, limits=limits), max_batch_size=1) as found:
        yield found


@contextlib.contextmanager
def full(server):
    """Holds the only slot of the batch."""
    ticket = Ticket("other", live=False, cost=1, start=lambda: None)
    admission = server.engine.sync._runtime.admission
    admission.enter(ticket)
    try:
        yield
    finally:
        admission.leave(ticket)


def sent(path, body, kind="application/json"):
    """Returns a request of Bob's as bytes."""
    headers = [("Host", "localhost"), ("Authorization", f"Bearer {BOB}"), ("Content-Type", kind)]
    return request("GET" if body is None else "POST", path.encode(), headers, body)


def until(found):
    """Waits until `found()` is true."""
    end, pause = time.monotonic() + PATIENCE, threading.Event()
    while not found():
        assert time.monotonic() < end
        pause.wait(0.01)


def test_waiting_scores_hold_no_thread(server, monkeypatch):
    for threads in (shared, server.engine._threads):
        monkeypatch.setattr(threads, "_executor", ThreadPoolExecutor(2))
    path = server.client(ANN).post("/v1/sessions", json={}).headers["location"]
    expected = server.client(BOB).post("/v1/engine/score", json={"prompt": "a day"}).json()
    with ThreadPoolExecutor(8) as clients:
        with full(server):
            scores = [
                clients.submit(
                    server.client(BOB).post, "/v1/engine/score", json={"prompt": "a day"}
                )
                for _ in range(8)
            ]
            until(lambda: server.engine.queue_stats().waiting == 8)
            assert server.client(ANN).get(path).status_code == 200
            assert server.client(ANN).post("/tokenize", json={"prompt": "x"}).status_code == 200
            assert not any(one.done() for one in scores)
        for one in scores:
            assert one.result().json() == expected


def test_a_score_whose_client_leaves_is_withdrawn(server):
    with full(server):
        with connected(server.port) as connection:
            connection.sendall(sent("/v1/engine/score", b'{"prompt": "a day"}'))
            until(lambda: server.engine.queue_stats().waiting == 1)
        until(lambda: server.engine.queue_stats().waiting == 0)


@pytest.fixture
def held_exports(monkeypatch):
    """Exports that wait: the event that lets them go on, and the names of their threads."""
    whole, release, names = Session.export, threading.Event(), []

    def export(self, *args, **options):
        names.append(threading.current_thread())
        release.wait()
        return whole(self, *args, **options)

    monkeypatch.setattr(Session, "export", export)
    yield release, names
    release.set()


def test_an_owner_has_some_archives_at_once(server, held_exports):
    release, names = held_exports
    paths = {key: server.client(key).post("/v1/sessions", json={}).headers["location"]
             for key in KEYS}  # fmt: skip
    with ThreadPoolExecutor(3) as clients:
        try:
            found = [
                clients.submit(server.client(key).get, f"{paths[key]}/export")
                for key in (BOB, BOB, ANN)
            ]
            until(lambda: len(names) == 3)
            refused = server.client(BOB).get(f"{paths[BOB]}/export")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "too_many_archives"
            refused = server.client(BOB).post(
                "/v1/sessions/import", content=b"x", headers={"Content-Type": "application/zip"}
            )
            assert refused.status_code == 429
        finally:
            release.set()
        archives = [one.result() for one in found]
    assert all(one.status_code == 200 for one in archives)
    own = set(archive_limit.threads._executor._threads)
    assert own.issuperset(names)
    for key, archive in zip((BOB, BOB, ANN), archives, strict=True):
        made = server.client(key).post(
            f"/v1/sessions/import?name=copy-{id(archive)}",
            content=archive.content,
            headers={"Content-Type": "application/zip"},
        )
        assert made.status_code == 201, made.text


def test_a_client_that_leaves_frees_its_archive(server):
    client = server.client(BOB)
    path = client.post("/v1/sessions", json={}).headers["location"]
    busy = server.app.state.archive_limit._busy
    for _ in range(3):
        with connected(server.port) as connection:
            connection.sendall(sent(f"{path}/export", None))
        with connected(server.port) as connection:
            archive = sent("/v1/sessions/import", b"x" * 1000, "application/zip")
            connection.sendall(archive[:-900])
            until(lambda: busy)
        until(lambda: not busy)
    assert client.get(f"{path}/export").status_code == 200
