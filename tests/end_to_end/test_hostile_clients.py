"""A server under hostile clients: a few cases of `tests/stress/http_*.py`."""

import re

import http_raw
import pytest
from http_paths import routes
from http_server import RunningServer

from lmchat.server import ServerConfig
from tests.stress import http_fuzz, http_sockets

KEYS = {"key-of-ann": "ann", "key-of-bob": "bob"}


@pytest.mark.timeout(300)
def test_fuzzed_requests_end_no_server_and_change_no_reply():
    record = http_fuzz.run(5000, 7, progress=lambda _: None)
    assert record["failures"] == []
    assert record["statuses"]["200"] > 500
    assert record["routes"] > 5


def test_hostile_connections_are_dropped_and_disturb_no_stream():
    record = http_sockets.run(44, 3)
    assert record["failures"] == []
    assert record["streams"] > 0
    assert sum(record["kinds"].values()) == 44


def test_ids_of_other_owners_are_as_unknown_as_missing_ones():
    """Every route with an id answers alike for another owner's object and for none."""
    with RunningServer(ServerConfig(keys=KEYS)) as server:
        ann, bob = server.client("key-of-ann"), server.client("key-of-bob")
        made = ann.post("/v1/conversations", json={}).json()["id"]
        missing = "conv_" + "0" * (len(made) - 5)
        tried = 0
        for method, path in routes(server.app):
            if "0" * 32 not in path:
                continue
            answers = []
            for found in (made, missing):
                answer = bob.request(method, path.replace("0" * 32, found), json={})
                answers.append((answer.status_code, re.sub(r"conv_\w+", "ID", answer.text)))
            assert answers[0] == answers[1], (method, path)
            tried += 1
        assert tried > 3
        assert ann.get(f"/v1/conversations/{made}").status_code == 200
        assert http_raw.exchange(server.port, http_raw.request("GET", "/health")).status == 200
