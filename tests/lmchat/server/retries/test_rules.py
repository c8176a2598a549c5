"""Which requests are equal, and which turns are taken over."""

import itertools
import time

import pytest
from broken_client import RawRequest
from http_server import RunningServer
from pace import slow_steps

from lmchat.server import ServerConfig
from lmchat.server.retries import door as door_module
from lmchat.server.retries import turn as turn_module

CHAT = "/v1/chat/completions"
SETTINGS = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
LONG = 200
VERY_LONG = 1500  # tokens of a reply that a test stops
numbers = itertools.count()


@pytest.fixture(scope="module")
def server():
    config = ServerConfig(keys={"key-of-ann": "ann", "key-of-bob": "bob"})
    with RunningServer(config, threads=1, max_batch_size=2) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client("key-of-ann")


@pytest.fixture
def body():
    messages = [{"role": "user", "content": "Tell me of the lamp."}]
    return {"messages": messages, "max_tokens": 60, "session": f"s{next(numbers)}", **SETTINGS}


def session_of(server, body, owner="ann"):
    return server.engine.sync.session_by_name(body["session"], owner=owner)


def questions(server, body):
    turns = session_of(server, body).turns
    return [turn.text for turn in turns if turn.role == "user"]


def leave(server, path, body, tokens=3, **headers):
    """Reads some events of a stream, and leaves. Returns when the reply has ended."""
    more = {"Authorization": "Bearer key-of-ann", **headers}
    request = RawRequest(server.port, path, {**body, "stream": True}, **more)
    request.read_until(b"data: ", tokens + 1)
    request.close()


def cut(server, body, tokens=3):
    leave(server, CHAT, body, tokens)
    session = session_of(server, body)
    while session.running is not None or not session.turns:
        time.sleep(0.001)
    return session


@pytest.mark.parametrize(
    "change",
    [
        {"stream": False},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"user": "somebody", "metadata": {"try": "2"}, "store": True},
        {"top_p": None, "n": 1, "return_progress": True},
        {"messages": [{"content": "Tell me of the lamp.", "role": "user", "tool_calls": []}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Tell me of the lamp."}]}
            ]
        },
        {"max_completion_tokens": LONG, "max_tokens": None},
    ],
)
def test_what_does_not_change_the_reply_does_not_make_another_request(server, client, body, change):
    body["max_tokens"] = LONG
    session = cut(server, body)
    reply = session.turns[-1].id
    assert client.post(CHAT, json={**body, **change}).status_code == 200
    assert [turn.id for turn in session.turns][1:] == [reply]
    assert session.turns[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "Tell me of the lamp!"}]},
        {"temperature": 0.9},
        {"max_tokens": 6},
        {"stop": ["x"]},
        {"logprobs": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_what_changes_the_reply_makes_another_request(server, client, body, change):
    body["max_tokens"] = LONG
    cut(server, body)
    changed = {**body, "max_tokens": 8, **change}
    if "max_tokens" not in change:  # only the length differs otherwise
        changed = {**body, **change, "max_tokens": LONG}
    assert client.post(CHAT, json=changed).status_code == 200
    assert len(questions(server, body)) == 2


def test_a_whole_history_is_compared_as_it_was_sent(server, client, body):
    first = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    history = [*body["messages"], {"role": "assistant", "content": first}]
    again = {**body, "messages": [*history, {"role": "user", "content": "More?"}]}
    again["max_tokens"] = LONG
    cut(server, again)
    assert client.post(CHAT, json=again).status_code == 200
    assert questions(server, body) == ["Tell me of the lamp.", "More?"]


def test_a_reply_that_a_client_stopped_is_not_continued(server, client, body):
    body["max_tokens"] = VERY_LONG
    with slow_steps():  # what is cut and a second reply of this length fit the context together
        request = RawRequest(
            server.port, CHAT, {**body, "stream": True}, Authorization="Bearer key-of-ann"
        )
        request.read_until(b"data: ", 4)
        session = session_of(server, body)
        assert client.post(f"/v1/sessions/{session.id}/stop").json()["stopped"]
        request.close()
    assert client.post(CHAT, json=body).status_code == 200
    assert len(questions(server, body)) == 2


def test_a_stop_after_the_client_has_left_counts(server, client):
    path = client.post("/v1/sessions", json={}).headers["location"]
    body = {"text": "one", "settings": {"max_new_tokens": VERY_LONG, **SETTINGS}, "detach": True}
    with slow_steps():
        leave(server, f"{path}/turns", body)
        assert client.post(f"{path}/stop").json()["stopped"]
    assert client.post(f"{path}/turns", json=body).status_code == 200
    assert len(client.get(path).json()["turns"]) == 4


def test_a_turn_that_was_cut_long_ago_is_not_taken_over(server, client, body, monkeypatch):
    body["max_tokens"] = LONG
    cut(server, body)
    monkeypatch.setattr(turn_module, "SECONDS", -1.0)
    assert client.post(CHAT, json=body).status_code == 200
    assert len(questions(server, body)) == 2


def test_only_the_last_turn_is_taken_over(server, client, body):
    body["max_tokens"] = LONG
    session = cut(server, body)
    other = {**body, "messages": [{"role": "user", "content": "Else."}], "max_tokens": 4}
    client.post(CHAT, json=other)
    client.post(CHAT, json=body)
    assert questions(server, body) == ["Tell me of the lamp.", "Else.", "Tell me of the lamp."]
    again = {**body, "max_tokens": LONG - 1}
    cut(server, again)
    session.undo()
    client.post(CHAT, json=again)
    assert len(session.branches(3)) == 2


def test_turns_are_taken_over_within_their_owner(server, client):
    body = {"model": "memo", "input": "Of whom?", "max_output_tokens": LONG, **SETTINGS}
    leave(server, "/v1/responses", body, 8)

    def sessions(owner):
        return server.engine.sync.sessions(owner, hidden=True, search="whom")

    while not [one for one in sessions("ann") if one.turns]:
        time.sleep(0.002)
    bob = server.client("key-of-bob")
    assert bob.post("/v1/responses", json=body).json()["status"] == "incomplete"
    assert (len(sessions("ann")), len(sessions("bob"))) == (1, 1)
    assert client.post("/v1/responses", json=body).json()["status"] == "incomplete"
    assert (len(sessions("ann")), len(sessions("bob"))) == (1, 1)


def test_an_equal_request_beside_a_waiting_client_is_refused(server, client, body, monkeypatch):
    monkeypatch.setattr(door_module, "NOTICE_SECONDS", 0.1)
    body["max_tokens"] = VERY_LONG
    request = RawRequest(
        server.port, CHAT, {**body, "stream": True}, Authorization="Bearer key-of-ann"
    )
    request.read_until(b"data: ", 4)
    answer = client.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    request.close()


@pytest.mark.parametrize("more", [{"detach": True}, {"linger": 30}])
def test_a_reply_that_waits_for_its_client_is_followed(server, client, more):
    path = client.post("/v1/sessions", json={}).headers["location"]
    body = {"text": "one", "settings": {"max_new_tokens": LONG, **SETTINGS}, **more}
    leave(server, f"{path}/turns", body)
    running = server.engine.sync.session_by_id(path.rsplit("/", 1)[1], owner="ann").running
    answer = client.post(f"{path}/turns", json=body).json()
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", LONG)
    assert running is None or running.result().turn.id == answer["turn"]
    assert len(client.get(path).json()["turns"]) == 2


@pytest.mark.parametrize("verb", ["retry", "edit", "continue"])
def test_the_other_verbs_are_taken_over(server, client, verb):
    path = client.post("/v1/sessions", json={}).headers["location"]
    first = {"text": "one", "settings": {"max_new_tokens": 4, **SETTINGS}}
    client.post(f"{path}/turns", json=first)
    body = {"settings": {"max_new_tokens": LONG, **SETTINGS}}
    body |= {"turn": 0, "text": "two"} if verb == "edit" else {}
    leave(server, f"{path}/{verb}", body, 6)
    answer = client.post(f"{path}/{verb}", json=body).json()
    assert answer["finish_reason"] == "length"
    tokens = LONG + (4 if verb == "continue" else 0)
    assert (
        len(client.get(path, params={"token_ids": True}).json()["turns"][-1]["token_ids"]) == tokens
    )
    branches = client.get(f"{path}/branches", params={"turn": 0}).json()["data"]
    assert len(branches) == (1 if verb == "continue" else 2)


def test_the_usage_of_a_continued_reply_is_that_of_the_whole(server, client, body):
    body["max_tokens"] = LONG
    cut(server, body)
    usage = client.post(CHAT, json=body).json()["usage"]
    whole = client.post(CHAT, json={**body, "session": f"s{next(numbers)}"}).json()["usage"]
    assert usage["completion_tokens"] == whole["completion_tokens"] == LONG
    assert usage["prompt_tokens"] == whole["prompt_tokens"]


def test_a_continued_reply_has_all_log_probabilities(server, client, body):
    body |= {"max_tokens": 400, "logprobs": True, "top_logprobs": 1}
    cut(server, body)
    choice = client.post(CHAT, json=body).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == 400
    assert questions(server, body) == ["Tell me of the lamp."]
