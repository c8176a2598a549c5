"""A server under hostile clients: a few cases of `tests/stress/http_*.py`."""

import re

import pytest
from http_paths import EXAMPLE_ID, routes
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


CREATED_BY = {"/v1/conversations": {}, "/v1/sessions": {}}
"""Routes that make objects, with their bodies. Those that the server lacks are left out."""


def test_ids_of_other_owners_are_as_unknown_as_missing_ones():
    """Every route with an id answers alike for another owner's object and for none."""
    with RunningServer(ServerConfig(keys=KEYS)) as server:
        ann, bob = server.client("key-of-ann"), server.client("key-of-bob")
        found = routes(server.app)
        for where in CREATED_BY.keys() & {path for method, path in found if method == "POST"}:
            made = ann.post(where, json=CREATED_BY[where]).json()["id"]
            missing = re.sub(r"[0-9a-f]{8,}$", lambda hexadecimal: "0" * len(hexadecimal[0]), made)
            assert made != missing
            for method, path in found:
                if EXAMPLE_ID in path:
                    one, other = (answer_to(bob, method, path, an_id) for an_id in (made, missing))
                    assert one == other, (method, path)
            assert ann.get(f"{where}/{made}").status_code == 200
            assert made not in bob.get(where).text


def answer_to(client, method, path, an_id):
    """Returns the status and the body, without parts of the id."""
    answer = client.request(method, path.replace(EXAMPLE_ID, an_id), json={})
    return answer.status_code, re.sub(r"(conv_)?[0-9a-f]{8,}", "ID", answer.text)
