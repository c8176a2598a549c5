"""Responses that are refused, cancelled, deleted or overtaken, and what they leave."""

import json

import httpx
import openai
import pytest
from http_server import RunningServer

from lmchat.errors import ModelError, StoreError
from lmchat.server import Limits, ServerConfig
from lmchat.server.responses import run
from lmchat.server.responses.objects import failure
from lmchat.sessions.appended import joined
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite.sqlite_store import SqliteStore

SHORT = {"model": "memo", "max_output_tokens": 4, "temperature": 0}
LONG = {"model": "memo", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server():
    """A server for one generation and one that waits, with slow kernels."""
    config = ServerConfig(keys={"a": "ann", "b": "bob"}, limits=Limits(sessions=50))
    options = {"max_batch_size": 1, "max_queue": 1, "isa": "portable", "threads": 1}
    with RunningServer(config, cache_pages=256, **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as found:
        yield found


@pytest.fixture
def bob(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="b", max_retries=0) as found:
        yield found


@pytest.fixture
def busy(server):
    """A generation of the same owner has the slot; another owner could take it."""
    with server.taken_slot("ann"):
        yield


def conversation(client, *texts):
    roles = ("user", "assistant")
    items = [
        {"type": "message", "role": roles[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    return client.conversations.create(items=items).id


def items_of(client, made):
    found = client.conversations.items.list(made, order="asc", limit=100).data
    return [(item.role, item.content[0].text) for item in found]


@pytest.mark.parametrize(
    "refused",
    [
        {"input": "word " * 5000},
        {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ],
)
def test_a_refused_response_leaves_the_conversation_as_it_was(server, client, refused):
    made = conversation(client, "one", "two", "three")
    session = server.engine.sync.session_by_id(made[5:], owner="ann")
    before = session.revision
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    arguments = {"input": history, "instructions": "Other.", **SHORT, **refused}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(conversation=made, truncation="auto", **arguments)
    session.refresh()
    assert session.revision == before
    assert items_of(client, made) == [("user", "one"), ("assistant", "two"), ("user", "three")]


def test_overload_is_refused_before_anything_is_written(server, client, busy):
    made = conversation(client)
    waiting = client.responses.create(input="x", background=True, **SHORT)
    before = server.engine.sync.count_sessions("ann")
    for more in ({}, {"conversation": made}, {"store": False}, {"stream": True}):
        with pytest.raises(openai.RateLimitError) as refused:
            client.responses.create(input="x", instructions="y", **more, **SHORT)
        headers = refused.value.response.headers
        assert int(headers["retry-after-ms"]) > 0
        assert int(headers["retry-after"]) > 0
    assert server.engine.sync.count_sessions("ann") == before
    assert items_of(client, made) == []
    client.responses.cancel(waiting.id)


def test_a_response_cancelled_in_the_queue_leaves_nothing(server, client, busy):
    before = server.engine.sync.count_sessions("ann")
    made = client.responses.create(input="x", background=True, **SHORT)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert server.engine.sync.count_sessions("ann") == before
    found = client.responses.retrieve(made.id)
    assert (found.status, found.output) == ("cancelled", [])
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_cancelled_in_the_queue_leaves_its_conversation(server, client, busy):
    made = conversation(client, "one", "two", "three")
    queued = client.responses.create(
        input="x", conversation=made, instructions="y", background=True, **SHORT
    )
    client.responses.cancel(queued.id)
    assert items_of(client, made) == [("user", "one"), ("assistant", "two"), ("user", "three")]


def test_a_running_response_cannot_be_answered_and_can_be_deleted(server, client):
    first = client.responses.create(input="x", background=True, **LONG)
    for use in (
        lambda: client.responses.create(input="y", previous_response_id=first.id, **SHORT),
        lambda: client.responses.input_items.list(first.id),
    ):
        with pytest.raises(openai.ConflictError, match="in progress"):
            use()
    before = server.engine.sync.count_sessions("ann")
    client.responses.delete(first.id)
    assert server.engine.sync.count_sessions("ann") == before - 1
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)


def test_the_session_goes_with_its_last_response(server, client):
    before = server.engine.sync.count_sessions("ann")
    first = client.responses.create(input="x", **SHORT)
    second = client.responses.create(input="y", previous_response_id=first.id, **SHORT)
    assert server.engine.sync.count_sessions("ann") == before + 1
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    assert server.engine.sync.count_sessions("ann") == before


def test_deleting_its_responses_leaves_a_conversation(client):
    made = conversation(client)
    response = client.responses.create(input="x", conversation=made, **SHORT)
    client.responses.delete(response.id)
    assert items_of(client, made) == [("user", "x"), ("assistant", response.output_text)]


def test_an_answer_to_a_response_of_a_conversation_leaves_the_conversation(client):
    made = conversation(client)
    first = client.responses.create(input="x", conversation=made, **SHORT)
    second = client.responses.create(input="y", conversation=made, **SHORT)
    before = items_of(client, made)
    other = client.responses.create(input="z", previous_response_id=first.id, **SHORT)
    last = client.responses.create(input="w", previous_response_id=other.id, **SHORT)
    assert other.conversation is None
    assert other.id[5:37] == last.id[5:37] != second.id[5:37]
    assert items_of(client, made) == before


def test_an_answer_in_a_user_s_session_is_made_in_a_fork(server, client):
    with server.engine.sync.session("mine", owner="ann", settings={"max_new_tokens": 4}) as mine:
        first = mine.send("x").turn.id
        before = mine.turns
        previous = f"resp_{mine.id}{first:x}"
        made = client.responses.create(input="y", previous_response_id=previous, **SHORT)
        assert mine.turns == before
        assert [one.name for one in server.engine.sync.sessions("ann")] == ["mine"]
        client.responses.delete(made.id)
        mine.delete()


def test_instructions_do_not_stay_when_items_are_added(client):
    made = conversation(client)
    system = {"type": "message", "role": "system"}
    client.conversations.items.create(made, items=[{**system, "content": "Own."}])
    client.responses.create(input="x", conversation=made, instructions="Once.", **SHORT)
    more = [
        {**system, "content": "More."},
        {"type": "message", "role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": "b"},
    ]
    added = client.conversations.items.create(made, items=more).data
    assert [item.role for item in added][-2:] == ["user", "assistant"]
    client.responses.create(input="y", conversation=made, **SHORT)
    assert items_of(client, made)[0] == ("system", "Own.\n\nMore.")


def test_items_after_a_waiting_message_are_answered_with_it(client):
    made = conversation(client, "one")
    user = {"type": "message", "role": "user", "content": "two"}
    (item,) = client.conversations.items.create(made, items=[user]).data
    assert item.content[0].text == "two"
    client.responses.create(input="three", conversation=made, **SHORT)
    assert [text for _, text in items_of(client, made)][:-1] == ["one", "two", "three"]


def test_truncation_holds_for_one_response(server, client):
    words = server.engine.max_context * 2 // 3
    made = conversation(client, "x " * words, "two")
    said = items_of(client, made)
    client.responses.create(input="y " * words, conversation=made, truncation="auto", **SHORT)
    assert items_of(client, made)[: len(said) + 1] == [*said, ("user", "y " * words)]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(input="y " * words, conversation=made, **SHORT)


def test_input_tokens_count_history_and_instructions(client):
    made = conversation(client, "one", "two", "three")
    arguments = {
        "instructions": "Be brief.",
        "conversation": made,
        "input": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "z"},
        ],
    }
    counted = client.responses.input_tokens.count(**arguments).input_tokens
    response = client.responses.create(**arguments, **SHORT)
    assert counted == response.usage.input_tokens
    follow = {"input": "w", "instructions": "Other.", "previous_response_id": response.id}
    counted = client.responses.input_tokens.count(**follow).input_tokens
    assert counted == client.responses.create(**follow, store=False, **SHORT).usage.input_tokens
    assert counted == client.responses.create(**follow, **SHORT).usage.input_tokens


def test_log_probabilities_of_events_are_those_of_the_whole(client):
    arguments = {"input": "Tell me more.", "top_logprobs": 1, "stream": True}
    events = list(client.responses.create(**arguments, **{**SHORT, "max_output_tokens": 40}))
    parts = [
        entry.model_dump()
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    message = events[-1].response.output[-1].content[0]
    assert len(message.logprobs) == events[-1].response.usage.output_tokens
    whole = [entry.model_dump() for entry in message.logprobs]
    assert [one["logprob"] for one in parts] == [one["logprob"] for one in whole][: len(parts)]
    assert len(whole) - len(parts) <= 1  # a last token without text


@pytest.mark.parametrize("after", ["-2", "x", "", "1" * 20])
def test_a_wrong_starting_after_is_refused(server, client, after):
    made = client.responses.create(input="x", background=True, stream=True, **SHORT)
    (*_, last) = made
    path = f"/v1/responses/{last.response.id}?stream=true&starting_after={after}"
    answer = server.client("a").get(path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "starting_after"


def test_events_of_ended_responses_are_bounded(client, bob, monkeypatch):
    def events(made, client=client):
        return list(client.responses.retrieve(made, stream=True))

    def ended(client=client):
        made = client.responses.create(input="x", background=True, stream=True, **SHORT)
        return [event.response.id for event in made if hasattr(event, "response")][-1]

    of_bob, first = ended(bob), ended()
    size = sum(len(json.dumps(event.model_dump())) for event in events(first))
    monkeypatch.setattr(run, "KEPT_BYTES", 3 * size)
    others = [ended() for _ in range(4)]
    assert events(of_bob, bob)  # one owner's responses do not evict another's
    assert events(others[-1])
    with pytest.raises(openai.BadRequestError, match="no events"):
        events(first)
    assert client.responses.retrieve(first).status == "incomplete"


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
@pytest.mark.parametrize("route", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("store", [True, False])
def test_an_absent_object_is_refused_in_the_field_that_names_it(server, field, route, store):
    kind = "resp" if field == "previous_response_id" else "conv"
    for absent in (f"{kind}_{'0' * 32}" + "2" * (kind == "resp"), "x"):
        body = {"input": "x", field: absent}
        if not store:
            if field == "conversation" or route.endswith("tokens"):
                return
            body["store"] = False
        answer = server.client("a").post(route, json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == field
        assert absent in answer.json()["error"]["message"]


def test_both_places_of_a_response_are_refused(server):
    body = {"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}
    error = server.client("a").post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "conversation"


def message(role, content):
    return {"type": "message", "role": role, "content": content}


def test_items_of_one_role_in_a_row_stay_items(server, client):
    made = client.conversations.create(items=[message("user", "a\n\nb"), message("user", "c")]).id
    assert items_of(client, made) == [("user", "a\n\nb"), ("user", "c")]
    client.conversations.items.create(made, items=[message("user", "d")])
    response = client.responses.create(
        input=[message("user", "e"), message("user", "f")], conversation=made, **SHORT
    )
    client.conversations.items.create(
        made,
        items=[message(role, role[0]) for role in ("user", "user", "assistant", "assistant")],
    )
    expected = [
        ("user", "a\n\nb"), ("user", "c"), ("user", "d"), ("user", "e"), ("user", "f"),
        ("assistant", response.output_text), ("user", "u"), ("user", "u"), ("assistant", "a"),
        ("assistant", "a"),
    ]  # fmt: skip
    assert items_of(client, made) == expected
    found = client.conversations.items.list(made, limit=100).data
    assert len({item.id for item in found}) == len(found)
    item = client.conversations.items.retrieve(found[3].id, conversation_id=made)
    assert item.content[0].text == "u"
    asked = client.responses.input_items.list(response.id, order="asc").data
    assert [item.content[0].text for item in asked] == ["a\n\nb", "c", "d", "e", "f"]
    turns = server.engine.sync.session_by_id(made[5:], owner="ann").turns
    assert turns[0].text == "a\n\nb\n\nc\n\nd\n\ne\n\nf"


def test_created_items_are_those_of_the_request(client):
    """Also where others are equal to them, or wait for a reply before them."""
    made = conversation(client)
    for items in (
        [message("user", "x")],
        [message("user", "x"), message("user", "y")],
        [message("assistant", "z"), message("user", "x")],
        [message("system", "Be kind."), message("user", "x"), message("assistant", "z")],
    ):
        found = client.conversations.items.create(made, items=items)
        assert [(item.role, item.content[0].text) for item in found.data] == [
            (item["role"], item["content"]) for item in items
        ]


@pytest.fixture
def bob_s_engine(server):
    """The engine, in which bob has no session before and after the test."""
    engine = server.engine.sync

    def clear():
        for session in engine.sessions("bob", hidden=True):
            engine.delete(session.name, "bob")

    clear()
    yield engine
    clear()


def test_responses_make_room_for_others(server, bob_s_engine):
    """At the bound the oldest unused responses are deleted: neither conversations nor a user's
    sessions nor what runs."""
    bob, body = server.client("b"), {"input": "x", **SHORT}
    conversation = bob.post("/v1/conversations", json={}).json()["id"]
    first, second = (bob.post("/v1/responses", json=body).json()["id"] for _ in range(2))
    for i in range(46):
        bob_s_engine.session(f"mine-{i}", owner="bob", system="x")
    with server.taken_slot("bob"):
        queued = bob.post("/v1/responses", json={**body, "background": True}).json()["id"]
        for gone, there in ((first, second), (second, queued)):
            assert bob.post("/v1/sessions", json={}).status_code == 201
            assert bob.get(f"/v1/responses/{gone}").status_code == 404
            assert bob.get(f"/v1/responses/{there}").status_code == 200
        refused = bob.post("/v1/sessions", json={})
        assert refused.json()["error"]["code"] == "too_many_sessions"
        assert bob.get(f"/v1/conversations/{conversation}").status_code == 200
        assert bob.get(f"/v1/responses/{queued}").status_code == 200
    assert bob_s_engine.count_sessions("bob") == 50


def test_an_owner_s_sessions_are_bounded(server, bob_s_engine):
    engine, bob = bob_s_engine, server.client("b")
    made = [engine.session(f"mine-{i}", owner="bob") for i in range(50)]
    for path, body in (("responses", {"input": "x"}), ("conversations", {})):
        answer = bob.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "too_many_sessions"
    made[0].delete()
    assert bob.post("/v1/conversations", json={}).status_code == 200
    for session in made[1:]:
        session.delete()


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"a": "x" * 513}},
        {"metadata": {"x" * 65: "a"}},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 5000}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 5}] * 1000},
    ],
)
def test_large_fields_are_refused(server, body):
    answer = server.client("a").post("/v1/responses", json={"input": "x", **body})
    assert answer.status_code == 400


def test_joined_messages_have_one_empty_line_between_them(server, client):
    user = {"role": "user", "content": "a"}
    made = client.responses.create(input=[user, {**user, "content": ""}, user], **SHORT)
    session = server.engine.sync.session_by_id(made.id[5:37], owner="ann")
    assert session.turns[0].text == joined("a", "a")
    items = client.responses.input_items.list(made.id).data
    assert [item.content[0].text for item in items] == ["a", "a"]


def test_failures_name_no_path_and_no_process():
    for error in (StoreError("cannot write /var/x: process 12"), ModelError("/models/x is broken")):
        text = failure(error)["message"]
        assert "/" not in text
        assert "12" not in text


def test_ids_have_one_spelling(client, server):
    made = client.responses.create(input="x", **SHORT).id
    other = f"{made[:37]}0{made[37:]}"
    answer = httpx.get(f"{server.url}/v1/responses/{other}", headers={"Authorization": "Bearer a"})
    assert answer.status_code == 404


def test_the_server_deletes_unused_sessions_by_itself(tmp_path):
    old, new, kept = f"response-{0:016x}", f"response-{1:016x}", f"conversation-{0:016x}"
    store = SqliteStore(tmp_path)
    for name in (kept, old, new):
        store.add(SessionRecord(name, "local", "append", tags=("responses",)))
    used = store.find("local", old).last_used  # 31 days of use ago
    note = {"seconds": 31 * 86400, "at": 0, "boot": "", "marks": [[0, used.isoformat()]]}
    store.note("use", note)
    store.close()
    with RunningServer(store=tmp_path) as server:
        while server.engine.sync.count_sessions("local") > 2:
            pass
        assert [one.name for one in server.engine.sync.sessions(hidden=True)] == [new, kept]


def test_a_session_of_the_user_is_a_conversation(server, client):
    with server.engine.sync.session("talk", owner="ann") as talk:
        talk.send("x", max_new_tokens=4)
        made = client.responses.create(input="y", conversation=f"conv_{talk.id}", **SHORT)
        assert [turn.text for turn in talk.turns][2:] == ["y", made.output_text]
        assert [one.name for one in server.engine.sync.sessions("ann")] == ["talk"]
        client.conversations.delete(f"conv_{talk.id}")


def test_the_openapi_page_has_an_example_of_every_body(server):
    page = server.client("a").get("/openapi.json").json()
    for name in ("ResponseBody", "PromptBody", "ConversationBody", "MetadataBody", "ItemsBody"):
        assert page["components"]["schemas"][name]["examples"]
