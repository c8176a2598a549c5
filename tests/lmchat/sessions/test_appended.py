"""Messages appended without generating, turns with metadata, and replies as branches by id."""

import pytest

import lmchat
from lmchat.errors import ContextFull, InvalidRequest, NotFound


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine("memo", store="memory") as opened:
        yield opened


@pytest.fixture
def session(engine):
    with engine.session(settings={"max_new_tokens": 8, "temperature": 0}) as opened:
        yield opened


def test_appended_rounds_are_the_conversation_that_the_template_renders(engine, session):
    messages = [
        {"role": "user", "content": "My dog is called Waffles."},
        {"role": "assistant", "content": "A good name."},
    ]
    session.append(messages)
    assert [turn.text for turn in session.turns] == [one["content"] for one in messages]
    reply = session.send("What's my dog's name?")
    rendered = engine._runtime.builder._template.render(
        [*messages, {"role": "user", "content": "What's my dog's name?"}]
    )
    prompt = engine.tokenizer.raw(session.token_ids[: reply.usage.prompt_tokens])
    assert prompt == rendered


def test_a_last_user_message_waits_as_unanswered(session):
    session.append([{"role": "user", "content": "one"}])
    session.append([{"role": "user", "content": "two"}])
    assert session.unanswered == "one\n\ntwo"
    assert session.turns == ()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "x"}], "expected 'user'"),
        ([{"role": "user", "content": "x"}] * 2, "expected 'assistant'"),
        ([{"role": "user", "content": None}], "is no text"),
        ([{"role": "tool", "content": "x"}], "expected 'user'"),
    ],
)
def test_messages_that_do_not_alternate_are_refused(session, messages, message):
    with pytest.raises(InvalidRequest, match=message):
        session.append(messages)
    assert session.turns == ()


def test_messages_beyond_the_context_are_refused(engine, session):
    long = "word " * engine.max_context
    with pytest.raises(ContextFull):
        session.append([{"role": "user", "content": "x"}, {"role": "assistant", "content": long}])
    assert session.turns == ()


def test_a_reply_after_an_earlier_one_is_a_branch(session):
    first = session.send("one").turn.id
    second = session.send("two").turn.id
    third = session.start_send("three", after=first)
    third.wait()
    assert [turn.text for turn in session.turns if turn.role == "user"] == ["one", "three"]
    assert [turn.id for turn in session.conversation(second)][1] == first
    assert third.turn_id == session.turns[-1].id
    with pytest.raises(NotFound, match="no reply 999"):
        session.start_send("four", after=999)


def test_a_fork_after_a_reply_of_another_branch(engine, session):
    first = session.send("one").turn.id
    second = session.send("two").turn.id
    session.start_send("three", after=first).wait()
    with session.fork(after=second) as copy:
        assert [turn.text for turn in copy.turns if turn.role == "user"] == ["one", "two"]


def test_metadata_of_turns_survives_export_and_a_changed_system_prompt(engine, session, tmp_path):
    session.start_send("one", metadata={"a": [1, {"b": None}]}).wait()
    reply = session.turns[-1].id
    session.annotate(reply, {"deleted": True})
    session.export(tmp_path / "one.zip")
    with engine.import_(tmp_path / "one.zip", "copy") as copy:
        assert [dict(turn.metadata) for turn in copy.turns] == [
            {"a": [1, {"b": None}]},
            {"deleted": True},
        ]
    session.set_system("Be brief.")
    assert dict(session.turns[1].metadata) == {"a": [1, {"b": None}]}
    with pytest.raises(NotFound):
        session.annotate(99, {})


def test_metadata_of_turns_survives_the_process(tmp_path):
    with lmchat.ChatEngine("memo", store=tmp_path) as engine, engine.session("s") as session:
        session.start_send("one", metadata={"x": "y"}, max_new_tokens=4).wait()
    with lmchat.ChatEngine("memo", store=tmp_path) as engine, engine.session("s") as session:
        assert session.turns[0].metadata == {"x": "y"}


def test_tokens_are_counted_as_the_prompt_will_have_them(session):
    session.send("one")
    expected = session.count_tokens("two")
    assert session.send("two").usage.prompt_tokens == expected


HISTORY = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def test_what_precedes_a_message_is_stored_with_its_reply(engine, session):
    expected = session.count_tokens("three", before=HISTORY, system="Be brief.")
    reply = session.start_send("three", before=HISTORY, system="Be brief.")
    reply.wait()
    assert [turn.text for turn in session.turns[:4]] == ["Be brief.", "one", "two", "three"]
    assert reply.result().usage.prompt_tokens == expected
    with engine.session(settings=session.settings, system="Be brief.") as other:
        other.append(HISTORY)
        assert other.send("three").token_ids == reply.result().token_ids


@pytest.mark.parametrize(
    "refused", [{"settings": {"top_k": -2}}, {"text": "word " * 5000}, {"after": 999}]
)
def test_a_refused_message_leaves_the_conversation_as_it_was(session, refused):
    session.append([*HISTORY, {"role": "user", "content": "waits"}])
    before = session.turns, session.revision, session.unanswered
    with pytest.raises((InvalidRequest, ContextFull, NotFound)):
        session.start_send(
            refused.get("text", "x"),
            before=HISTORY,
            system="Other.",
            after=refused.get("after"),
            **refused.get("settings", {}),
        )
    assert (session.turns, session.revision, session.unanswered) == before


def test_a_message_after_another_branch_gets_another_system_prompt(session):
    first = session.send("one").turn.id
    session.send("two")
    session.start_send("three", after=first, system="Be brief.").wait()
    assert [turn.text for turn in session.turns if turn.role != "assistant"] == [
        "Be brief.", "one", "three",
    ]  # fmt: skip
    session.start_send("four", system="").wait()
    assert session.system is None


def test_overflow_holds_for_one_message(engine, session):
    words = engine.max_context * 2 // 3
    session.append([{"role": "user", "content": "x " * words}, HISTORY[1]])
    with pytest.raises(ContextFull):
        session.start_send("y " * words)
    session.start_send("y " * words, overflow="drop").wait()
    assert [turn.text[0] for turn in session.turns if turn.role == "user"] == ["y"]
    assert session.overflow == "refuse"


def test_messages_before_must_end_with_a_reply(session):
    with pytest.raises(InvalidRequest, match="expected a reply"):
        session.start_send("x", before=HISTORY[:1])


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_sessions_of_an_owner_are_counted(store, tmp_path):
    where = "memory" if store == "memory" else tmp_path
    with lmchat.ChatEngine("memo", store=where) as engine:
        assert engine.count_sessions("ann") == 0
        made = engine.session("a", owner="ann", tags=["responses"])
        made.fork("b", tags=["x"])
        engine.session("c", owner="bob", tags=["x"])
        assert engine.count_sessions("ann") == 2
        assert [one.name for one in engine.sessions(tag="x", owner="ann")] == ["b"]
        made.delete()
        assert engine.count_sessions("ann") == 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_message_that_is_cancelled_in_the_queue_leaves_the_conversation(keep):
    with lmchat.ChatEngine("memo", store="memory", max_batch_size=1, isa="portable") as engine:
        running = engine.start_generate("x", ignore_eos=True)
        session = engine.session()
        session.append([{"role": "user", "content": "waits"}])
        queued = session.start_send("x", before=HISTORY, system="Other.", keep_question=keep)
        queued.cancel()
        queued.wait()
        running.cancel()
        assert session.turns == ()
        assert session.unanswered == ("x" if keep else "waits")
