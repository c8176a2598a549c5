"""Repeated requests at another process than the first one's, which runs, has died, or was ended."""

import contextlib
import itertools
import json
import threading

import command
import pytest
import stores
from broken_client import RawRequest
from http_server import RunningServer
from serving_process import serving

from lmchat.store.sqlite.sqlite_store import SqliteStore

CHAT = "/v1/chat/completions"
SETTINGS = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
LONG = 200
KEY = {"Idempotency-Key": "k"}
numbers = itertools.count()


@pytest.fixture(scope="module")
def servers():
    """Two servers of one data directory, each with a store of its own."""
    options = {"isa": "portable", "threads": 1}
    with stores.folder() as home, contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(RunningServer(store=SqliteStore(home), **options)) for _ in range(2)
        ]


@pytest.fixture
def killable(servers, monkeypatch):
    """A server in a process of its own, on the same data directory, with the kernels of both."""
    home = servers[0].engine.sync._runtime.store.data_dir
    environment = {**command.ENVIRONMENT, "LMCHAT_HOME": str(home), "TURBOMIND_ISA": "portable"}
    monkeypatch.setattr(command, "ENVIRONMENT", environment)
    with serving("--threads", "1") as (process, url):
        yield process, int(url.rsplit(":", 1)[1])


def question():
    return f"Tell me of lamp {next(numbers)}."


def requests(client, length=LONG):
    """Returns path and body of a question at each door."""
    made = client.post("/v1/sessions", json={}).json()["id"]
    text = question()
    response = {"model": "memo", "input": text, "max_output_tokens": length, **SETTINGS}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": length, **SETTINGS}
    first = {"model": "memo", "input": "Hello.", "max_output_tokens": 2}
    greeted = {"text": "Hi.", "settings": {"max_new_tokens": 2}}
    turn = client.post(f"/v1/sessions/{made}/turns", json=greeted).json()["turn"]
    conversation = client.post("/v1/conversations", json={}).json()["id"]
    previous = client.post("/v1/responses", json=first).json()["id"]
    settings = {"max_new_tokens": length, **SETTINGS}
    return {
        "turns": (f"/v1/sessions/{made}/turns", {"text": text, "settings": settings}),
        "chat": (CHAT, {**chat, "session": f"chat {next(numbers)}"}),
        "conversation": ("/v1/responses", {**response, "conversation": conversation}),
        "previous": ("/v1/responses", {**response, "previous_response_id": previous}),
        "fork": ("/v1/responses", {**response, "previous_response_id": f"resp_{made}{turn:x}"}),
        "response": ("/v1/responses", response),
    }


def asked(server, body):
    """Returns how often the question of a body stands in all sessions."""
    text = body.get("text") or body.get("input") or body["messages"][0]["content"]
    engine = server.engine.sync
    sessions = [engine.session_by_id(info.id) for info in engine.sessions(hidden=True)]
    return sum(turn.text.count(text) for one in sessions for turn in one._record.tree)


def same(answer):
    """Returns what two answers to one request have in common."""
    found = answer.json()
    if "choices" in found:
        return found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"]
    return found.get("id", found.get("turn")), found.get("output", found.get("text"))


DOORS = ("turns", "chat", "conversation", "previous", "fork", "response")


@pytest.mark.parametrize("kind", DOORS)
def test_a_key_has_one_turn_at_all_replicas(servers, kind):
    clients = [server.client() for server in servers]
    path, body = requests(clients[0], 20)[kind]
    headers = {"Idempotency-Key": f"key {next(numbers)}"}
    answers = [client.post(path, json=body, headers=headers) for client in clients + clients[:1]]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert same(answers[0]) == same(answers[1]) == same(answers[2])
    assert asked(servers[0], body) == 1
    other = {**body, "input": "Else."} if "input" in body else {**body, "text": "Else."}
    if kind == "chat":
        other = {**body, "messages": [{"role": "user", "content": "Else."}]}
    for client in clients:
        answer = client.post(path, json=other, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            422, "idempotency_key_reused",
        )  # fmt: skip
    again = clients[1].post(path, json=body, headers={"Idempotency-Key": f"key {next(numbers)}"})
    assert again.status_code == 200
    assert asked(servers[0], body) == 2


ITEM = {"type": "message", "role": "user", "content": "Noted."}
SAID = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Noted."}]


@pytest.mark.parametrize("kind", ["append", "edit_reply", "items", "conversation"])
def test_a_change_with_a_key_is_made_once(servers, kind):
    clients = [server.client() for server in servers]
    session = clients[0].post("/v1/sessions", json={}).json()["id"]
    clients[0].post(f"/v1/sessions/{session}/append", json={"messages": SAID})
    path, body, other = {
        "append": (f"/v1/sessions/{session}/append", {"messages": SAID}, {"messages": SAID * 2}),
        "edit_reply": (
            f"/v1/sessions/{session}/edit_reply",
            {"turn": 0, "text": "Noted."},
            {"turn": 0, "text": "x"},
        ),
        "items": (f"/v1/conversations/conv_{session}/items", {"items": [ITEM]}, {"items": []}),
        "conversation": ("/v1/conversations", {"items": [ITEM]}, {"metadata": {"a": "b"}}),
    }[kind]
    headers = {"Idempotency-Key": f"key {next(numbers)}"}
    answers = [client.post(path, json=body, headers=headers) for client in clients + clients[:1]]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert clients[1].post(path, json=other, headers=headers).status_code == 422
    if kind == "conversation":
        session = answers[0].json()["id"].removeprefix("conv_")
        assert answers[0].json()["metadata"] == {}
    found = clients[1].get(f"/v1/sessions/{session}").json()
    branches = clients[1].get(f"/v1/sessions/{session}/branches", params={"turn": 0}).json()["data"]
    assert {
        "append": len(found["turns"]) == 4,
        "edit_reply": len(branches) == 2,
        "items": found["unanswered"] == "Noted.",
        "conversation": found["unanswered"] == "Noted.",
    }[kind]


@pytest.mark.parametrize("kind", ["chat", "conversation", "response"])
def test_requests_with_one_key_at_once_have_one_turn(servers, kind):
    path, body = requests(servers[0].client(), 60)[kind]
    found = []

    def send(server):
        found.append(server.client().post(path, json=body, headers=KEY))

    senders = [threading.Thread(target=send, args=(servers[i % 2],)) for i in range(4)]
    for one in senders:
        one.start()
    for one in senders:
        one.join(60)
    assert [answer.status_code for answer in found] == [200] * 4
    assert len({json.dumps(same(answer)) for answer in found}) == 1
    assert asked(servers[0], body) == 1


def test_a_key_without_its_client_is_continued_at_another_replica(servers):
    path, body = requests(servers[0].client())["turns"]
    whole = servers[1].client().post(*requests(servers[0].client())["turns"][:1], json=body).json()
    body |= {"linger": 0}
    request = RawRequest(servers[0].port, path, {**body, "stream": True}, Idempotency_Key="k")
    request.read_until(b"data: ", 8)
    request.close()
    answer = servers[1].client().post(path, json=body, headers=KEY).json()
    assert (answer["text"], answer["finish_reason"]) == (whole["text"], "length")
    assert asked(servers[1], body) == 2  # that of the reference is one of them


def texts(lines):
    """Yields the pieces of text of a stream of a session."""
    for line in lines:
        if line.startswith("data: ") and '"kind": "text"' in line:
            yield json.loads(line[6:])["text"]


def left(port, path, body, events):
    """Starts a streamed reply and leaves after some events."""
    request = RawRequest(port, path, {**body, "stream": True})
    request.read_until(b"data: ", events)
    request.close()


def test_a_reply_of_another_process_is_followed(servers):
    one, two = (server.client() for server in servers)
    path, body = requests(one)["turns"]
    body |= {"detach": True}
    left(servers[0].port, path, body, 4)
    with two.stream("POST", path, json={**body, "stream": True}) as answer:
        shown = "".join(texts(answer.iter_lines()))
    turns = one.get(path.removesuffix("/turns")).json()["turns"]
    assert [turn["text"] for turn in turns[-2:]] == [body["text"], shown]
    assert turns[-1]["finish_reason"] == "length"


def test_replies_of_a_killed_process_are_continued(servers, killable):
    process, port = killable
    client = servers[1].client()
    kinds = requests(client, 900)
    path, followed = kinds["turns"]
    left(port, path, {**followed, "detach": True}, 4)
    cut = [kinds[kind] for kind in ("chat", "conversation", "fork")]
    for kind in cut:
        left(port, *kind, 12) if kind is cut[0] else None
    with contextlib.ExitStack() as stack:
        for kind in cut[1:]:
            request = RawRequest(port, kind[0], {**kind[1], "stream": True})
            stack.callback(request.close)
            request.read_until(b"data: ", 12)
        with client.stream(
            "POST", path, json={**followed, "stream": True, "detach": True}
        ) as answer:
            pieces = texts(answer.iter_lines())
            shown = next(pieces)
            process.kill()
            shown += "".join(pieces)
    turns = client.get(path.removesuffix("/turns")).json()["turns"]
    assert [turn["text"] for turn in turns[-2:]] == [followed["text"], shown]
    assert turns[-1]["finish_reason"] == "length"
    for path, body in cut:
        usage = client.post(path, json=body).json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 900
    assert asked(servers[1], followed) == 4


def test_an_orderly_end_leaves_nothing_to_take_over(tmp_path):
    body = {"messages": [{"role": "user", "content": "Once."}], "max_tokens": 4, "session": "s"}
    for times in (1, 2):
        with RunningServer(store=tmp_path, threads=1) as server:
            assert server.client().post(CHAT, json=body).status_code == 200
            session = server.engine.sync.session_by_name("s")
            assert [turn.text for turn in session.turns].count("Once.") == times


def test_the_same_message_at_two_replicas_is_two_messages(servers):
    body = {"messages": [{"role": "user", "content": "Yes."}], "max_tokens": 4}
    body["session"] = f"chat {next(numbers)}"
    for times in range(1, 5):
        assert servers[times % 2].client().post(CHAT, json=body).status_code == 200
        session = servers[0].engine.sync.session_by_name(body["session"])
        assert [turn.text for turn in session.turns].count("Yes.") == times


def test_a_client_that_has_left_is_noticed_in_time_by_an_equal_request(servers):
    body = requests(servers[0].client())["chat"][1]
    request = RawRequest(servers[0].port, CHAT, {**body, "stream": True})
    request.read_until(b"data: ", 4)
    threading.Timer(0.1, request.close).start()
    answer = servers[1].client().post(CHAT, json=body)
    assert answer.status_code == 200
    assert asked(servers[1], body) == 1
