"""Responses and conversations, by OpenAI's own client, with strict checks of what it gets."""

from datetime import datetime, timedelta, timezone
from unittest import mock

import httpx
import openai
import pytest
from http_server import RunningServer
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from lmchat.server import ServerConfig
from lmchat.server.responses.cleanup import delete_unused
from lmchat.store import records
from lmchat.store.use_time import UseTime

SHORT = {"model": "memo", "max_output_tokens": 12, "temperature": 0}
LONG = {"model": "memo", "temperature": 0, "extra_body": {"ignore_eos": True}}
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server():
    # The slowest kernels, so that a long reply still runs when a test acts on it.
    config = ServerConfig(keys={"a": "ann", "b": "bob"})
    with RunningServer(config, cache_pages=256, isa="portable", threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as found:
        yield found


def strictly(kind, found):
    """Validates what the client has got, which it does not do by itself."""
    kind.model_validate(found.model_dump(), strict=True)
    extra = set(found.model_dump()) - set(kind.model_fields)
    assert not extra, extra
    return found


def same(server, prompt, **settings):
    """The text of the same conversation in a session."""
    with server.engine.sync.session(owner="reference") as session:
        for text in prompt[:-1]:
            session.send(text, temperature=0, max_new_tokens=12)
        reply = session.send(prompt[-1], temperature=0, max_new_tokens=12, **settings)
        session.delete()
        return reply


def test_a_response_is_stored_and_found_again(server, client):
    made = strictly(Response, client.responses.create(input="My dog is Waffles.", **SHORT))
    assert made.status in ("completed", "incomplete")
    assert made.output_text == same(server, ["My dog is Waffles."]).text
    found = strictly(Response, client.responses.retrieve(made.id))
    assert found.output_text == made.output_text
    assert found.usage == made.usage
    assert found.max_output_tokens == 12


def test_a_chain_computes_only_its_new_tokens(server, client):
    first = client.responses.create(input="My dog is Waffles.", **SHORT)
    second = client.responses.create(
        input="What is my dog's name?", previous_response_id=first.id, **SHORT
    )
    expected = same(server, ["My dog is Waffles.", "What is my dog's name?"])
    assert second.output_text == expected.text
    assert second.usage.input_tokens == expected.usage.prompt_tokens
    held = first.usage.total_tokens - 2
    assert second.usage.input_tokens_details.cached_tokens >= held


def test_two_answers_to_one_response_are_branches(server, client):
    first = client.responses.create(input="one", **SHORT)
    texts = [
        client.responses.create(input=text, previous_response_id=first.id, **SHORT).output_text
        for text in ("two", "three")
    ]
    assert texts == [same(server, ["one", "two"]).text, same(server, ["one", "three"]).text]


def test_an_answer_while_the_session_generates_is_made_in_a_fork(server, client):
    first = client.responses.create(input="one", **SHORT)
    running = client.responses.create(
        input="Tell me more.", previous_response_id=first.id, background=True, **LONG
    )
    other = client.responses.create(input="two", previous_response_id=first.id, **SHORT)
    assert other.output_text == same(server, ["one", "two"]).text
    assert running.id[5:37] != other.id[5:37]
    client.responses.cancel(running.id)


def test_instructions_hold_for_one_response(server, client):
    first = client.responses.create(input="one", instructions="Be brief.", **SHORT)
    assert first.instructions == "Be brief."
    second = client.responses.create(input="two", previous_response_id=first.id, **SHORT)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    items = client.responses.input_items.list(first.id, order="asc").data
    assert [item.role for item in items] == ["system", "user"]


def test_a_history_can_be_given_as_items(server, client):
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "My dog is Waffles."}]},
        {"role": "assistant", "content": "Hello Waffles."},
        {"role": "user", "content": "What is my dog's name?"},
    ]
    made = client.responses.create(input=history, **SHORT)
    found = client.responses.input_items.list(made.id, order="asc")
    strictly(ResponseItemList, ResponseItemList(**found.model_dump()))
    assert [item.content[0].text for item in found.data] == [
        "My dog is Waffles.", "Hello Waffles.", "What is my dog's name?",
    ]  # fmt: skip


def test_events_are_those_of_openai(client):
    events = list(client.responses.create(input="one", stream=True, **SHORT))
    for number, event in enumerate(events):
        EVENT.validate_python(event.model_dump(), strict=True)
        assert event.sequence_number == number
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert text == last.output_text
    assert client.responses.retrieve(last.id).output_text == text


def test_a_stream_is_resumed_after_any_event(client):
    whole = client.responses.create(input="one", stream=True, background=True, **SHORT)
    events = [event.model_dump() for event in whole]
    made = events[-1]["response"]["id"]
    for after in (0, 3, len(events) - 2, len(events)):
        rest = client.responses.retrieve(made, stream=True, starting_after=after)
        assert [event.model_dump() for event in rest] == events[after + 1 :]


def test_a_background_response_is_polled_and_cancelled(client):
    made = client.responses.create(input="Tell me more.", background=True, **LONG)
    assert made.status == "in_progress"
    assert client.responses.retrieve(made.id).background is True
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"


def test_a_foreground_response_cannot_be_cancelled(client):
    made = client.responses.create(input="one", **SHORT)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)


def test_a_disconnect_ends_a_stream_and_keeps_what_was_produced(server, client):
    with client.responses.create(input="Tell me more.", stream=True, **LONG) as events:
        seen = []
        for event in events:
            seen.append(event)
            if event.type == "response.output_text.delta" and len(seen) > 8:
                break
    made = seen[0].response.id
    while (found := client.responses.retrieve(made)).status == "in_progress":
        pass
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert found.status == "cancelled"
    assert found.output_text.startswith(text)


def test_a_deleted_response_is_gone_and_its_successors_stay(client):
    first = client.responses.create(input="one", **SHORT)
    second = client.responses.create(input="two", previous_response_id=first.id, **SHORT)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="x", previous_response_id=first.id, **SHORT)
    assert client.responses.retrieve(second.id).id == second.id


@pytest.mark.parametrize("made_up", ["resp_x", "resp_" + "0" * 32 + "1", "resp_" + "0" * 32])
def test_absent_and_foreign_responses_are_answered_alike(server, client, made_up):
    mine = client.responses.create(input="one", **SHORT).id
    bob = server.client("b")
    answers = []
    for one in (mine, made_up):
        answer = bob.get(f"/v1/responses/{one}")
        answers.append((answer.status_code, answer.text.replace(one, "ID")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


def test_log_probabilities_are_those_of_the_tokens(server, client):
    made = client.responses.create(
        input="one", include=["message.output_text.logprobs"], top_logprobs=2, **SHORT
    )
    found = made.output[0].content[0].logprobs
    assert len(found) == made.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 for one in found)
    assert b"".join(bytes(one.bytes) for one in found).decode().startswith(made.output_text)


def test_without_store_nothing_is_kept(server, client):
    before = len(server.engine.sync.sessions("ann"))
    made = client.responses.create(input="one", store=False, **SHORT)
    assert made.output_text == same(server, ["one"]).text
    assert len(server.engine.sync.sessions("ann")) == before
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "web_search"}]),
        ("text", {"format": {"type": "json_object"}}),
        ("reasoning", {"effort": "high"}),
        ("prompt", {"id": "x"}),
        ("tool_choice", "required"),
        ("moderation", {"model": "x"}),
        ("nonsense", 1),
        ("temperature", 2.5),
        ("top_logprobs", 21),
        ("include", ["nonsense"]),
        ("conversation", "conv_x"),
        ("truncation", "middle"),
        ("background", "yes"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"type": "function_call_output", "call_id": "x", "output": "y"}]),
        ("input", [{"role": "assistant", "content": "x"}]),
        ("metadata", {"a": 1}),
        ("stop", ["x"] * 17),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, field, value):
    before = len(server.engine.sync.sessions("ann"))
    answer = server.client("a").post("/v1/responses", json={"input": "x", field: value})
    assert answer.status_code in (400, 404)
    assert field in answer.json()["error"]["message"] or answer.status_code == 404
    assert len(server.engine.sync.sessions("ann")) == before


def test_null_and_default_fields_are_accepted(server):
    body = {
        "input": "one", "max_output_tokens": 4, "tools": [], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "user": "u", "service_tier": "auto",
        "reasoning": None, "truncation": "disabled", "metadata": {}, "stream": None,
        "parallel_tool_calls": True, "safety_identifier": "s", "store": True,
    }  # fmt: skip
    assert server.client("a").post("/v1/responses", json=body).status_code == 200


def test_input_tokens_are_those_of_the_prompt(client):
    first = client.responses.create(input="one", **SHORT)
    counted = client.responses.input_tokens.count(model="memo", input="one")
    assert counted.input_tokens == first.usage.input_tokens
    counted = client.responses.input_tokens.count(input="two", previous_response_id=first.id)
    second = client.responses.create(input="two", previous_response_id=first.id, **SHORT)
    assert counted.input_tokens == second.usage.input_tokens


def test_a_conversation_is_a_session(server, client):
    made = strictly(
        Conversation,
        client.conversations.create(
            metadata={"topic": "dogs"},
            items=[{"type": "message", "role": "user", "content": "My dog is Waffles."}],
        ),
    )
    response = client.responses.create(input="What is its name?", conversation=made.id, **SHORT)
    assert response.conversation.id == made.id
    found = client.conversations.items.list(made.id, order="asc")
    strictly(ConversationItemList, ConversationItemList(**found.model_dump()))
    assert [item.content[0].text for item in found.data] == [
        "My dog is Waffles.",
        "What is its name?",
        response.output_text,
    ]
    again = client.responses.create(input="And mine?", conversation=made.id, **SHORT)
    held = response.usage.total_tokens - 2
    assert again.usage.input_tokens_details.cached_tokens >= held
    session = server.engine.sync.session_by_id(made.id.removeprefix("conv_"), owner="ann")
    assert session.metadata == {"topic": "dogs"}
    assert len(session.turns) == 4


def test_a_conversation_is_changed_and_deleted(client):
    made = client.conversations.create()
    client.conversations.items.create(
        made.id,
        items=[
            {"type": "message", "role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": "one"},
            {"type": "message", "role": "assistant", "content": "two"},
        ],
    )
    items = client.conversations.items.list(made.id).data
    assert [item.role for item in items] == ["assistant", "user", "system"]
    one = client.conversations.items.retrieve(items[1].id, conversation_id=made.id)
    assert one.content[0].text == "one"
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id).metadata == {"a": "b"}
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_a_busy_conversation_is_409(client):
    made = client.conversations.create()
    running = client.responses.create(
        input="Tell me more.", conversation=made.id, background=True, **LONG
    )
    with pytest.raises(openai.ConflictError):
        client.responses.create(input="x", conversation=made.id, **SHORT)
    client.responses.cancel(running.id)


def test_responses_outlive_the_server(tmp_path):
    with RunningServer(store=tmp_path) as server:
        body = {"input": "one", "max_output_tokens": 8, "temperature": 0, "metadata": {"a": "b"}}
        made = server.client().post("/v1/responses", json=body).json()
    with RunningServer(store=tmp_path) as server:
        client = server.client()
        found = client.get(f"/v1/responses/{made['id']}").json()
        assert found == made
        body = {"input": "two", "previous_response_id": made["id"], "max_output_tokens": 4}
        assert client.post("/v1/responses", json=body).json()["status"] in (
            "completed",
            "incomplete",
        )


def test_sessions_of_responses_are_listed_on_request_only(server, client):
    made = client.responses.create(input="one", **SHORT).id[5:37]
    engine = server.engine.sync
    assert made not in {one.id for one in engine.sessions("ann")}
    assert made in {one.id for one in engine.sessions("ann", tag="responses")}
    assert made in {one.id for one in engine.sessions("ann", hidden=True)}


@pytest.fixture
def use_time(server):
    """The time in use of the server's store, and a list with the clock that it counts."""
    seconds = [0.0]
    return UseTime(server.engine.sync._runtime.store, lambda: seconds[0]), seconds


def test_responses_are_deleted_after_30_days_in_use(server, client, use_time):
    engine = server.engine.sync
    use_time, seconds = use_time
    made = client.responses.create(input="one", **SHORT).id
    kept = client.conversations.create()
    answer = client.responses.create(input="one", conversation=kept.id, **SHORT)
    user = engine.session("mine", owner="ann", tags=["responses"])
    user.send("one", max_new_tokens=2)
    chat = client.responses.create(input="one", **SHORT).id
    engine.session_by_id(chat[5:37], owner="ann").send("More", max_new_tokens=2)
    use_time.mark()
    later = client.responses.create(input="two", **SHORT).id
    for days, left in ((29.9, True), (0.2, False)):
        seconds[0] += days * 86400
        use_time.mark()
        delete_unused(engine, use_time)
        found = {one.id for one in engine.sessions("ann", tag="responses")}
        assert (made[5:37] in found) == left
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made)
    assert {kept.id[5:], user.id, chat[5:37], later[5:37]} <= found
    assert client.responses.retrieve(answer.id).id == answer.id
    assert len(client.conversations.items.list(kept.id).data) == 2
    user.delete()


def test_no_clock_deletes_a_response(server, client, use_time, monkeypatch):
    """A store that is opened after years, or with a wrong clock, was not used in between."""
    engine = server.engine.sync
    made = client.responses.create(input="one", **SHORT).id
    for days in (0, 40, -40, 4000):
        clock = datetime.now(timezone.utc) + timedelta(days=days)
        monkeypatch.setattr(records, "datetime", mock.Mock(now=lambda zone, t=clock: t))
        again = UseTime(engine._runtime.store)
        again.mark()
        assert delete_unused(engine, again) == 0
    assert client.responses.retrieve(made).id == made


def test_a_response_that_is_refused_leaves_no_session(server, client):
    before = len(server.engine.sync.sessions("ann", hidden=True))
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="word " * 5000, **SHORT)
    assert len(server.engine.sync.sessions("ann", hidden=True)) == before


def test_a_stream_of_a_response_without_events_is_refused(server, client):
    made = client.responses.create(input="one", **SHORT)
    answer = httpx.get(
        f"{server.url}/v1/responses/{made.id}?stream=true", headers={"Authorization": "Bearer a"}
    )
    assert answer.status_code == 400
