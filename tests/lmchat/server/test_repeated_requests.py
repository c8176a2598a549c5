"""Requests repeated with their `Idempotency-Key` after a reply was cut, refused or lost."""

import asyncio
import threading

import pytest
import virtual_time
from http_server import RunningServer

from lmchat.errors import EngineClosed
from lmchat.generation.parts import PartsLog
from lmchat.generation.reply_stream import Follower
from lmchat.server import ServerConfig
from lmchat.server.retries.entry import Entry

GREEDY = {"temperature": 0, "max_new_tokens": 12}
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 600}


@pytest.fixture(scope="module")
def server():
    """A server for one generation and one that waits, with slow kernels."""
    config = ServerConfig(keys={"a": "ann", "b": "bob"})
    options = {"max_batch_size": 1, "max_queue": 1, "isa": "portable", "threads": 1}
    with RunningServer(config, **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client("a")


@pytest.fixture
def path(client):
    made = client.post("/v1/sessions", json={"settings": GREEDY}).headers["location"]
    yield made
    client.delete(made)


@pytest.fixture
def free_slot(server):
    """A generation of ann has the only slot until the test frees it."""
    with server.taken_slot("ann") as free:
        yield free


def wait_for(client, path, state):
    while client.get(path).json()["state"] != state:
        pass


def disconnect(server, path, body, headers, after=1):
    """Starts a streamed turn and disconnects after some lines."""
    with server.client("a").stream("POST", f"{path}/turns", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        for _ in range(after):
            next(lines)


def test_a_reply_outlives_a_broken_connection_until_its_request_is_repeated(server, client, path):
    headers = {"Idempotency-Key": "k"}
    body = {"text": "Tell me more.", "settings": LONG, "stream": True}
    disconnect(server, path, body, headers, after=20)
    again = client.post(f"{path}/turns", json={**body, "stream": False}, headers=headers).json()
    assert again["finish_reason"] == "length"
    assert again["usage"]["completion_tokens"] == LONG["max_new_tokens"]
    turns = client.get(path).json()["turns"]
    assert [turn["id"] for turn in turns][1:] == [again["turn"]]


def test_a_linger_of_zero_stops_at_once_also_with_a_key(server, client, path):
    body = {"text": "Tell me more.", "settings": LONG, "stream": True, "linger": 0}
    disconnect(server, path, body, {"Idempotency-Key": "k"}, after=20)
    wait_for(client, path, "idle")
    assert client.get(path).json()["turns"][-1]["finish_reason"] == "cancelled"


def test_a_key_is_free_after_a_disconnect_before_the_first_token(server, client, path, free_slot):
    headers, body = {"Idempotency-Key": "k"}, {"text": "one", "stream": True, "linger": 0}
    disconnect(server, path, body, headers)
    wait_for(client, path, "idle")
    free_slot()
    again = client.post(f"{path}/turns", json={**body, "stream": False}, headers=headers).json()
    assert again["finish_reason"] != "cancelled"
    assert again["text"]
    turns = client.get(path).json()["turns"]
    assert [turn["text"] for turn in turns] == ["one", again["text"]]


def test_a_key_is_free_after_a_continuation_that_added_nothing(server, client, path, free_slot):
    session = server.engine.sync.session_by_id(path.rsplit("/", 1)[1], owner="ann")
    session.append([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    headers, found = {"Idempotency-Key": "k"}, []

    def send():
        answer = server.client("a").post(f"{path}/continue", json={}, headers=headers)
        found.append(answer.json()["finish_reason"])

    sender = threading.Thread(target=send)
    sender.start()
    wait_for(client, path, "queued")
    client.post(f"{path}/stop")
    sender.join(60)
    free_slot()
    send()
    assert found[0] == "cancelled"
    assert found[1] in ("length", "stop")


def test_a_key_is_free_after_its_queued_request_was_displaced(server, client, path, free_slot):
    headers, found = {"Idempotency-Key": "k"}, []

    def send():
        answer = server.client("a").post(f"{path}/turns", json={"text": "one"}, headers=headers)
        found.append(answer.status_code)

    sender = threading.Thread(target=send)
    sender.start()
    wait_for(client, path, "queued")
    other = server.engine.sync.start_generate("x", owner="bob", max_new_tokens=1)
    sender.join(60)
    free_slot()
    other.wait()
    send()
    assert found == [429, 200]


class _Generation:
    """A running generation that has no tokens."""

    reply = None

    def __init__(self):
        self.log = PartsLog()
        self.cancelled = False

    @property
    def done(self):
        return self.log.done

    def follow(self):
        return Follower(self.log)

    def cancel(self):
        self.cancelled = True


def test_repetitions_wait_for_the_end_of_a_cancelled_reply():
    """A request repeated between the cancellation and the end of its reply generates again."""

    async def main(loop):
        entry = Entry("", answer=_Generation())
        entry.attach(False)
        entry.leave()
        assert entry.answer.cancelled
        produces = asyncio.ensure_future(entry.produces())
        await asyncio.sleep(1)
        assert not produces.done()
        entry.answer.log.end(None, EngineClosed("it has ended"))
        assert not await produces

    virtual_time.run(main)


def test_the_timer_of_an_earlier_client_does_not_stop_a_later_one():
    async def main(loop):
        entry = Entry("", answer=_Generation())
        entry.attach(False, 10)
        entry.leave()
        await asyncio.sleep(5)
        entry.attach(False)
        entry.leave()  # at 5 s: the reply lingers until 15 s
        await asyncio.sleep(9)
        assert not entry.answer.cancelled
        await asyncio.sleep(2)
        assert entry.answer.cancelled

    virtual_time.run(main)


def test_keys_of_all_verbs_survive_a_restart(tmp_path):
    requests = (
        ("turns", {"text": "one"}),
        ("retry", {"settings": {"temperature": 1}}),
        ("edit", {"turn": 0, "text": "two"}),
        ("continue", {"settings": {"max_new_tokens": 4}}),
    )

    def send(client, path):
        found = []
        for verb, body in requests:
            headers = {"Idempotency-Key": f"key of {verb}"}
            answer = client.post(f"{path}/{verb}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["turn"])
        return found

    with RunningServer(store=tmp_path) as server:
        client = server.client()
        made = client.post("/v1/sessions", json={"settings": GREEDY})
        path = made.headers["location"]
        first = send(client, path)
        turns = client.get(path).json()["turns"]
    with RunningServer(store=tmp_path) as server:
        client = server.client()
        assert send(client, path) == first
        assert client.get(path).json()["turns"] == turns
        assert len(client.get(f"{path}/branches", params={"turn": 0}).json()["data"]) == 3
        other = {"Idempotency-Key": "key of continue"}
        assert client.post(f"{path}/continue", json={}, headers=other).status_code == 422
