"""Replies that were cut, and are continued for the client that asks for them again."""

import asyncio
import subprocess
import sys

import pytest

import lmchat
from lmchat.sessions.reply_turn import is_cut

SAMPLED = {"temperature": 1.0, "seed": 5, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine("memo", store="memory", isa="portable", threads=1) as engine:
        yield engine


def request_of(chat):
    return chat._runtime.store.request(chat._record)


def cut(chat, tokens, **settings):
    """Starts a reply and cancels it after some tokens, as a server does when its client leaves.
    Returns it as it is stored."""
    generation = chat.start_send("Tell me about the lamp.", request="digest", **settings)
    with generation.follow() as follower:
        seen = 0
        for part in follower.events():
            seen += len(part.token_ids) if isinstance(part, lmchat.Delta) else 0
            if seen >= tokens:
                break
    generation.cancel()
    generation.wait()
    return chat.turns[-1]


@pytest.mark.parametrize("tokens", [1, 7, 23])
@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 20}, {"stop_strings": ["zzz"]}])
def test_a_cut_reply_ends_as_if_it_had_not_been_cut(engine, tokens, more):
    whole = engine.session().send("Tell me about the lamp.", **SAMPLED, **more)
    chat = engine.session()
    left = cut(chat, tokens, **SAMPLED, **more)
    if is_cut(left):  # it may have ended meanwhile
        chat.start_resume(request="digest").wait()
    reply = chat.turns[-1]
    assert (list(reply.token_ids), reply.text) == (whole.token_ids, whole.text)
    assert (reply.finish_reason, reply.id) == ("length", left.id)
    assert len(chat.turns) == 2
    assert not is_cut(reply)


def test_a_reply_that_is_cut_twice_ends_where_it_would_have(engine):
    settings = {**SAMPLED, "max_new_tokens": 400}
    whole = engine.session().send("Tell me about the lamp.", **settings)
    chat = engine.session()
    cut(chat, 3, **settings)
    resumed = chat.start_resume(request="digest")
    with resumed.follow() as follower:
        for part in follower.events():
            if isinstance(part, lmchat.Delta) and part.seconds:
                break
    resumed.cancel()
    resumed.wait()
    assert is_cut(chat.turns[-1])
    chat.start_resume(request="digest").wait()
    assert list(chat.turns[-1].token_ids) == whole.token_ids


def test_a_reply_with_log_probabilities_is_generated_again_with_its_seed(engine):
    settings = {**SAMPLED, "logprobs": 2, "max_new_tokens": 200}
    chat = engine.session()
    left = cut(chat, 3, **settings)
    resumed = chat.start_resume(request="digest")
    resumed.wait()
    reply = resumed.result()
    assert len(reply.logprobs) == len(reply.token_ids) == 200
    assert reply.token_ids[: len(left.token_ids)] == list(left.token_ids)
    assert [turn.role for turn in chat.turns] == ["user", "assistant"]
    assert len(chat.branches(0)) == 2


def test_a_stop_settles_the_request_and_a_cancelled_client_does_not(engine):
    settings = {**SAMPLED, "max_new_tokens": 1500}
    chat = engine.session()
    cut(chat, 1, **settings)
    assert request_of(chat).state == "open"
    chat.start_send("More?", request="other", **settings)
    chat.stop()
    assert request_of(chat).state == "settled"
    chat.start_send("More?", request="third", **settings)
    asyncio.run(lmchat.AsyncSession(chat).stop())
    assert request_of(chat).state == "settled"
    chat.send("And?", max_new_tokens=1)
    assert request_of(chat) is None


DYING = """
import lmchat, os, signal, sys
engine = lmchat.ChatEngine("memo", store=sys.argv[1], isa="portable", threads=1)
chat = engine.session("trip")
chat.append([{"role": "user", "content": "Waiting."}])
engine._runtime.admission.enter = lambda ticket: os.kill(os.getpid(), signal.SIGKILL)
chat.start_send("Asked.", keep_question=sys.argv[2] == "True", request="digest")
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_question_dies_with_its_process_only_if_its_request_is_to_be_repeated(tmp_path, kept):
    command = [sys.executable, "-c", DYING, str(tmp_path / "data"), str(kept)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -9
    with lmchat.ChatEngine("memo", store=tmp_path / "data", isa="portable", threads=1) as engine:
        chat = engine.session("trip")
        assert chat.unanswered == ("Asked." if kept else "Waiting.")
        found = request_of(chat)
        assert (found.state, found.digest, found.is_own) == ("died", "digest", False)
