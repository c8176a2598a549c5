"""What a replica has from its launcher: a key, and the weights that it may have."""

import os

import pytest

from lmchat.deploy import replica
from lmchat.errors import ModelError

KEY = "k" * 32


@pytest.fixture
def weights(monkeypatch):
    """The launcher's file, which each replica inherits."""
    file = os.memfd_create("weights")

    def start():
        for name, value in replica.environment(2, KEY, os.dup(file)).items():
            monkeypatch.setenv(name, value)

    yield file, start
    os.close(file)


def test_other_weights_than_those_of_the_first_replica_are_refused(weights):
    file, start = weights
    for _ in range(2):
        start()
        replica.check_weights("/models/current", "a" * 64)
    for _ in range(2):
        start()
        with pytest.raises(ModelError) as caught:
            replica.check_weights("/models/current", "b" * 64)
    assert str(caught.value) == (
        "/models/current has other weights than the deployment's first replica loaded: fingerprint "
        f"is {'b' * 12}, expected {'a' * 12}; lmchat deploy restart updates all replicas"
    )
    os.ftruncate(file, 0)  # an update
    start()
    replica.check_weights("/models/current", "b" * 64)
    start()
    with pytest.raises(ModelError):
        replica.check_weights("/models/current", "a" * 64)


def test_a_server_without_a_launcher_has_any_weights_and_no_other_key():
    replica.check_weights("memo", "a" * 64)
    assert replica.with_launcher_key({"key": "ann"}) == {"key": "ann"}


def test_the_launcher_has_a_key_where_keys_are_needed(monkeypatch):
    for name, value in replica.environment(2, KEY, 9).items():
        monkeypatch.setenv(name, value)
    assert replica.with_launcher_key({"key": "ann"}) == {"key": "ann", KEY: "launcher"}
    assert replica.with_launcher_key({}) == {}
