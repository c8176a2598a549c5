"""Logins of browsers: signed cookies, their expiry, and the bound of failed attempts."""

import pytest

from lmchat.server.errors import HttpError
from lmchat.server.http import logins as module
from lmchat.server.http.logins import FAILURES, LASTS, Logins, cookie

KEYS = {"secret-ann": "ann", "secret-ann-2": "ann", "secret-bob": "bob"}


@pytest.fixture
def clock(monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def refusal(logins, name, key, address="10.0.0.1"):
    with pytest.raises(HttpError) as refused:
        logins.log_in(name, key, address)
    return refused.value.status


@pytest.mark.parametrize("key", ["secret-ann", "secret-ann-2"])
def test_a_cookie_outlives_restarts_and_ends_with_its_key(key, clock):
    value = Logins(KEYS).log_in("ann", key, "")
    assert Logins(KEYS).owner(value) == "ann"
    assert Logins({key: "ann"}).owner(value) == "ann"
    assert Logins({k: of for k, of in KEYS.items() if k != key}).owner(value) is None
    assert Logins({key: "bob"}).owner(value) is None
    assert Logins({}).owner(value) is None


def test_a_cookie_expires_after_thirty_days(clock):
    logins = Logins(KEYS)
    value = logins.log_in("bob", "secret-bob", "")
    clock[0] += LASTS - 1
    assert logins.owner(value) == "bob"
    clock[0] += 1
    assert logins.owner(value) is None


def test_changed_cookies_are_refused(clock):
    value = cookie("ann", "secret-ann", 2_000_000)
    name, expires, sign = value.split("|")
    wrong = [
        "", "|", "||", "ann", f"{name}|{expires}", f"bob|{expires}|{sign}",
        f"{name}|2000001|{sign}",
        f"{name}|{expires}|{sign[:-1]}", f"{name}|{expires}|", f"{name}|-1|{sign}", value + "x",
        f"{name}|{'9' * 5000}|{sign}", f"{name}|²|{sign}", "\xff|1|\xff",
        cookie("ann", "", 2_000_000),
        cookie("ann", "secret-bob", 2_000_000),
    ]  # fmt: skip
    assert [one for one in wrong if Logins(KEYS).owner(one) is not None] == []
    assert Logins(KEYS).owner(value) == "ann"


def test_a_name_goes_with_its_own_key(clock):
    logins = Logins(KEYS)
    for name, key in (
        ("ann", "secret-bob"),
        ("", "secret-bob"),
        ("bob", ""),
        ("", ""),
        ("ann", "€"),
    ):
        assert refusal(logins, name, key) == 401


def test_failed_attempts_are_bounded_per_address_and_minute(clock):
    logins = Logins(KEYS)
    for _ in range(FAILURES):
        assert refusal(logins, "ann", "wrong-key") == 401
    assert refusal(logins, "ann", "secret-ann") == 429
    assert logins.log_in("ann", "secret-ann", "10.0.0.2")
    clock[0] += 59
    assert refusal(logins, "ann", "secret-ann") == 429
    clock[0] += 1
    assert logins.log_in("ann", "secret-ann", "10.0.0.1")


def test_the_addresses_that_are_remembered_are_bounded(clock, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ADDRESSES", 3)
    logins = Logins(KEYS)
    for number in range(10):
        refusal(logins, "ann", "wrong-key", str(number))
    assert list(logins._failed) == ["7", "8", "9"]
