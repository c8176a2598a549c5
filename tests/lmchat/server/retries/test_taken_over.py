"""Requests that a client repeats without a key: what broke, at which door, and at which replica."""

import contextlib
import itertools
import time

import pytest
import stores
from broken_client import RawRequest
from http_server import RunningServer

from lmchat.server import ServerConfig
from lmchat.store.sqlite.sqlite_store import SqliteStore

LENGTH = 80
SETTINGS = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
numbers = itertools.count()


@pytest.fixture(scope="module")
def servers():
    """Two servers of one data directory, each with a store and one slot of its own."""
    config = ServerConfig(keys={"key-of-ann": "ann", "key-of-bob": "bob"})
    options = {"threads": 1, "max_batch_size": 1}
    with stores.folder() as home, contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(RunningServer(config, store=SqliteStore(home), **options))
            for _ in range(2)
        ]


class Door:
    """One way to ask a question.

    Args:
        kind: the way.
        client: makes what the question needs, such as a conversation.
        question: the question.
        length: tokens of the reply.
    """

    def __init__(self, kind, client, question, length=LENGTH):
        self.question, self.headers = question, {}
        self.path, self.body = "/v1/responses", {"model": "memo", "input": question, **SETTINGS}
        self.body["max_output_tokens"] = length
        if kind in ("session", "header"):
            self.path, name = "/v1/chat/completions", f"chat {next(numbers)}"
            messages = [{"role": "user", "content": question}]
            self.body = {"messages": messages, "max_tokens": length, **SETTINGS}
            if kind == "session":
                self.body["session"] = name
            else:
                self.headers["x-session-id"] = name
        elif kind == "turns":
            self.path = client.post("/v1/sessions", json={}).headers["location"] + "/turns"
            settings = {"max_new_tokens": length, **SETTINGS}
            self.body = {"text": question, "settings": settings}
        elif kind == "conversation":
            made = client.post("/v1/conversations", json={}).json()
            self.body["conversation"] = made["id"]
        elif kind == "waiting":
            items = [{"type": "message", "role": "user", "content": "Before."}]
            made = client.post("/v1/conversations", json={"items": items}).json()
            self.body["conversation"] = made["id"]
        elif kind == "previous":
            first = {"model": "memo", "input": "Hello.", "max_output_tokens": 2}
            made = client.post("/v1/responses", json=first).json()
            self.body["previous_response_id"] = made["id"]
        elif kind == "fork":  # of a user's session
            session = client.post("/v1/sessions", json={}).json()["id"]
            turn = {"text": "Hello.", "settings": {"max_new_tokens": 2}}
            made = client.post(f"/v1/sessions/{session}/turns", json=turn).json()
            self.body["previous_response_id"] = f"resp_{session}{made['turn']:x}"

    def ask(self, client, **more):
        """Returns the answer, which is a good one."""
        answer = client.post(self.path, json={**self.body, **more}, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer

    def open(self, server, **more):
        """Sends the question on a connection that the test breaks."""
        headers = {"Authorization": "Bearer key-of-ann", **self.headers}
        return RawRequest(server.port, self.path, {**self.body, **more}, **headers)


def text_of(answer):
    """Returns the text of an answer of any door."""
    found = answer.json()
    if "choices" in found:
        return found["choices"][0]["message"]["content"]
    if "output" in found:
        return "".join(part["text"] for item in found["output"] for part in item["content"])
    return found["text"]


def replies_to(server, question):
    """Returns the replies to the question in all sessions of ann, once for each time that it is
    asked, and checks that no session has a question without a reply."""
    engine, found = server.engine.sync, []
    for info in engine.sessions("ann", hidden=True):
        session = engine.session_by_id(info.id, owner="ann")
        turns = session.turns
        for turn, reply in itertools.pairwise(turns):
            found += [reply] * turn.text.count(question)
        assert not turns or turns[-1].role == "assistant"
    return found


def until_idle(server):
    """Waits until the server generates nothing."""
    engine = server.engine.sync
    while any(info.state not in ("idle", "closed") for info in engine.sessions("ann", hidden=True)):
        time.sleep(0.002)


KINDS = ("session", "header", "turns", "conversation", "waiting", "previous", "fork", "response")


CASES = [
    (kind, place, at)
    for kind, place, at in itertools.product(KINDS, ("first token", "middle", "last byte"), (0, 1))
    if kind in ("session", "conversation")
    or (place == "middle" and at == 1)
    or (place == "last byte" and kind == "response")
]


@pytest.mark.parametrize(("kind", "place", "at"), CASES)
def test_a_question_whose_client_left_is_stored_once(servers, kind, place, at, monkeypatch):
    one, two = (server.client("key-of-ann") for server in (servers[0], servers[at]))
    bob = servers[0].client("key-of-bob")
    question = f"Say {next(numbers)}-lamps."
    whole = text_of(Door(kind, bob, question).ask(bob))
    door = Door(kind, one, question)
    if place == "first token":
        # Else a short turn of a live session would take the slot.
        monkeypatch.setattr("lmchat.sessions.turn_execution.LIVE_TOKENS", 0)
        with servers[0].taken_slot("ann"):
            request = door.open(servers[0])
            while servers[0].engine.sync.queue_stats().waiting == 0:
                time.sleep(0.001)
            request.close()
            until_idle(servers[0])
    elif place == "middle":
        request = door.open(servers[0], stream=True)
        request.read_until(b"data: ", 12)
        request.close()
        until_idle(servers[0])
    else:
        request = door.open(servers[0])
        while not replies_to(servers[0], question) and not request.read:
            pass
        until_idle(servers[0])
        request.reset()  # the response lies unread in its buffer
    answer = door.ask(two)
    assert text_of(answer) == whole
    replies = replies_to(servers[at], question)
    assert [(reply.text, reply.finish_reason) for reply in replies] == [(whole, "length")]
    # It is delivered now: whoever asks again asks something new.
    if kind not in ("session", "conversation"):
        return
    door.ask(two)
    assert len(replies_to(servers[0], question)) == 2
