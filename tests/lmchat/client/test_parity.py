"""Remote engines and sessions have the names, parameters and properties of the local ones."""

import inspect

import pytest

import lmchat
from lmchat.client.engine import RemoteEngine, RemoteTokenizer
from lmchat.client.generation import RemoteGeneration
from lmchat.client.session import RemoteSession
from lmchat.generation.generation import Generation
from lmchat.interface.session import PROPERTIES
from lmchat.server.sessions.bodies import Properties
from lmchat.sessions.session_properties import _CHECKS
from lmchat.text.tokenizer import Tokenizer

SERVERS = "what a server calls for a request of a client"
LOCAL_ONLY = {
    "ChatEngine.core": "the engine of this process",
    "Session.removed": "what the engine calls when it deletes a session",
    "Session.start_resume": SERVERS,
    "Session.append(once)": SERVERS,
    "Session.edit_reply(once)": SERVERS,
    **{
        f"Session.start_{verb}({name})": SERVERS
        for verb in ("send", "continue", "retry", "edit")
        for name in ("request", "check")
    },
}
PAIRS = [
    (lmchat.ChatEngine, RemoteEngine),
    (lmchat.Session, RemoteSession),
    (lmchat.EngineApi, lmchat.ChatEngine),
    (lmchat.SessionApi, lmchat.Session),
]


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("local", "remote"), PAIRS)
def test_every_public_name_exists(local, remote):
    missing = {f"{local.__name__}.{name}" for name in public(local) - public(remote)}
    assert missing <= set(LOCAL_ONLY)


@pytest.mark.parametrize(("local", "remote"), PAIRS)
def test_calls_take_the_same_arguments(local, remote):
    for name in public(local) & public(remote):
        ours, theirs = getattr(local, name), getattr(remote, name)
        assert isinstance(ours, property) == isinstance(theirs, property), name
        if not inspect.isfunction(ours) or theirs.__annotations__.get("return") == "NoReturn":
            continue
        assert shared(remote, name) == shared(local, name), name


def shared(kind, name):
    """The arguments of a call that every kind of its object has."""
    return [
        (one.name, one.kind)
        for one in inspect.signature(getattr(kind, name)).parameters.values()
        if f"{kind.__name__}.{name}({one.name})" not in LOCAL_ONLY
    ]


@pytest.mark.parametrize(
    ("kind", "awaited"),
    [(lmchat.Session, lmchat.AsyncSession), (lmchat.ChatEngine, lmchat.AsyncChatEngine)],
)
def test_asyncio_has_the_same_names_and_arguments(kind, awaited):
    assert {f"{kind.__name__}.{name}" for name in public(kind) - public(awaited)} <= set(LOCAL_ONLY)
    for name in public(kind) & public(awaited):
        ours, theirs = getattr(kind, name), inspect.getattr_static(awaited, name)
        assert inspect.getdoc(theirs), name
        if isinstance(theirs, property):  # what never waits
            assert not inspect.isfunction(ours), name
        elif not inspect.isfunction(ours):  # a property that may wait is a call here
            assert list(inspect.signature(theirs).parameters) == ["self"], name
        else:
            expected = [(one.name, one.kind) for one in inspect.signature(ours).parameters.values()]
            found = [(one.name, one.kind) for one in inspect.signature(theirs).parameters.values()]
            assert found == expected, name


def test_the_properties_that_change_are_those_of_update():
    assert set(PROPERTIES) == set(inspect.signature(lmchat.SessionApi.update).parameters) - {"self"}
    assert set(PROPERTIES) == set(_CHECKS)
    assert set(PROPERTIES) <= set(Properties.model_fields)
    for name in PROPERTIES:
        assert isinstance(getattr(lmchat.SessionApi, name), property), name


def test_a_generation_has_what_front_doors_use():
    used = {"turn_id", "done", "cancelled", "cancel", "wait", "result", "follow"}
    for kind in (Generation, RemoteGeneration):
        assert used <= public(kind)


def test_a_tokenizer_has_what_the_terminal_uses():
    for kind in (Tokenizer, RemoteTokenizer):
        assert {"encode", "raw", "pieces"} <= public(kind)
