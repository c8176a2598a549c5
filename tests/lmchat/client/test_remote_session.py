"""A remote engine does what a local one does: the same calls, turns, replies and errors."""

import math
import threading

import numpy as np
import pytest
from chat_models import chat_model
from http_server import RunningServer

import lmchat
from lmchat.errors import (
    ContextFull,
    EngineClosed,
    InvalidRequest,
    NotFound,
    Overloaded,
    SessionBusy,
)
from lmchat.generation.reply_stream import ReplyStream
from lmchat.generation.state import State
from lmchat.server import Limits, ServerConfig

OPTIONS = {"threads": 1, "cache_memory": "32MiB"}
SHORT = {"temperature": 0.0, "max_new_tokens": 6}
SAMPLED = {"temperature": 1.0, "seed": 7, "max_new_tokens": 8, "logprobs": 2}
ENDLESS = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 40_000}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("models") / "tiny", context=200_000))


@pytest.fixture(scope="module")
def server(model):
    config = ServerConfig(keys={"key-of-ann": "ann", "key-of-bob": "bob"})
    with RunningServer(config, model, **OPTIONS) as running:
        yield running


@pytest.fixture
def remote(server):
    with lmchat.connect(server.url, "key-of-ann") as engine:
        yield engine
        for info in engine.sessions():
            engine.delete(info.name)


@pytest.fixture(scope="module")
def local(model):
    with lmchat.ChatEngine(model, store="memory", **OPTIONS) as engine:
        yield engine


def shown(turn):
    """What a turn is, without its times and its random seed."""
    names = ("id", "parent", "role", "text", "message", "token_ids", "prefix_length", "length",
             "reasoning", "finish_reason", "stopped", "settings", "metadata")  # fmt: skip
    found = {name: getattr(turn, name) for name in names}
    found["settings"] = {k: v for k, v in turn.settings.items() if k != "seed"}
    return {**found, "usage": (turn.usage.prompt_tokens, turn.usage.completion_tokens)}


def told(reply):
    return (reply.text, reply.token_ids, reply.finish_reason, reply.logprobs, reply.notices,
            reply.usage.prompt_tokens, reply.usage.cached_tokens)  # fmt: skip


def conversation(engine):
    """Calls every verb of a session and returns all that it showed."""
    seen = []
    chat = engine.session(
        "trip", system="Be brief.", settings=SHORT, metadata={"a": "b"}, tags=["new"]
    )
    seen.append(chat.tags)
    seen.append(told(chat.send("hello")))
    stream = chat.stream("and now?", **SAMPLED)
    parts = list(stream.events())
    deltas = [part for part in parts if isinstance(part, lmchat.Delta)]
    seen.append(("".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids]))
    seen.append(told(stream.result()))
    seen.append(told(chat.continue_(max_new_tokens=4)))
    seen.append(told(chat.stream_retry(temperature=0.9, seed=1).result()))
    seen.append(told(chat.edit(0, "good day")))
    seen += [[shown(b.turn), shown(b.reply), b.leaf, b.active] for b in chat.branches(0)]
    chat.switch(0, 0)
    seen.append(chat.undo())
    seen.append(chat.count_tokens("what?", system="Other."))
    after = chat.replies[0].id
    seen.append(
        told(ReplyStream(chat.start_send("instead", after=after, metadata={"x": 1})).result())
    )
    chat.append([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    chat.edit_reply(0, "edited")
    seen += [[shown(b.turn), shown(b.reply), b.leaf, b.active] for b in chat.branches(0)]
    chat.switch(0, 0)
    chat.annotate(chat.turns[-1].id, {"note": [1, 2]})
    seen.append([shown(turn) for turn in chat.conversation(after)])
    chat.set_system("Be kind.")
    chat.set(temperature=0.5, logit_bias={3: -1.0, 5: -math.inf})
    chat.set_variables(mood="calm")
    chat.set_title("A title")
    chat.set_tags(["one", "two"])
    chat.update(history="append", overflow="drop", metadata={"c": "d"})
    chat.pin()
    chat.rename("journey")
    copy = chat.fork("copy", at=1, tags=["copied"])
    seen.append(copy.tags)
    seen.append([shown(turn) for turn in copy.turns])
    copy.delete()
    for name in ("name", "title", "tags", "metadata", "settings", "template_variables", "history",
                 "overflow", "pinned", "system", "token_ids", "length", "state", "unanswered",
                 "interrupted", "notices"):  # fmt: skip
        seen.append((name, getattr(chat, name)))
    seen.append([shown(turn) for turn in chat.turns])
    seen.append([shown(turn) for turn in chat.replies])
    chat.warm()
    seen.append("".join(list(chat.follow())))
    chat.delete()
    return seen


def test_every_verb_does_the_same(remote, local):
    for here, there in zip(conversation(local), conversation(remote), strict=True):
        assert there == here


def test_without_a_session(remote, local):
    messages = [{"role": "user", "content": "hello"}]
    for one in (remote, local):
        assert (
            one.generate([5, 6, 7], **SHORT).token_ids
            == local.generate([5, 6, 7], **SHORT).token_ids
        )
        two = one.generate("Once", n=2, temperature=1.0, seed=3, max_new_tokens=4)
        assert [two.text, *(o.text for o in two.others)] == [
            reply.text
            for made in [local.generate("Once", n=2, temperature=1.0, seed=3, max_new_tokens=4)]
            for reply in (made, *made.others)
        ]
        assert one.chat(messages, **SHORT).text == local.chat(messages, **SHORT).text
        assert "".join(one.stream("Once", **SHORT)) == local.generate("Once", **SHORT).text
        for wrong in (5, np.array(5), {5, 6}, None):
            with pytest.raises(
                lmchat.InvalidRequest, match="^prompt is .*, expected a .*token ids"
            ):
                one.generate(wrong)
    assert remote.score("Once upon a time") == pytest.approx(local.score("Once upon a time"))
    assert remote.chat_token_ids(messages) == local.chat_token_ids(messages)
    ids = local.tokenizer.encode("A chat is a list.")
    assert remote.tokenizer.encode("A chat is a list.") == ids
    assert remote.tokenizer.pieces(ids) == local.tokenizer.pieces(ids)
    assert remote.tokenizer.raw(ids) == local.tokenizer.raw(ids)


def test_properties_of_the_engine(remote, local):
    assert remote.max_context == local.max_context
    assert remote.model_settings == local.model_settings
    assert remote.template_info == local.template_info
    for fact in ("kv_bytes_per_token", "kv_dtype", "weights_text"):
        assert getattr(remote.info, fact) == getattr(local.info, fact)
    assert (remote.device, remote.threads) == (local.device, local.threads)
    assert remote.owner == "ann"
    assert remote.stats().pages_total == local.stats().pages_total
    assert remote.queue_stats().running == remote.waiting == 0
    chat = remote.session("facts")
    chat.send("hello", **SHORT)
    assert remote.session_states()[State.IDLE] == 1
    assert remote.residences([chat]) == [chat.residence]
    assert chat.residence.device == chat.length - 1
    assert chat.predicted_ttft(100) > 0.0
    for call in (remote.profile, lambda: remote.forecasts([chat]), lambda: remote.start_score("x")):
        with pytest.raises(InvalidRequest, match="not offered by a remote engine"):
            call()


def test_sessions_are_listed_in_pages(remote):
    for number in range(5):
        remote.session(f"s{number}").set_tags(["even"] if number % 2 == 0 else [])
    names = [info.name for info in remote.sessions()]
    assert sorted(names) == [f"s{number}" for number in range(5)]
    assert [info.name for info in remote.sessions(limit=2)] == names[:2]
    after = remote.sessions(limit=2)[-1].id
    assert [info.name for info in remote.sessions(after=after)] == names[2:]
    assert {info.name for info in remote.sessions(tag="even")} == {"s0", "s2", "s4"}
    assert remote.count_sessions() == 5
    assert remote.session_by_name("s3") is remote.session("s3")
    with pytest.raises(NotFound):
        remote.session_by_name("none")
    with pytest.raises(InvalidRequest, match="owner is 'bob', expected 'ann'"):
        remote.sessions("bob")


def test_an_archive_moves_between_a_server_and_this_process(remote, local, tmp_path):
    chat = remote.session("there")
    chat.send("hello", **SHORT)
    done = chat.export(tmp_path / "s.zip")
    assert (done.turns, done.bytes) == (2, (tmp_path / "s.zip").stat().st_size)
    with pytest.raises(InvalidRequest, match="expected a new name"):
        chat.export(tmp_path / "s.zip")
    here = local.import_(tmp_path / "s.zip", "here")
    assert [turn.text for turn in here.turns] == [turn.text for turn in chat.turns]
    here.send("again", **SHORT)
    here.export(tmp_path / "t.zip")
    back = remote.import_(tmp_path / "t.zip", "back")
    assert back.token_ids == here.token_ids
    here.delete()
    with pytest.raises(InvalidRequest, match="expected a file that can be read"):
        remote.import_(tmp_path / "none.zip")


def test_errors_are_those_of_the_engine(remote, server):
    chat = remote.session("errors")
    with pytest.raises(InvalidRequest, match="temperature is -1, expected"):
        chat.send("x", temperature=-1)
    with pytest.raises(InvalidRequest, match="no_such"):
        chat.send("x", no_such=1)
    with pytest.raises(InvalidRequest, match="JSON"):
        chat.send("x", temperature=float("nan"))
    with pytest.raises(ContextFull, match="max_new_tokens is 100000"):
        chat.send("x", max_new_tokens=100_000)
    with pytest.raises(InvalidRequest, match="undo: the conversation has no turn"):
        chat.undo()
    with pytest.raises(NotFound):
        chat.follow()
    with pytest.raises(InvalidRequest, match="name"):
        remote.session("a\nb")
    running = chat.stream("go on", **ENDLESS)
    next(iter(running))
    with pytest.raises(SessionBusy):
        chat.send("more")
    running.close()
    chat.delete()
    with pytest.raises(NotFound):
        chat.send("x")
    with lmchat.connect(server.url, "key-of-bob") as bob, pytest.raises(NotFound):
        bob.session_by_id(remote.session("errors").id)


def test_a_refused_request_tells_when_to_retry(model):
    config = ServerConfig(limits=Limits())
    options = {**OPTIONS, "max_batch_size": 1, "max_queue": 1}
    with (
        RunningServer(config, model, **options) as server,
        lmchat.connect(server.url) as engine,
    ):
        first = engine.start_generate("a", **ENDLESS)
        second = engine.start_generate("b", **ENDLESS)
        with pytest.raises(Overloaded) as refused:
            engine.generate("c", **ENDLESS)
        assert refused.value.retry_after > 0
        for one in (first, second):
            one.cancel()
        assert first.result().finish_reason == "cancelled"


def test_a_reply_is_stopped_and_followed_by_any_client(remote, server):
    chat = remote.session("shared")
    with lmchat.connect(server.url, "key-of-ann") as other:
        same = other.session("shared")
        stream = chat.stream("go on", **ENDLESS)
        read = [next(stream) for _ in range(3)]
        assert same.state is State.DECODE
        follower = same.follow()
        assert next(follower).startswith(read[0][:1])
        assert same.stop(follower.turn_id + 1) is chat.stop(follower.turn_id + 1) is None
        stopped = same.stop(follower.turn_id)
        assert stopped is not None
        assert stopped.finish_reason == "cancelled"
        reply = stream.result()
        assert reply.text == follower.result().text == stopped.text
        assert "".join([*read, *stream]) == reply.text
        assert chat.stop() is None
        assert same.turns == chat.turns
        assert same.turns[-1].token_ids == tuple(reply.token_ids)


def test_a_reply_continues_where_the_stream_ended(remote, local):
    texts = []
    for engine in (remote, local):
        chat = engine.session("cut", settings=SHORT)
        chat.send("hello")
        follower_text = []
        stream = chat.stream_continue(max_new_tokens=5)
        reader = threading.Thread(target=lambda s=stream, t=follower_text: t.extend(s))
        reader.start()
        reader.join()
        texts.append(("".join(follower_text), stream.result().text, chat.turns[-1].text))
        chat.delete()
    assert texts[0] == texts[1]


def test_a_closed_engine_says_so(server):
    engine = lmchat.connect(server.url, "key-of-ann")
    chat = engine.session("gone")
    stream = chat.stream("go on", **ENDLESS)
    next(stream)
    engine.close()
    assert stream.result().finish_reason == "cancelled"
    engine.close()
    with pytest.raises((EngineClosed, NotFound)):
        chat.send("x")
    with pytest.raises(EngineClosed):
        engine.session("gone")
    with lmchat.connect(server.url, "key-of-ann") as again:
        assert again.session("gone").turns[-1].finish_reason == "cancelled"
        again.delete("gone")
