"""Chat completions as turns of durable sessions."""

import json
import threading

import http_raw
import pytest
from http_server import RunningServer
from openai_bodies import chat, chat_stream, refused, stream

from lmchat.server import ServerConfig

PATH = "/v1/chat/completions"
FIRST = {"role": "user", "content": "My dog is called Waffles."}
SECOND = {"role": "user", "content": "What is my dog's name?"}


@pytest.fixture(scope="module")
def server():
    with RunningServer(ServerConfig(keys={"a": "ann", "b": "bob"})) as found:
        yield found


@pytest.fixture
def client(server):
    return server.client("a")


def session(server, name, owner="ann"):
    return server.call(server.engine.session(name, owner=owner)).sync


def test_a_session_is_created_and_continued(server, client):
    first = chat(client, messages=[FIRST], session="created", temperature=0)
    second = chat(client, messages=[SECOND], session="created", temperature=0)
    found = session(server, "created")
    assert [turn.text for turn in found.turns] == [
        FIRST["content"],
        first.choices[0].message.content,
        SECOND["content"],
        second.choices[0].message.content,
    ]
    assert second.usage.prompt_tokens_details.cached_tokens >= (
        first.usage.prompt_tokens + first.usage.completion_tokens - 1
    )


def test_the_header_selects_a_session_by_name_and_by_id(server, client):
    body = {"messages": [FIRST], "max_tokens": 4}
    answer = client.post(PATH, json=body, headers={"x-session-id": "by header"})
    found = session(server, "by header")
    assert answer.headers["x-session-id"] == found.id
    client.post(PATH, json=body, headers={"x-session-id": found.id})
    assert len(found.turns) == 4
    with client.stream("POST", PATH, json={**body, "stream": True, "session": found.id}) as answer:
        assert answer.headers["x-session-id"] == found.id
        answer.read()
    assert len(found.turns) == 6


def raw_chat(server, headers):
    """Sends a chat completion whose headers are bytes."""
    body = json.dumps({"messages": [FIRST], "max_tokens": 2}).encode()
    lines = [b"Host: localhost", b"Authorization: Bearer a", b"Content-Type: application/json"]
    lines += [b"Content-Length: %d" % len(body), *headers]
    head = b"POST %s HTTP/1.1\r\n" % PATH.encode() + b"\r\n".join(lines)
    return http_raw.exchange(server.port, head + b"\r\n\r\n" + body)


def test_a_name_in_the_header_is_the_same_name_as_in_the_body(server, client):
    name = "été 日本"
    found = [
        raw_chat(server, [b"x-session-id: " + name.encode()]).headers["x-session-id"],
        client.post(PATH, json={"messages": [SECOND], "session": name}).headers["x-session-id"],
        session(server, name).id,
    ]
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([b"x-session-id: \xe9t\xe9"], "expected UTF-8"),
        ([b"Idempotency-Key: \xe9t\xe9"], "expected UTF-8"),
        ([b"x-session-id: one", b"X-Session-Id: two"], "expected once"),
        ([b"Idempotency-Key: one", b"idempotency-key: one"], "expected once"),
    ],
)
def test_names_that_two_readers_would_read_differently_are_refused(server, headers, words):
    count = server.engine.sync.count_sessions(owner="ann")
    answer = raw_chat(server, headers)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]
    assert server.engine.sync.count_sessions(owner="ann") == count


@pytest.mark.parametrize(
    "path", ["/v1/sessions/%ff", "/v1/sessions?name=%c3", "/v1/models/%e9t%e9", "/x%ed%a0%80"]
)
def test_a_path_or_query_that_is_not_utf_8_is_refused(client, path):
    answer = client.get(path)
    assert answer.status_code == 400
    assert "expected percent-encoded UTF-8" in answer.json()["error"]["message"]


def test_a_stream_is_a_turn(server, client):
    chunks = chat_stream(client, messages=[FIRST], session="streamed", temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert session(server, "streamed").turns[-1].text == text


def test_a_whole_history_must_agree(server, client):
    shown = chat(client, messages=[FIRST], session="agreed", temperature=0).choices[0].message
    history = [FIRST, shown.model_dump()]
    wrong = [
        ([{"role": "user", "content": "Else"}, history[1], SECOND], 0),
        ([FIRST, {"role": "assistant", "content": "Else"}, SECOND], 1),
        ([FIRST, SECOND], 1),
        ([*history, FIRST, history[1], SECOND], 2),
        ([{"role": "system", "content": "Else"}, *history, SECOND], 0),
    ]
    for messages, at in wrong:
        error = refused(client, PATH, {"messages": messages, "session": "agreed"})
        assert error["param"] == f"messages[{at}]", messages
    assert len(session(server, "agreed").turns) == 2
    chat(client, messages=[*history, SECOND], session="agreed")
    assert len(session(server, "agreed").turns) == 4


def test_a_new_session_has_no_history(server, client):
    body = {"messages": [FIRST, {"role": "assistant", "content": "x"}, SECOND], "session": "none"}
    assert refused(client, PATH, body)["param"] == "messages[0]"
    names = [one.name for one in server.engine.sync.sessions("ann")]
    assert "none" not in names


def test_the_system_prompt_is_the_sessions(server, client):
    system = {"role": "system", "content": "You are brief."}
    shown = chat(client, messages=[system, FIRST], session="system").choices[0].message
    assert session(server, "system").system == "You are brief."
    chat(client, messages=[system, FIRST, shown.model_dump(), SECOND], session="system")
    assert len([t for t in session(server, "system").turns if t.role == "user"]) == 2


def test_owners_have_sessions_of_their_own(server, client):
    chat(client, messages=[FIRST], session="shared name", max_tokens=1)
    found = session(server, "shared name")
    other = server.client("b")
    chat(other, messages=[FIRST], session="shared name", max_tokens=1)
    assert len(found.turns) == 2
    chat(other, messages=[FIRST], session=found.id, max_tokens=1)  # bob's own, of that name
    assert len(found.turns) == 2


def test_a_busy_session_answers_conflict(server, client):
    started, refusals = threading.Event(), []

    def ask():
        started.wait(30)
        for messages in ([SECOND], [FIRST, {"role": "assistant", "content": "x"}, SECOND]):
            body = {"messages": messages, "session": "busy"}
            refusals.append(refused(server.client("a"), PATH, body, 409)["code"])

    thread = threading.Thread(target=ask)
    thread.start()
    body = {
        "messages": [FIRST], "session": "busy", "ignore_eos": True, "max_tokens": 1900,
    }  # fmt: skip
    events = stream(client, PATH, body)
    next(events)
    started.set()
    thread.join()
    events.close()
    assert refusals == ["session_busy"] * 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"messages": [FIRST, {"role": "assistant", "content": "x"}]}, "messages[1].role"),
        (
            {
                "messages": [FIRST, {"role": "assistant", "content": "x"}],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ({"session": "a\x00b"}, "session"),
        ({"session": "a" * 257}, "session"),
    ],
)
def test_what_does_not_fit_a_session_is_refused(client, more, param):
    body = {"messages": [FIRST], "session": "refused", **more}
    assert refused(client, PATH, body)["param"] == param


def test_the_number_of_sessions_is_limited():
    from lmchat.server import Limits

    with RunningServer(ServerConfig(limits=Limits(sessions=2))) as server:
        client = server.client()
        for name in ("one", "two"):
            chat(client, messages=[FIRST], session=name, max_tokens=1)
        body = {"messages": [FIRST], "session": "three"}
        assert refused(client, PATH, body)["code"] == "too_many_sessions"
        chat(client, messages=[FIRST], session="two", max_tokens=1)
        assert len(server.engine.sync.sessions("local")) == 2


def test_a_client_may_send_what_a_full_context_has_dropped(server, client):
    chat_session = session(server, "full")
    chat_session.set_overflow("drop")
    messages, body = [], {"session": "full", "max_tokens": 4, "temperature": 0}
    most = server.engine.max_context // 5
    while not chat_session.dropped:
        messages.append({"role": "user", "content": "y " * (most // 2)})
        found = chat(client, messages=messages, **body)
        messages.append({"role": "assistant", "content": found.choices[0].message.content})
    kept = [{"role": turn.role, "content": turn.text} for turn in chat_session.turns]
    assert len(kept) < len(messages)
    for earlier in (messages, kept):
        chat(client, messages=[*earlier, FIRST], **body)
        chat_session.undo()
    error = refused(client, PATH, {**body, "messages": [*messages[2:], FIRST]})
    assert error["code"] == "session_mismatch"
