"""Routes at a server that does not generate the reply which they are about: another one does."""

import contextlib
import json

import pytest
import stores
from http_server import RunningServer

from lmchat.server.retries import keys
from lmchat.store.sqlite.sqlite_store import SqliteStore

LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1800}
KEY = {"Idempotency-Key": "k"}


@pytest.fixture(scope="module")
def clients():
    """Clients of two servers of one data directory, each with a store of its own."""
    with stores.folder() as home, contextlib.ExitStack() as stack:
        options = {"isa": "portable", "threads": 1}
        servers = [RunningServer(store=SqliteStore(home), **options) for _ in range(2)]
        yield [stack.enter_context(server).client() for server in servers]


@pytest.fixture
def path(clients):
    return clients[0].post("/v1/sessions", json={"settings": LONG}).headers["location"]


@contextlib.contextmanager
def events(client, method, path, **request):
    """Yields the events of a stream, of which the first has come."""
    with client.stream(method, path, **request) as answer:
        assert answer.status_code == 200, answer.read()
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def texts(parts):
    """Returns the tokens and the last event of a stream of a session."""
    *deltas, done = list(parts)
    return [i for part in deltas for i in part.get("token_ids", ())], done


@contextlib.contextmanager
def running(client, path, verb="turns", **body):
    """A reply of 1800 tokens that has begun. Yields its turn."""
    body = {"stream": True, "detach": True, "token_ids": True} | body
    with events(client, "POST", f"{path}/{verb}", json=body, headers=KEY) as parts:
        turn = next(parts)["turn"]
        next(parts)
        yield turn
        client.post(f"{path}/stop")


def test_a_running_turn_is_followed_by_its_id(clients, path):
    one, two = clients
    with running(one, path, text="Hello") as turn:
        query = {"turn": turn, "token_ids": True}
        with events(two, "GET", f"{path}/events", params=query) as parts:
            assert next(parts)["turn"] == turn
            two.post(f"{path}/stop", json={"turn": turn})
            tokens, done = texts(parts)
    assert done["turn"] == turn
    assert done["finish_reason"] == "cancelled"
    with events(two, "GET", f"{path}/events", params=query) as parts:
        assert texts(parts) == (tokens, done)
    assert two.get(f"{path}/events", params={"turn": turn + 1}).status_code == 404


@pytest.mark.parametrize("verb", ["turns", "continue"])
def test_a_repeated_request_gets_the_reply_of_the_first(clients, path, verb):
    one, two = clients
    text = {"text": "Hello"} if verb == "turns" else {}
    if verb == "continue":
        body = {"text": "Hello", "settings": {"max_new_tokens": 2}}
        assert one.post(f"{path}/turns", json=body).status_code == 200
    body = {"token_ids": True} | text
    with running(one, path, verb, **text):
        other = two.post(f"{path}/{verb}", json=text | {"metadata": {"x": "y"}}, headers=KEY)
        assert other.json()["error"]["code"] == "idempotency_key_reused"
        with events(
            two, "POST", f"{path}/{verb}", json=body | {"stream": True}, headers=KEY
        ) as parts:
            next(parts)
            one.post(f"{path}/stop")
            tokens, done = texts(parts)
    assert done["token_ids"] == tokens
    again = two.post(f"{path}/{verb}", json=body, headers=KEY).json()
    assert again["token_ids"] == tokens
    assert len(one.get(path).json()["turns"]) == 2


def test_another_request_is_refused_meanwhile(clients, path):
    one, two = clients
    with running(one, path, text="Hello"):
        answer = two.post(f"{path}/turns", json={"text": "x"}, headers={"Idempotency-Key": "other"})
        assert answer.status_code == 409


@pytest.fixture
def before_look(monkeypatch):
    """Sets what is called before and after the looks for the reply of a key, once each."""
    find, steps = keys.find, []

    def found(*arguments):
        before, after = steps.pop(0) if steps else (None, None)
        if before:
            before()
        reply = find(*arguments)
        if after:
            after()
        return reply

    monkeypatch.setattr(keys, "find", found)
    return steps.extend


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("turns", {"text": "More"}),
        ("retry", {"settings": {"temperature": 1}}),
        ("edit", {"turn": 0, "text": "Other"}),
        ("continue", {}),
    ],
)
def test_a_reply_that_another_process_stores_before_the_start_wins(
    clients, path, before_look, verb, body
):
    one, two = clients
    short = {"text": "Hello", "settings": {"max_new_tokens": 2}}
    assert two.post(f"{path}/turns", json=short).status_code == 200
    body = {"token_ids": True, **body}
    body["settings"] = {"max_new_tokens": 3, **body.get("settings", {})}
    first = []

    def generate():
        first.append(one.post(f"{path}/{verb}", json=body, headers=KEY))

    before_look([(None, generate)])
    again = two.post(f"{path}/{verb}", json=body, headers=KEY)
    assert [answer.status_code for answer in (*first, again)] == [200, 200]
    assert first[0].json()["turn"] == again.json()["turn"]
    assert first[0].json()["token_ids"] == again.json()["token_ids"]
    tokens = [client.get(f"{path}?token_ids=true").json()["turns"] for client in clients]
    assert tokens[0] == tokens[1]
    assert tokens[0][-1]["token_ids"] == again.json()["token_ids"]


def test_another_body_that_is_stored_before_the_start_is_refused(clients, path, before_look):
    one, two = clients
    body = {"text": "Hello", "settings": {"max_new_tokens": 2}}
    before_look([(None, lambda: one.post(f"{path}/turns", json=body, headers=KEY))])
    answer = two.post(f"{path}/turns", json={**body, "text": "Other"}, headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(two.get(path).json()["turns"]) == 2


def test_a_reply_that_ends_between_the_refusal_and_the_next_look_is_returned(
    clients, path, before_look
):
    one, two = clients
    with contextlib.ExitStack() as stack:
        before_look(
            [
                (None, lambda: stack.enter_context(running(one, path, text="Hello"))),
                (None, None),  # that of the other process
                (lambda: one.post(f"{path}/stop"), None),
            ]
        )
        body = {"text": "Hello", "token_ids": True}
        answer = two.post(f"{path}/turns", json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    reply = one.get(f"{path}?token_ids=true").json()["turns"][-1]
    assert answer.json()["token_ids"] == reply["token_ids"]
    assert answer.json()["turn"] == reply["id"]


def test_a_key_that_is_too_old_is_that_of_another_request(clients, path, monkeypatch):
    one, two = clients
    with running(one, path, text="Hello"):
        monkeypatch.setattr(keys, "SECONDS", -60.0)
        answer = two.post(f"{path}/turns", json={"text": "Hello"}, headers=KEY)
        assert answer.status_code == 409


def response(client, **body):
    body = {"model": "memo", "input": "Hello", "background": True, "temperature": 0} | body
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_background_response_is_found_and_cancelled(clients):
    one, two = clients
    blocked = [response(one, ignore_eos=True, max_output_tokens=1800) for _ in range(2)]
    found = [two.get(f"/v1/responses/{one['id']}").json() for one in blocked]
    assert found == blocked
    assert found[0]["status"] == "in_progress"
    follows = {"model": "memo", "input": "x", "previous_response_id": found[0]["id"]}
    assert two.post("/v1/responses", json=follows).status_code == 409
    cancelled = two.post(f"/v1/responses/{found[0]['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert two.delete(f"/v1/responses/{found[1]['id']}").json()["deleted"]
    for client in clients:
        assert client.get(f"/v1/responses/{found[0]['id']}").json()["status"] == "cancelled"
        assert client.get(f"/v1/responses/{found[1]['id']}").status_code == 404


def test_a_streamed_response_is_deleted(clients):
    one, two = clients
    body = {
        "model": "memo", "input": "Hello", "stream": True, "temperature": 0,
        "ignore_eos": True, "max_output_tokens": 1800,
    }  # fmt: skip
    with events(one, "POST", "/v1/responses", json=body) as parts:
        path = f"/v1/responses/{next(parts)['response']['id']}"
        assert next(part for part in parts if part["type"] == "response.output_text.delta")
        assert two.delete(path).json()["deleted"]
        kinds = [part["type"] for part in parts]
    assert kinds[-1] == "response.incomplete"
    assert kinds.count("response.incomplete") == 1
    assert [client.get(path).status_code for client in clients] == [404, 404]
    assert two.delete(path).status_code == 404
