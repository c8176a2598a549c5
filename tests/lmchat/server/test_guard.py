"""The guard: keys name owners, and without keys only this machine's own clients pass."""

import pytest
from http_server import RunningServer

from lmchat.server import ServerConfig

KEYS = {"secret-a": "ann", "secret-b": "bob"}


@pytest.fixture(scope="module")
def keyed():
    with RunningServer(ServerConfig(keys=KEYS)) as server:
        yield server


@pytest.fixture(scope="module")
def keyless():
    with RunningServer() as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_needs_no_key(keyed, path):
    assert keyed.client().get(path).status_code == 200


@pytest.mark.parametrize("key", [None, "secret-c", "secret-", ""])
def test_a_wrong_key_is_refused_with_an_error_object(keyed, key):
    answer = keyed.client(key).get("/version")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_key_is_accepted(keyed):
    assert keyed.client("secret-b").get("/version").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[bad"])
def test_without_keys_foreign_hosts_are_refused(keyless, host):
    assert keyless.client().get("/version", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "localhost."])
def test_without_keys_loopback_hosts_are_accepted(keyless, host):
    assert keyless.client().get("/version", headers={"Host": host}).status_code == 200


def test_without_keys_a_foreign_origin_is_refused(keyless):
    client = keyless.client()
    assert client.get("/version", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.get("/version", headers={"Origin": keyless.url}).status_code == 200


def test_an_unknown_route_is_an_error_object(keyless):
    answer = keyless.client().get("/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such route"
