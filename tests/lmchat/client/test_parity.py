"""Remote engines and sessions have the names, parameters and properties of the local ones."""

import inspect

import pytest

import lmchat
from lmchat.client.engine import RemoteEngine, RemoteTokenizer
from lmchat.client.generation import RemoteGeneration
from lmchat.client.session import RemoteSession
from lmchat.generation.generation import Generation
from lmchat.text.tokenizer import Tokenizer

LOCAL_ONLY = {
    "ChatEngine.core": "the engine of this process",
    "Session.removed": "what the engine calls when it deletes a session",
    "Session.start_resume": "what a server calls for a request that is repeated",
    **{
        f"Session.{name}(request)": "a server knows what its client has sent"
        for name in ("start_send", "start_continue", "start_retry", "start_edit")
    },
    "Session.append(once)": "a server knows the keys of its clients",
    "Session.edit_reply(once)": "a server knows the keys of its clients",
    **{
        f"Session.{name}(check)": "a function cannot be sent"
        for name in ("update", "start_send", "start_continue", "start_retry", "start_edit")
    },
}
PAIRS = [(lmchat.ChatEngine, RemoteEngine), (lmchat.Session, RemoteSession)]


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
        expected = [
            (one.name, one.kind)
            for one in inspect.signature(ours).parameters.values()
            if f"{local.__name__}.{name}({one.name})" not in LOCAL_ONLY
        ]
        found = [(one.name, one.kind) for one in inspect.signature(theirs).parameters.values()]
        assert found == expected, name


def test_a_generation_has_what_front_doors_use():
    used = {"turn_id", "done", "cancelled", "cancel", "wait", "result", "follow"}
    for kind in (Generation, RemoteGeneration):
        assert used <= public(kind)


def test_a_tokenizer_has_what_the_terminal_uses():
    for kind in (Tokenizer, RemoteTokenizer):
        assert {"encode", "raw", "pieces"} <= public(kind)
