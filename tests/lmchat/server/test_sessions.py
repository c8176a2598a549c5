"""Sessions over HTTP: records, turns, repeated requests, events, archives, other owners."""

import json
import subprocess
import sys
import threading

import httpx
import pytest
from http_server import RunningServer

from lmchat.server import Limits, ServerConfig
from lmchat.server.sessions import archives, records
from lmchat.store import temporary

GREEDY = {"temperature": 0, "max_new_tokens": 12}
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1500}


@pytest.fixture(scope="module")
def server():
    # The slowest kernels, so that a long reply still runs when a test acts on it.
    config = ServerConfig(keys={"a": "ann", "b": "bob", "c": "cy"}, limits=Limits(sessions=40))
    with RunningServer(config, isa="portable", threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client("a")


@pytest.fixture
def path(client):
    made = client.post("/v1/sessions", json={"settings": GREEDY})
    assert made.status_code == 201, made.text
    yield made.headers["location"]
    client.delete(made.headers["location"])


def turn(client, path, text, **more):
    answer = client.post(f"{path}/turns", json={"text": text, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_events(answer):
    """Returns (id, name, data) of each event of a stream."""
    found, number, name = [], None, None
    for line in answer.iter_lines():
        kind, _, value = line.partition(": ")
        if kind == "id":
            number = value
        elif kind == "event":
            name = value
        elif kind == "data":
            found.append((number, name, json.loads(value)))
            number = None
    return found


def text_of(events):
    return "".join(data["text"] for _, name, data in events if name == "delta")


def test_a_turn_continues_the_session_and_computes_only_what_is_new(server, client, path):
    first = turn(client, path, "My dog is Waffles.")
    second = turn(client, path, "What is my dog's name?")
    with server.engine.sync.session(owner="reference") as session:
        session.set(**GREEDY)
        expected = [session.send("My dog is Waffles."), session.send("What is my dog's name?")]
    assert [one["text"] for one in (first, second)] == [one.text for one in expected]
    held = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["cached_tokens"] >= held - 2
    found = client.get(path).json()
    assert [one["text"] for one in found["turns"]][1::2] == [first["text"], second["text"]]


def test_a_session_is_created_changed_and_deleted(client):
    body = {
        "name": "trip", "title": "A trip", "tags": ["travel"], "metadata": {"k": "v"},
        "system": "Be brief.", "settings": {"temperature": 0}, "pinned": True,
    }  # fmt: skip
    made = client.post("/v1/sessions", json=body)
    assert made.status_code == 201
    assert {name: made.json()[name] for name in body} == body
    path = made.headers["location"]
    assert client.post("/v1/sessions", json={"name": "trip"}).status_code == 409
    changed = client.patch(
        path, json={"name": "trips", "settings": {"temperature": None, "seed": 3}, "pinned": False}
    ).json()
    assert changed["name"] == "trips"
    assert changed["settings"] == {"seed": 3}
    assert changed["revision"] > made.json()["revision"]
    assert client.delete(path).json()["deleted"]
    assert client.get(path).status_code == 404


def test_a_session_that_another_request_has_created_is_left_alone(client, monkeypatch):
    """Two requests may both have seen that a name is free."""
    monkeypatch.setattr(records, "_exists", lambda *_: False)
    made = client.post("/v1/sessions", json={"name": "race"})
    for body, status in (({}, 409), ({"open": True, "tags": [""]}, 400), ({"open": True}, 201)):
        answer = client.post("/v1/sessions", json={"name": "race", **body})
        assert answer.status_code == status, answer.text
        assert client.get(made.headers["location"]).status_code == 200
    client.delete(made.headers["location"])


def test_of_requests_for_one_name_one_creates_it(server):
    answers = []

    def create(number):
        body = {"name": "contested", "title": f"title {number}"}
        answers.append(server.client("a").post("/v1/sessions", json=body))

    creators = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for one in creators:
        one.start()
    for one in creators:
        one.join(60)
    (made,) = [one for one in answers if one.status_code == 201]
    assert {one.status_code for one in answers} == {201, 409}
    found = server.client("a").get(made.headers["location"]).json()
    assert found["title"] == made.json()["title"]
    server.client("a").delete(made.headers["location"])


def test_a_change_of_an_old_revision_is_refused(client, path):
    tag = client.get(path).headers["etag"]
    assert client.get(path, headers={"If-None-Match": tag}).status_code == 304
    first = client.patch(path, json={"title": "one"}, headers={"If-Match": tag})
    assert first.status_code == 200
    second = client.patch(path, json={"title": "two"}, headers={"If-Match": tag})
    assert second.status_code == 412
    assert client.get(path).json()["title"] == "one"


def test_lists_come_in_pages_with_search_tag_and_residence(client):
    paths = []
    for number in range(5):
        body = {"title": f"kernel {number}", "tags": ["odd"] if number % 2 else []}
        paths.append(client.post("/v1/sessions", json=body).headers["location"])
    seen, after = [], None
    while True:
        params = {"limit": 2, "search": "kernel"} | ({"after": after} if after else {})
        page = client.get("/v1/sessions", params=params).json()
        seen += [one["title"] for one in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert sorted(seen) == [f"kernel {number}" for number in range(5)]
    tagged = client.get("/v1/sessions", params={"tag": "odd", "residence": "true"}).json()["data"]
    assert sorted(one["title"] for one in tagged) == ["kernel 1", "kernel 3"]
    assert all("predicted_ttft" in one and "residence" in one for one in tagged)
    assert client.get("/v1/sessions", params={"after": "0" * 32}).status_code == 400
    for one in paths:
        client.delete(one)


def test_a_stream_has_all_parts_and_the_reply(client, path):
    body = {"text": "one", "stream": True, "token_ids": True}
    with client.stream("POST", f"{path}/turns", json=body) as answer:
        events = read_events(answer)
    assert events[0][1] == "start"
    assert events[-1][1] == "done"
    reply = events[-1][2]
    assert text_of(events) == reply["text"]
    ids = [i for _, name, data in events if name == "delta" for i in data["token_ids"]]
    assert ids == reply["token_ids"]
    assert events[0][2]["turn"] == reply["turn"] == client.get(path).json()["turns"][-1]["id"]


def test_events_continue_after_any_of_them(client, path):
    turn(client, path, "one")
    with client.stream("GET", f"{path}/events") as answer:
        whole = read_events(answer)
    text = text_of(whole)
    turn_id = whole[0][2]["turn"]
    for cut in (0, 1, len(text) // 2, len(text)):
        headers = {"Last-Event-ID": f"{turn_id}.0.{cut}"}
        with client.stream("GET", f"{path}/events", headers=headers) as answer:
            assert text_of(read_events(answer)) == text[cut:]
    answer = client.get(f"{path}/events", headers={"Last-Event-ID": "x"})
    assert answer.status_code == 400


def test_readers_that_come_and_go_get_equal_texts(server, client, path):
    body = {"text": "Tell me more.", "settings": LONG, "stream": True, "detach": True}
    with client.stream("POST", f"{path}/turns", json=body) as answer:
        next(answer.iter_lines())  # it goes on without this reader
    texts = []

    def read():
        text, last = "", None
        with server.client("a") as reader:
            for attempt in range(10_000):
                headers = {"Last-Event-ID": last} if last else {}
                with reader.stream("GET", f"{path}/events", headers=headers) as answer:
                    for number, name, data in read_some(answer, attempt % 7 + 2):
                        if name == "delta":
                            text, last = text + data["text"], number
                        if name == "done":
                            texts.append((text, data["text"]))
                            return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for one in readers:
        one.start()
    for one in readers:
        one.join(120)
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][1] == client.get(path).json()["turns"][-1]["text"]


def read_some(answer, most):
    """Yields at most some events of a stream."""
    number, name, count = None, None, 0
    for line in answer.iter_lines():
        kind, _, value = line.partition(": ")
        if kind == "id":
            number = value
        elif kind == "event":
            name = value
        elif kind == "data":
            yield number, name, json.loads(value)
            count += 1
            if count == most:
                return


def test_a_disconnect_ends_the_reply_and_keeps_it(server, client, path):
    body = {"text": "Tell me more.", "settings": LONG, "stream": True}
    with client.stream("POST", f"{path}/turns", json=body) as answer:
        seen = [data["text"] for _, name, data in read_some(answer, 8) if name == "delta"]
    while client.get(path).json()["state"] != "idle":
        pass
    last = client.get(path).json()["turns"][-1]
    assert last["finish_reason"] == "cancelled"
    assert last["text"].startswith("".join(seen))


def test_a_running_reply_is_stopped_and_makes_the_session_busy(client, path):
    body = {"text": "Tell me more.", "settings": LONG, "stream": True, "detach": True}
    with client.stream("POST", f"{path}/turns", json=body) as answer:
        next(answer.iter_lines())
        busy = client.post(f"{path}/turns", json={"text": "x"})
        assert busy.status_code == 409
        assert client.post(f"{path}/undo").status_code == 409
        stopped = client.post(f"{path}/stop").json()
    assert stopped["stopped"]
    assert client.post(f"{path}/stop").json() == {"stopped": False, "reply": None}


def test_verbs_move_in_the_conversation(client, path):
    first = turn(client, path, "one")
    other = client.post(f"{path}/retry", json={"settings": {"temperature": 1}}).json()
    assert other["turn"] != first["turn"]
    edited = client.post(f"{path}/edit", json={"turn": 0, "text": "two"}).json()
    found = client.get(f"{path}/branches", params={"turn": 0}).json()["data"]
    assert [one["reply"]["text"] for one in found] == [
        first["text"], other["text"], edited["text"],
    ]  # fmt: skip
    client.post(f"{path}/switch", json={"turn": 0, "index": 0})
    assert client.get(path).json()["turns"][-1]["id"] == first["turn"]
    longer = client.post(f"{path}/continue", json={"settings": {"max_new_tokens": 4}}).json()
    assert longer["text"].startswith(first["text"])
    fork = client.post(f"{path}/fork", json={"name": "copy"})
    assert fork.status_code == 201
    assert fork.json()["turns"] == client.get(path).json()["turns"]
    client.delete(fork.headers["location"])
    assert client.post(f"{path}/undo").json()["text"] == "one"
    assert client.get(path).json()["turns"] == []
    assert client.post(f"{path}/warm").status_code == 202
    assert client.post(f"{path}/pin", json={"pinned": True}).json()["pinned"]
    assert client.get(path).json()["pinned"]


def test_a_repeated_request_returns_the_first_turn(client, path):
    headers = {"Idempotency-Key": "k1"}
    body = {"text": "one", "settings": {"temperature": 1}}
    first = client.post(f"{path}/turns", json=body, headers=headers).json()
    again = client.post(f"{path}/turns", json=body, headers=headers).json()
    assert again["turn"] == first["turn"]
    assert again["text"] == first["text"]
    assert len(client.get(path).json()["turns"]) == 2
    other = client.post(f"{path}/turns", json={"text": "two"}, headers=headers)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_a_repeated_request_attaches_to_a_running_reply(server, client, path):
    headers = {"Idempotency-Key": "k2"}
    body = {"text": "Tell me more.", "settings": LONG}
    found = []

    def send():
        with server.client("a") as one:
            answer = one.post(f"{path}/turns", json={**body, "detach": True}, headers=headers)
            found.append(answer.json())

    senders = [threading.Thread(target=send) for _ in range(3)]
    for one in senders:
        one.start()
    while client.get(path).json()["state"] != "decode":
        pass
    client.post(f"{path}/stop")
    for one in senders:
        one.join(60)
    assert len({one["turn"] for one in found}) == 1
    assert len({one["text"] for one in found}) == 1


def test_a_reply_runs_until_the_last_of_its_clients_has_gone(server, client, path):
    headers = {"Idempotency-Key": "k4"}
    body = {"text": "Tell me more.", "settings": {**LONG, "max_new_tokens": 400}, "stream": True}
    with server.client("a") as other:
        with client.stream("POST", f"{path}/turns", json=body, headers=headers) as first:
            lines = first.iter_lines()
            next(lines)
            second = other.stream("POST", f"{path}/turns", json=body, headers=headers)
            answer = second.__enter__()
        assert read_events(answer)[-1][2]["finish_reason"] == "length"
        second.__exit__(None, None, None)


def test_a_fork_does_not_inherit_keys(client, path):
    headers = {"Idempotency-Key": "k5"}
    client.post(f"{path}/turns", json={"text": "one"}, headers=headers)
    fork = client.post(f"{path}/fork", json={}).headers["location"]
    client.post(f"{fork}/turns", json={"text": "one"}, headers=headers)
    assert len(client.get(fork).json()["turns"]) == 4
    client.delete(fork)


@pytest.mark.parametrize("stored", [3, [], {"session": None}, {"session": "mine", "at": "x"}])
def test_an_imported_turn_may_have_any_metadata(server, client, path, stored):
    session = server.engine.sync.session_by_id(path.rsplit("/", 1)[1], owner="ann")
    if isinstance(stored, dict) and stored["session"]:
        stored = {**stored, "session": session.id}
    session.start_send("one", metadata={"idempotency:q": stored}).wait()
    headers = {"Idempotency-Key": "q"}
    assert client.post(f"{path}/turns", json={"text": "x"}, headers=headers).status_code == 200


def test_a_change_is_made_whole_or_not_at_all(client, path):
    before = client.get(path).json()
    wrong = client.patch(path, json={"title": "changed", "settings": {"top_k": -1}})
    assert wrong.status_code == 400
    assert client.get(path).json() == before
    tags = {"If-Match": f'"999", "{before["revision"]}"'}
    assert client.patch(path, json={"title": "changed"}, headers=tags).status_code == 200


def test_events_of_a_reply_of_another_process_have_its_turn(tmp_path):
    with RunningServer(store=tmp_path) as server:
        path = server.client().post("/v1/sessions", json={"name": "trip"}).headers["location"]
        server.client().post(f"{path}/turns", json={"text": "one", "settings": GREEDY})
        code = (
            "import lmchat, sys\n"
            f"with lmchat.ChatEngine('memo', store={str(tmp_path)!r}, isa='portable') as engine:\n"
            "    chat = engine.session('trip')\n"
            "    running = chat.start_send('two', temperature=0, max_new_tokens=900,"
            " ignore_eos=True)\n"
            "    print(running.turn_id, flush=True)\n"
            "    sys.stdin.read()\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            turn_id = int(child.stdout.readline())
            with server.client().stream("GET", f"{path}/events") as answer:
                events = read_events(answer)
        finally:
            child.communicate()
        assert events[0][2]["turn"] == turn_id
        assert text_of(events) == events[-1][2]["text"]
        cut = len(events[-1][2]["text"]) // 2
        headers = {"Last-Event-ID": f"{turn_id}.0.{cut}"}
        with server.client().stream("GET", f"{path}/events", headers=headers) as answer:
            assert text_of(read_events(answer)) == events[-1][2]["text"][cut:]


def test_a_refused_request_can_be_repeated(client, path):
    headers = {"Idempotency-Key": "k3"}
    refused = client.post(
        f"{path}/turns", json={"text": "x", "settings": {"top_k": -1}}, headers=headers
    )
    assert refused.status_code == 400
    assert client.post(f"{path}/turns", json={"text": "x"}, headers=headers).status_code == 200


def test_a_repeated_request_is_found_after_a_restart(tmp_path):
    headers, body = {"Idempotency-Key": "k"}, {"text": "one", "settings": GREEDY}
    with RunningServer(store=tmp_path) as server:
        client = server.client()
        path = client.post("/v1/sessions", json={}).headers["location"]
        first = client.post(f"{path}/turns", json=body, headers=headers).json()
    with RunningServer(store=tmp_path) as server:
        client = server.client()
        again = client.post(f"{path}/turns", json=body, headers=headers).json()
        assert (again["turn"], again["text"]) == (first["turn"], first["text"])
        other = client.post(f"{path}/turns", json={**body, "text": "x"}, headers=headers)
        assert other.status_code == 422


def test_a_session_is_exported_and_imported(client, path):
    turn(client, path, "one")
    archive = client.get(f"{path}/export", params={"pages": "true"}).content
    made = client.post(
        "/v1/sessions/import?name=again",
        content=archive,
        headers={"Content-Type": "application/zip"},
    )
    assert made.status_code == 201, made.text
    assert made.json()["turns"] == client.get(path).json()["turns"]
    broken = client.post(
        "/v1/sessions/import",
        content=archive[:-30] + b"x" * 30,
        headers={"Content-Type": "application/zip"},
    )
    assert broken.status_code == 400
    assert "/" not in broken.json()["error"]["message"]
    client.delete(f"/v1/sessions/{made.json()['id']}")


def test_archives_need_no_folder_of_the_system(client, path, monkeypatch, data_dir):
    turn(client, path, "one")
    monkeypatch.setattr(temporary, "system_folders", list)
    monkeypatch.setattr(temporary, "_own", None)
    archive = client.get(f"{path}/export")
    assert archive.status_code == 200, archive.text
    headers = {"Content-Type": "application/zip"}
    made = client.post("/v1/sessions/import?name=x", content=archive.content, headers=headers)
    assert made.status_code == 201, made.text
    client.delete(f"/v1/sessions/{made.json()['id']}")
    assert [list(one.iterdir()) for one in (data_dir / "tmp").iterdir()] == [[]]
    temporary._leave()


def test_a_folder_that_cannot_hold_an_archive_is_named(client, path, monkeypatch, tmp_path, caplog):
    """The answer has the reason, the log the folder."""
    turn(client, path, "one")
    monkeypatch.setattr(archives, "_temporary", lambda: tmp_path / "gone" / "x.zip")
    for answer in (
        client.get(f"{path}/export"),
        client.post(
            "/v1/sessions/import", content=b"PK", headers={"Content-Type": "application/zip"}
        ),
    ):
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert error["message"] == (
            "the server's folder for temporary files cannot hold the archive: "
            "No such file or directory"
        )
    assert caplog.text.count(f"files, {tmp_path / 'gone'}, cannot hold the archive: No such") == 2


ROUTES = [
    ("GET", "", None), ("PATCH", "", {"title": "x"}), ("DELETE", "", None),
    ("POST", "/turns", {"text": "x"}), ("POST", "/retry", {}), ("POST", "/continue", {}),
    ("POST", "/edit", {"turn": 0, "text": "x"}), ("POST", "/stop", None), ("POST", "/undo", None),
    ("POST", "/switch", {"turn": 0, "index": 0}), ("POST", "/fork", {}), ("POST", "/warm", None),
    ("POST", "/pin", {}), ("GET", "/branches?turn=0", None), ("GET", "/export", None),
    ("GET", "/events", None),
]  # fmt: skip


@pytest.mark.parametrize(("method", "route", "body"), ROUTES)
def test_sessions_of_other_owners_are_answered_as_absent_ones(server, path, method, route, body):
    bob = server.client("b")
    mine = path.rsplit("/", 1)[1]
    answers = []
    for one in (mine, "f" * 32):
        found = bob.request(method, f"/v1/sessions/{one}{route}", json=body)
        answers.append((found.status_code, found.text.replace(one, "ID")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


def test_an_owner_has_a_limited_number_of_sessions(server):
    client = server.client("c")
    for _ in range(40):
        assert client.post("/v1/sessions", json={}).status_code == 201
    refused = client.post("/v1/sessions", json={})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "too_many_sessions"
    first = client.get("/v1/sessions", params={"limit": 1}).json()["data"][0]["id"]
    assert client.post(f"/v1/sessions/{first}/fork", json={}).status_code == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": 3}, "text"),
        ({}, "text"),
        ({"text": "x", "setings": {}}, "setings"),
        ({"text": "x", "settings": {"temperatur": 1}}, "temperatur"),
        ({"text": "x", "settings": {"stop_strings": ["y"] * 17}}, "stop strings"),
        ({"text": "x", "settings": {"n": 2}}, "n is"),
    ],
)
def test_wrong_bodies_are_refused_by_name(client, path, body, field):
    answer = client.post(f"{path}/turns", json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def test_an_event_stream_without_a_reply_is_not_found(client, path):
    assert client.get(f"{path}/events").status_code == 404


def test_a_full_context_is_400(client, path):
    answer = client.post(f"{path}/turns", json={"text": "word " * 5000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert isinstance(answer, httpx.Response)


def test_an_excluded_token_is_answered_as_json_has_it(client):
    """RFC 8259 has no infinities: a bias of -inf is a string, in answers and in requests."""
    bias = {"5": "-Infinity", "6": 2.5}
    path = client.post("/v1/sessions", json={"settings": {**GREEDY, "logit_bias": bias}}).headers[
        "location"
    ]
    turn(client, path, "Hi", stream=False, settings={"logit_bias": bias})
    for where in (path, f"{path}?details=true", f"{path}/branches?turn=0"):
        answer = client.get(where)
        assert answer.status_code == 200, answer.text
        found = json.loads(answer.content, parse_constant=pytest.fail)
        biases = [turn["settings"]["logit_bias"] for turn in _with_settings(found)]
        assert biases
        assert all(found == bias for found in biases)
    client.delete(path)


def _with_settings(value):
    """Yields each object with a bias in its settings, at any depth."""
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict) and "logit_bias" in value.get("settings", {}):
        yield value
    if isinstance(value, dict | list):
        for one in values:
            yield from _with_settings(one)
