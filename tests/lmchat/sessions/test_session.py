"""The session API: what each verb does to the conversation, and what it costs."""

from __future__ import annotations

import threading
import time

import pytest
from chat_models import CHATML, chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from lmchat.generation.state import MOVES, State, move
from lmchat.store.turns import Turn, TurnTree

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
LONG = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0.0}


pytestmark = pytest.mark.usefixtures("store_kind")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder, device):
    with lmchat.ChatEngine(folder, device=device, threads=2, cache_memory="64MiB") as engine:
        yield engine
        if not engine._is_closed:
            for info in engine.sessions():
                engine.delete(info.name, info.owner)
            stats = engine.stats()
            assert (stats.handles, stats.pages_referenced, stats.slots) == (0, 0, 0)
            engine.core.check_invariants()


def by_hand(*rounds, system=None):
    """The transcript of rounds of (text, reply)."""
    conversation = Conversation(make_tokenizer())
    for text, reply in rounds:
        conversation.user(text, system)
        conversation.reply(reply.token_ids)
    return conversation.ids


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


# --- answering -----------------------------------------------------------------------------------


def test_a_transcript_is_the_prompts_and_replies_in_order(engine):
    chat = engine.session("trip", system="You are brief.")
    first = chat.send("Plan a day in Kyoto.", **GREEDY)
    second = chat.send("And with children?", **GREEDY)
    assert chat.token_ids == by_hand(
        ("Plan a day in Kyoto.", first), ("And with children?", second), system="You are brief."
    )
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [turn.role for turn in chat.turns] == roles
    assert [turn.parent for turn in chat.turns] == [None, *(t.id for t in chat.turns[:-1])]
    assert chat.turns[-1].message == {"role": "assistant", "content": second.text}
    assert first.finish_reason in ("stop", "length")
    assert first.usage.completion_tokens == len(first.token_ids)
    assert second.usage.prompt_tokens == chat.length - len(second.token_ids)
    # All of the past but the last token of the first reply, which was sampled and not computed.
    past = chat.turns[2].length
    assert second.usage.cached_tokens >= past - 1
    assert 0 < second.timings.ttft <= second.timings.total
    assert engine.session("trip") is chat
    assert chat.state is State.IDLE


def test_replies_equal_those_of_the_engine_alone(engine):
    chat = engine.session()
    reply = chat.send("One", seed=3, temperature=1.0, max_new_tokens=20)
    prompt = chat.token_ids[: -len(reply.token_ids)]
    alone = engine.core.generate(prompt, seed=3, temperature=1.0, max_new_tokens=20)
    assert reply.token_ids == alone.token_ids
    assert engine.generate(prompt, seed=3, temperature=1.0, max_new_tokens=20).token_ids == (
        alone.token_ids
    )


def test_stream_gives_the_text_in_pieces(engine):
    chat = engine.session()
    with chat.stream("One", **GREEDY) as stream:
        deltas = list(stream)
    assert stream.reply is not None
    assert "".join(deltas) == stream.reply.text == chat.turns[-1].text
    other = engine.session().stream("One", **GREEDY)
    assert "".join(other) == stream.reply.text


def test_stream_reports_the_progress_of_a_prompt(engine):
    stream = engine.session().stream("word " * 900, max_new_tokens=2)
    progress = [part for part in stream.events() if isinstance(part, lmchat.Progress)]
    assert progress[-1].done == progress[-1].total == stream.reply.usage.prompt_tokens
    assert [p.done for p in progress] == sorted(p.done for p in progress)
    assert progress[0].cached == stream.reply.usage.cached_tokens


def test_progress_counts_what_was_cached(engine):
    for cached in (0, 1024):
        stream = engine.stream("cached " * 300, max_new_tokens=1)
        progress = [part for part in stream.events() if isinstance(part, lmchat.Progress)]
        assert stream.reply.usage.cached_tokens >= cached
        assert {part.cached for part in progress} == {stream.reply.usage.cached_tokens}


def test_generate_and_score_without_a_session(engine):
    reply = engine.generate([5, 6, 7], **GREEDY)
    assert reply.token_ids == engine.core.generate([5, 6, 7], **GREEDY).token_ids
    assert reply.text == engine.tokenizer.stream(context=[5, 6, 7]).push(reply.token_ids)
    assert engine.score([5, 6, 7]) == engine.core.score([5, 6, 7])
    assert engine.generate("hello", **GREEDY).usage.prompt_tokens == len(
        engine.tokenizer.encode("hello")
    )


def test_settings_come_from_call_session_model(engine):
    chat = engine.session(settings={"max_new_tokens": 3, "ignore_eos": True, "temperature": 0.0})
    assert len(chat.send("a").token_ids) == 3
    assert len(chat.send("a", max_new_tokens=5).token_ids) == 5
    chat.set(max_new_tokens=None)
    assert "max_new_tokens" not in chat.settings
    with pytest.raises(lmchat.InvalidRequest, match="unknown setting 'max_tokens'"):
        chat.set(max_tokens=3)
    with pytest.raises(lmchat.InvalidRequest, match="temperature is -1"):
        chat.send("a", temperature=-1)
    reply = chat.send("a", max_new_tokens=2, logprobs=1)
    assert len(reply.logprobs) == 2


def test_stop_strings_cut_text_and_transcript(engine):
    whole = engine.session().send("Hello", temperature=0.0, max_new_tokens=60, ignore_eos=True)
    stop = whole.text[len(whole.text) // 2 :][:3]
    chat = engine.session()
    with chat.stream(
        "Hello", temperature=0.0, max_new_tokens=60, ignore_eos=True, stop_strings=stop
    ) as stream:
        text = "".join(stream)
    reply = stream.reply
    assert reply.finish_reason == "stop"
    assert text == reply.text == whole.text[: whole.text.index(stop)]
    count = len(reply.token_ids)
    assert reply.token_ids == whole.token_ids[:count]
    detokenizer = engine.tokenizer.stream()
    assert (detokenizer.push(reply.token_ids) + detokenizer.flush()).startswith(reply.text)
    assert chat.token_ids[-count:] == reply.token_ids
    again = chat.send("More", **GREEDY)
    assert chat.token_ids == by_hand(("Hello", reply), ("More", again))


# --- stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "close", "drop", "with", "interrupt"])
def test_a_stopped_reply_keeps_everything(engine, how):
    chat = engine.session()
    stream = chat.stream("Tell me", **LONG)
    shown = [next(stream)]
    if how == "stop":
        thread = threading.Thread(target=chat.stop)
        thread.start()
        thread.join()
    elif how == "close":
        stream.close()
    elif how == "drop":
        del stream
    elif how == "with":
        with stream:
            pass
    else:
        with pytest.raises(KeyboardInterrupt), stream:
            raise KeyboardInterrupt
    before = engine.stats().tokens_prefilled
    reply = chat.continue_(max_new_tokens=4)
    assert reply.turn.text.startswith("".join(shown))
    assert engine.stats().tokens_prefilled - before <= 1
    whole = engine.session().send("Tell me", **{**LONG, "max_new_tokens": len(reply.token_ids)})
    assert whole.token_ids == reply.token_ids
    assert whole.text == reply.text


def test_stop_says_what_came(engine):
    chat = engine.session()
    assert chat.stop() is None
    stream = chat.stream("Tell me", **LONG)
    next(stream)
    reply = chat.stop()
    assert reply.finish_reason == "cancelled"
    assert chat.turns[-1].token_ids == tuple(reply.token_ids)
    assert chat.state is State.IDLE
    assert "".join(stream) in reply.text


def test_a_second_generation_is_refused(engine):
    chat = engine.session()
    with chat.stream("Tell me", **LONG) as stream:
        next(stream)
        for verb in (
            lambda: chat.send("x"),
            chat.retry,
            chat.continue_,
            chat.undo,
            lambda: chat.edit(0, "x"),
            lambda: chat.set_system("x"),
        ):
            with pytest.raises(lmchat.SessionBusy, match="is generating"):
                verb()
    assert chat.send("Next", **GREEDY).finish_reason in ("stop", "length")


# --- branches ------------------------------------------------------------------------------------


def test_undo_returns_the_text_and_computes_nothing(engine):
    chat = engine.session()
    first = chat.send("One", **GREEDY)
    chat.send("Two", **GREEDY)
    before = engine.stats()
    assert chat.undo() == "Two"
    assert chat.token_ids == by_hand(("One", first))
    assert engine.stats().steps == before.steps
    assert [(b.turn.text, b.active) for b in chat.branches(1)] == [("Two", False)]
    chat.switch(1, 0)
    assert [t.text for t in chat.turns if t.role == "user"] == ["One", "Two"]
    assert chat.undo() == "Two"
    assert chat.undo() == "One"
    assert chat.turns == ()
    with pytest.raises(lmchat.InvalidRequest, match="no turn"):
        chat.undo()


def test_retry_is_a_branch_with_the_next_attempt(engine):
    chat = engine.session(settings={"temperature": 1.5, "seed": 1, "max_new_tokens": 12})
    first = chat.send("One")
    second = chat.retry()
    third = chat.retry()
    assert first.token_ids != second.token_ids != third.token_ids
    assert [t.turn.settings["attempt"] for t in (first, second, third)] == [0, 1, 2]
    branches = chat.branches(0)
    assert [b.reply.token_ids for b in branches] == [
        tuple(r.token_ids) for r in (first, second, third)
    ]
    assert [b.active for b in branches] == [False, False, True]
    chat.switch(0, 0)
    assert chat.token_ids == by_hand(("One", first))


def test_edit_starts_a_branch_and_keeps_the_old_one(engine):
    chat = engine.session()
    one, two = chat.send("One", **GREEDY), chat.send("Two", **GREEDY)
    other = chat.edit(0, "Uno", **GREEDY)
    assert chat.token_ids == by_hand(("Uno", other))
    assert [b.turn.text for b in chat.branches(0)] == ["One", "Uno"]
    before = engine.stats().tokens_prefilled
    chat.switch(0, 0)
    assert chat.token_ids == by_hand(("One", one), ("Two", two))
    three = chat.send("Three", **GREEDY)
    suffix = len(chat.turns[-2].token_ids)
    assert engine.stats().tokens_prefilled - before == suffix + 1  # and the last of "Two"'s reply
    assert chat.token_ids == by_hand(("One", one), ("Two", two), ("Three", three))
    with pytest.raises(lmchat.InvalidRequest, match="turn is 3, expected an integer from 0 to 2"):
        chat.edit(3, "x")


def test_fork_shares_the_past(engine):
    chat = engine.session("a", system="Be kind.", settings=GREEDY)
    chat.send("One " * 50)
    chat.send("Two")
    other = chat.fork("b")
    first = chat.fork(at=1)
    assert other.token_ids == chat.token_ids
    assert [t.text for t in first.turns] == [t.text for t in chat.turns[:3]]
    before = engine.stats().tokens_prefilled
    reply = other.send("Three")
    assert engine.stats().tokens_prefilled - before == len(other.turns[-2].token_ids) + 1
    assert chat.send("Three").token_ids == reply.token_ids
    assert other.settings == chat.settings
    with pytest.raises(lmchat.InvalidRequest, match="name is 'b', expected one that is not taken"):
        chat.fork("b")


def test_fork_during_a_generation(engine):
    chat = engine.session()
    chat.send("One", **GREEDY)
    with chat.stream("Tell me", **LONG) as stream:
        next(stream)
        other = chat.fork()
        assert [t.text for t in other.turns if t.role == "user"] == ["One"]
        assert other.send("Two", **GREEDY).finish_reason in ("stop", "length")


def test_continue_keeps_the_settings_that_the_reply_had(engine):
    whole = engine.session().send("One", **{**GREEDY, "max_new_tokens": 12}).token_ids
    chat = engine.session()
    chat.send("One", **{**GREEDY, "max_new_tokens": 5})
    chat.set(temperature=3.0, seed=1)  # for later turns
    assert chat.continue_(max_new_tokens=7).token_ids == whole


def test_continue_after_the_end_continues_past_the_stop_token(engine):
    chat = engine.session()
    eos = engine.tokenizer.special_texts["<|im_end|>"]
    reply = chat.send("One", temperature=0.0, logit_bias={eos: 100.0})
    assert reply.token_ids == [eos]
    assert chat.turns[-1].stopped
    longer = chat.continue_(max_new_tokens=3, logit_bias={})
    assert eos not in longer.token_ids[:1]
    assert longer.token_ids != [eos]
    with pytest.raises(lmchat.InvalidRequest, match="no reply"):
        engine.session().continue_()


def test_a_continued_reply_with_children_stays_beside_the_longer_one(engine):
    chat = engine.session()
    short = chat.send("One", **{**LONG, "max_new_tokens": 3})
    chat.send("Two", **GREEDY)
    chat.undo()
    chat.continue_(max_new_tokens=3)
    assert [len(b.reply.token_ids) for b in chat.branches(0)] == [3, 6]
    chat.switch(0, 0)
    assert [t.text for t in chat.turns if t.role == "user"] == ["One", "Two"]
    assert chat.turns[1].token_ids == tuple(short.token_ids)


def test_set_system_begins_again_with_the_replies_that_were(engine):
    chat = engine.session(settings=GREEDY)
    one, two = chat.send("One"), chat.send("Two")
    chat.set_system("Speak like a pirate.")
    assert chat.system == "Speak like a pirate."
    assert chat.token_ids == by_hand(("One", one), ("Two", two), system="Speak like a pirate.")
    chat.set_system(None)
    assert chat.token_ids == by_hand(("One", one), ("Two", two))
    assert len(chat.branches(0)) == 3
    chat.send("Three")


# --- many sessions -------------------------------------------------------------------------------


def test_unnamed_sessions_get_the_next_free_number(engine):
    assert engine.session().name == "chat-1"
    assert engine.session("chat-2").name == "chat-2"
    assert engine.session().name == "chat-3"
    chat = engine.session("x")
    chat.rename("y")
    assert engine.session("y") is chat
    assert engine.session("x") is not chat
    with pytest.raises(lmchat.InvalidRequest, match="taken"):
        chat.rename("x")
    for bad in ("", " a", "a\n", "x" * 201, 3):
        with pytest.raises(lmchat.InvalidRequest, match="name is"):
            engine.session(bad)
    assert engine.session("x", owner="other") is not engine.session("x")
    with pytest.raises(lmchat.NotFound, match="no session 'z'"):
        engine.delete("z")


def test_a_closed_session_can_be_opened_again(engine):
    with engine.session("trip", settings=GREEDY) as chat:
        chat.send("One " * 100)
        ids = chat.token_ids
    assert chat.state is State.CLOSED
    with pytest.raises(lmchat.NotFound, match="closed"):
        chat.send("x")
    chat.close()
    again = engine.session("trip")
    assert again.token_ids == ids
    before = engine.stats().tokens_prefilled
    again.send("Two")
    # Full pages were still there.
    assert engine.stats().tokens_prefilled - before <= 64 + len(again.turns[-2].token_ids)
    [info] = engine.sessions()
    assert (info.name, info.turns, info.tokens) == ("trip", 2, again.length)
    assert info.title.startswith("One One")


def test_reopening_changes_only_what_is_given(engine):
    chat = engine.session("a", system="Be brief.", settings={"max_new_tokens": 3})
    assert engine.session("a", settings={"seed": 4}).settings == {"max_new_tokens": 3, "seed": 4}
    assert engine.session("a", system="Be brief.") is chat
    with pytest.raises(lmchat.InvalidRequest, match="system is .*, expected None or that of"):
        engine.session("a", system="Be long.")


def test_close_of_the_engine_commits_what_runs(engine):
    chat = engine.session()
    stream = chat.stream("Tell me", **LONG)
    next(stream)
    engine.close()
    assert stream.reply.finish_reason == "cancelled"
    with pytest.raises(lmchat.EngineClosed):
        engine.session("new")
    with pytest.raises(lmchat.EngineClosed):
        engine.generate([1])


def test_overload_leaves_the_session_as_it_was(folder, device):
    with lmchat.ChatEngine(
        folder, device=device, max_batch_size=1, max_queue=1, cache_memory="32MiB", threads=2
    ) as engine:
        chats = [engine.session() for _ in range(3)]
        running = chats[0].stream("Tell me", **LONG)
        next(running)
        waiting = chats[1].stream("Wait", **GREEDY)
        assert chats[1].state is State.QUEUED
        with pytest.raises(lmchat.Overloaded, match="1 requests are waiting"):
            chats[2].send("x")
        assert chats[2].turns == ()
        reply = chats[1].stop()  # while it waits
        assert (reply.finish_reason, reply.token_ids, reply.turn) == ("cancelled", [], None)
        assert list(waiting) == []
        assert (chats[1].turns, chats[1].unanswered) == ((), "Wait")
        running.close()
        asked = chats[1].unanswered
        assert chats[1].send(asked, **GREEDY).text == chats[2].send("Wait", **GREEDY).text
        assert chats[1].unanswered is None


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_prompt_that_is_too_long(engine):
    chat = engine.session(settings=GREEDY)
    chat.send("One")
    ids = chat.token_ids
    with pytest.raises(lmchat.ContextFull, match="expected less than"):
        chat.send("word " * 5000)
    with pytest.raises(lmchat.ContextFull):
        chat.send("Two", max_new_tokens=5000)
    assert chat.token_ids == ids
    assert chat.send("Two").finish_reason in ("stop", "length")


@pytest.mark.parametrize("text", [None, 3, b"x", "\ud800"])
def test_what_is_no_text(engine, text):
    chat = engine.session(settings=GREEDY)
    with pytest.raises(lmchat.InvalidRequest):
        chat.send(text)
    assert chat.turns == ()
    assert chat.state is State.IDLE
    chat.send("One")


def test_a_template_that_fails_later(tmp_path, device):
    template = CHATML + "{% if messages|length > 2 %}{{ raise_exception('no more') }}{% endif %}"
    folder = chat_model(tmp_path, template=template)
    with lmchat.ChatEngine(folder, device=device, cache_memory="32MiB") as engine:
        chat = engine.session(settings=GREEDY)
        one = chat.send("One")
        with pytest.raises(lmchat.InvalidRequest, match="no more"):
            chat.send("Two")
        assert chat.token_ids == by_hand(("One", one))
        chat.retry()


def test_a_template_that_never_ends(tmp_path, device):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages|length > 2 %}" + endless + "{% endif %}" + CHATML
    folder = chat_model(tmp_path, template=template)
    with lmchat.ChatEngine(folder, device=device, cache_memory="32MiB") as engine:
        chat = engine.session(settings=GREEDY)
        chat.send("One")
        with pytest.raises(lmchat.InvalidRequest, match="template"):
            chat.send("Two")
        assert len(chat.turns) == 2
        chat.retry()


def test_without_a_template_text_continues(tmp_path, device):
    folder = chat_model(tmp_path, template=None)
    with lmchat.ChatEngine(folder, device=device, cache_memory="32MiB") as engine:
        with pytest.raises(lmchat.InvalidRequest, match="system"):
            engine.session(system="x")
        chat = engine.session(settings={**GREEDY, "ignore_eos": True})
        encode = engine.tokenizer.encode
        one = chat.send("Once upon")
        two = chat.send(" a time")
        assert chat.token_ids == [
            *encode("Once upon"), *one.token_ids, *encode(" a time"), *two.token_ids
        ]  # fmt: skip


# --- the state machine and the tree --------------------------------------------------------------


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_only_the_listed_state_changes_are_allowed(old, new):
    if new in MOVES[old]:
        assert move(old, new) is new
    else:
        with pytest.raises(lmchat.InternalError, match=f"from {old} to {new}"):
            move(old, new)


def test_states_of_a_turn(engine, monkeypatch):
    seen = []
    chat = engine.session()
    activity, moved = chat._activity, chat._activity.moved
    monkeypatch.setattr(activity, "moved", lambda state: (seen.append(state), moved(state)))
    chat.send("One", **GREEDY)
    assert seen == [State.PREFILL, State.DECODE]
    assert chat.state is State.IDLE


def test_the_tree_spells_transcripts():
    tree = TurnTree.of(
        [
            Turn(1, None, "user", "a", {}, (1, 2, 3), 0, 3),
            Turn(2, 1, "assistant", "b", {}, (4, 5), 3, 5),
            Turn(3, 2, "user", "c", {}, (6,), 4, 5),  # drops the 5
        ]
    )
    assert tree.token_ids(2) == [1, 2, 3, 4, 5]
    assert tree.token_ids(3) == [1, 2, 3, 4, 6]
    assert tree.newest_leaf(1).id == 3
    with pytest.raises(lmchat.NotFound, match="no turn 9"):
        tree.get(9)


def test_retry_after_the_template_was_switched_asks_again(tmp_path, device):
    template = "{{ '<|im_start|>' if loud else '' }}" + CHATML
    folder = chat_model(tmp_path, template=template)
    with lmchat.ChatEngine(folder, device=device, cache_memory="32MiB") as engine:
        chat = engine.session(settings=GREEDY)
        chat.send("One")
        chat.set_variables(loud=True)
        chat.retry()
        start = engine.tokenizer.special_texts["<|im_start|>"]
        assert chat.token_ids[:2] == [start, start]
        assert [b.turn.text for b in chat.branches(0)] == ["One", "One"]
        chat.retry()
        assert len(chat.branches(0)) == 3
        assert chat.turns[0] == chat.branches(0)[1].turn
