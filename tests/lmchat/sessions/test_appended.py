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


def test_messages_that_are_several_keep_their_lengths(tmp_path):
    joined = [
        {"role": "user", "content": "one\n\ntwo", "parts": [3, 3]},
        {"role": "assistant", "content": "yes\n\nno", "parts": [3, 2]},
    ]
    with lmchat.ChatEngine("memo", store=tmp_path) as engine, engine.session("s") as session:
        session.append([*joined, {"role": "user", "content": "a\n\nb"}])
        session.append([{"role": "user", "content": "c\n\nd", "parts": [1, 1]}])
    with lmchat.ChatEngine("memo", store=tmp_path) as engine, engine.session("s") as session:
        assert [dict(turn.metadata) for turn in session.turns] == [
            {"parts": [3, 3]},
            {"parts": [3, 2]},
        ]
        assert session.unanswered == "a\n\nb\n\nc\n\nd"
        assert session._record.unanswered_parts == (4, 1, 1)
        session.append(joined)
        assert session._record.unanswered_parts == ()


@pytest.mark.parametrize("parts", [[3, 2], [9], [3], 3, "33", [3, -1], [3, 3.0], [True, 3, 3]])
def test_lengths_that_are_not_those_of_the_messages_are_refused(session, parts):
    message = {"role": "user", "content": "one\n\ntwo", "parts": parts}
    with pytest.raises(InvalidRequest, match=r"messages\[0\].parts is"):
        session.append([message])
    assert session.unanswered is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "x"}], "expected 'user'"),
        ([{"role": "user", "content": "x"}] * 2, "expected 'assistant'"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is None, expected a string"),
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
    with pytest.raises(InvalidRequest, match="expected 'assistant': a reply before"):
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


# --- edited replies -----------------------------------------------------------------------------


ROUNDS = [("My dog is called Waffles.", "A good name."), ("And my cat?", "You did not say.")]


def messages_of(rounds):
    return [
        {"role": role, "content": text}
        for pair in rounds
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


@pytest.mark.parametrize("turn", [0, 1])
def test_an_edited_reply_has_the_tokens_of_a_session_with_the_same_texts(engine, session, turn):
    session.append(messages_of(ROUNDS))
    before = session.token_ids
    session.edit_reply(turn, "Waffles <|im_end|> it is.")
    rounds = [*ROUNDS[:turn], (ROUNDS[turn][0], "Waffles <|im_end|> it is.")]
    other = engine.session()
    other.append(messages_of(rounds))
    assert session.token_ids == other.token_ids
    assert [turn.text for turn in session.turns] == [turn.text for turn in other.turns]
    old, new = session.branches(turn)
    assert (old.turn, new.active) == (new.turn, True)
    settings = {"temperature": 0, "max_new_tokens": 8}
    assert session.send("What now?").token_ids == other.send("What now?", **settings).token_ids
    session.switch(turn, 0)
    assert session.token_ids == before


def test_an_edited_reply_follows_a_generated_conversation(engine, session):
    first = session.send("Hello!")
    session.send("How are you?")
    session.edit_reply(1, "Well.")
    assert [turn.text for turn in session.turns] == ["Hello!", first.text, "How are you?", "Well."]
    assert session.turns[-1].finish_reason == "stop"
    again = session.retry()  # of the same question: a third reply
    assert len(session.branches(1)) == 3
    assert session.turns[-1].text == again.text


def test_a_reply_that_does_not_exist_or_does_not_fit_is_not_edited(engine, session):
    session.append(messages_of(ROUNDS))
    before = session.revision, session.token_ids
    for turn in (2, -1, "0", True):
        with pytest.raises(InvalidRequest, match="turn is"):
            session.edit_reply(turn, "x")
    with pytest.raises(InvalidRequest, match="text is"):
        session.edit_reply(0, None)
    with pytest.raises(ContextFull):
        session.edit_reply(0, "word " * engine.max_context)
    assert (session.revision, session.token_ids) == before


def test_no_reply_is_edited_while_one_is_generated(session):
    generation = session.start_send("Tell me", max_new_tokens=1500, ignore_eos=True)
    with pytest.raises(lmchat.SessionBusy):
        session.edit_reply(0, "x")
    generation.cancel()
    generation.wait()
