"""Chat without a session: tokens, KV that is reused, and what ends a conversation's reuse."""

import asyncio
import threading

import pytest
from chat_models import chat_model
from chat_reference import Computed

import lmchat
from lmchat.conversations import handle_pool
from lmchat.errors import ContextFull, EngineClosed, InvalidRequest, Overloaded

QUESTIONS = (
    "Hi! I'm Mirela, and I work as a florist.",
    "My dog is called Waffles, by the way.",
    "What do bees make?",
    "What's my dog's name?",
)
GREEDY = {"temperature": 0.0, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine("memo", store="memory") as made:
        yield made


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"), context=1024)


@pytest.fixture(scope="module")
def random_engine(random_model):
    with lmchat.ChatEngine(random_model, store="memory") as made:
        yield made


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def computed(reply):
    return reply.usage.prompt_tokens - reply.usage.cached_tokens


class Client:
    """Sends the whole conversation with each question, as clients of HTTP servers do.

    It checks that each request has computed the tokens that no earlier one of it had, and no more.
    """

    def __init__(self, engine, owner, system=None):
        self.engine, self.owner = engine, owner
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.seen = Computed()

    def ask(self, text, answer=None, **settings):
        self.messages.append(user(text))
        return self.again(answer, **settings)

    def again(self, answer=None, **settings):
        prompt = self.engine.chat_token_ids(self.messages, owner=self.owner)
        reply = self.engine.chat(self.messages, owner=self.owner, **{**GREEDY, **settings})
        assert reply.usage.prompt_tokens == len(prompt)
        new = self.seen.new_tokens(prompt)
        # The engine may have computed the last token before a stop string was found.
        assert computed(reply) in ((new - 1, new) if "stop_strings" in settings else (new,))
        self.seen.add(prompt, reply.token_ids)
        self.messages.append(assistant(reply.text) if answer is None else answer(reply))
        return reply


# --- the tokens of a session, and only the new ones ----------------------------------------------


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_a_resent_conversation_is_that_of_a_session(engine, system):
    session, client = engine.session(system=system), Client(engine, f"session {system}", system)
    for text in QUESTIONS:
        expected, reply = session.send(text, **GREEDY), client.ask(text)
        assert reply.token_ids == expected.token_ids
        assert reply.text == expected.text
        assert reply.turn is None
        assert reply.usage == expected.usage
    assert [one.name for one in engine.sessions("local") if one.turns == 4].count(session.name) == 1
    session.delete()


def test_a_cold_engine_gives_the_same_replies(engine):
    client = Client(engine, "warm")
    for text in QUESTIONS:
        client.ask(text)
    with lmchat.ChatEngine("memo", store="memory") as cold:
        again = cold.chat(client.messages[:-1], **GREEDY)
        assert again.usage.cached_tokens == 0
        assert again.text == client.messages[-1]["content"]


ENDS = {
    "stop string": {"stop_strings": ["e"]},
    "stop string of several tokens": {"stop_strings": ["a flor", "in the"]},
    "length": {"max_new_tokens": 3},
    "stop token": {},
    "ignored end": {"ignore_eos": True, "max_new_tokens": 30},
}


@pytest.mark.parametrize("end", ENDS)
def test_only_new_tokens_are_computed_however_a_reply_ended(engine, random_engine, end):
    for made in (engine, random_engine):
        client = Client(made, end)
        for text in QUESTIONS:
            client.ask(text, **ENDS[end])


ANSWERS = {
    "stripped": lambda reply: assistant(reply.text.strip()),
    "padded": lambda reply: assistant(f"\n {reply.text}\n"),
    "no reasoning": lambda reply: assistant(reply.text, reasoning_content=None),
    "named": lambda reply: assistant(reply.text, name="memo"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_replies_are_recognized_however_they_come_back(random_engine, answer):
    client = Client(random_engine, answer)
    for text in QUESTIONS:
        client.ask(text, ANSWERS[answer], max_new_tokens=12)
    own = [m for m in client.messages if m["role"] == "assistant"]
    assert len(own) == 4


def test_a_cancelled_reply_and_its_prompt_are_reused(random_engine):
    client = Client(random_engine, "cancelled")
    client.messages.append(user("Plan a day in Kyoto. " * 20))
    prompt = random_engine.chat_token_ids(client.messages, owner="cancelled")
    stream = random_engine.stream_chat(
        client.messages, owner="cancelled", ignore_eos=True, temperature=0.0
    )
    next(stream)
    reply = stream.stop()
    assert reply.finish_reason == "cancelled"
    client.seen.add(prompt, reply.token_ids)
    client.messages.append(assistant(reply.text))
    client.ask("And then?", max_new_tokens=5)

    again = random_engine.chat(client.messages[:1], owner="cancelled", max_new_tokens=2)
    assert computed(again) == 1


def test_branches_of_a_conversation_compute_what_differs(random_engine):
    client = Client(random_engine, "branches")
    client.ask("Plan a day in Kyoto.", max_new_tokens=20)
    first = list(client.messages)
    client.ask("With children.", max_new_tokens=20)
    for text in ("Without children.", "In Nara.", "With cats."):
        client.messages = list(first)
        client.ask(text, max_new_tokens=8)
    client.messages = first[:1]
    client.again(max_new_tokens=8)  # the same question once more
    client.messages = [user("Plan a day in Nara.")]
    client.ask("Two users in a row.", max_new_tokens=8)


def test_two_requests_may_extend_a_conversation_at_once(random_engine):
    client = Client(random_engine, "at once")
    client.ask("Plan a day in Kyoto.", max_new_tokens=20)
    ended = threading.Barrier(3)
    replies = {}

    def ask(text):
        replies[text] = random_engine.chat(
            [*client.messages, user(text)], owner="at once", max_new_tokens=30, temperature=0.0
        )
        ended.wait(60)

    for text in ("With children.", "With cats."):
        threading.Thread(target=ask, args=(text,)).start()
    ended.wait(60)
    for text, reply in replies.items():
        messages = [*client.messages, user(text)]
        prompt = random_engine.chat_token_ids(messages, owner="at once")
        assert computed(reply) <= client.seen.new_tokens(prompt)
        alone = random_engine.generate(prompt, owner="x", max_new_tokens=30, temperature=0.0)
        assert reply.token_ids == alone.token_ids


def test_conversations_of_other_shapes_are_reused_too(tmp_path):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with lmchat.ChatEngine(chat_model(tmp_path / "m", template=template), store="memory") as made:
        client = Client(made, "shapes")
        client.messages = [{"role": "developer", "content": "Be brief."}, user("a")]
        client.ask("b", max_new_tokens=9)
        client.messages.append({"role": "tool", "content": "It rains."})
        client.again(max_new_tokens=9)
        client.messages.append({"role": "system", "content": "Be long."})
        client.ask("c", max_new_tokens=9)


def test_without_a_template_a_conversation_is_that_of_a_session(tmp_path):
    with lmchat.ChatEngine(chat_model(tmp_path / "m", template=None), store="memory") as made:
        session, client = made.session(), Client(made, "plain")
        for text in QUESTIONS:
            expected = session.send(text, max_new_tokens=7, temperature=0.0)
            reply = client.ask(text, max_new_tokens=7)
            assert (reply.text, reply.token_ids) == (expected.text, expected.token_ids)
        with pytest.raises(InvalidRequest, match="no chat template"):
            made.chat([user("a"), user("b")])


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% set c = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if m['role'] == 'assistant' and loop.last and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def test_a_reply_cut_in_its_reasoning_is_recognized_and_continued(tmp_path):
    folder = chat_model(tmp_path / "m", template=THINKING)
    with lmchat.ChatEngine(folder, store="memory") as made:
        messages = [user("Plan a day in Kyoto.")]
        first = made.chat(messages, max_new_tokens=20, temperature=0.0, ignore_eos=True)
        assert first.reasoning
        assert not first.text
        for answer in (assistant(""), assistant("", reasoning_content=first.reasoning)):
            more = [*messages, answer, user("And then?")]
            session = made.session()
            session.send(
                messages[0]["content"], max_new_tokens=20, temperature=0.0, ignore_eos=True
            )
            expected = session.send("And then?", max_new_tokens=4, temperature=0.0)
            reply = made.chat(more, max_new_tokens=4, temperature=0.0)
            assert reply.token_ids == expected.token_ids
            assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
            session.delete()


# --- replies that go on --------------------------------------------------------------------------


def test_a_final_reply_goes_on_as_if_it_had_not_ended(random_engine):
    messages = [user("Plan a day in Kyoto.")]
    settings = {"temperature": 0.0, "ignore_eos": True, "frequency_penalty": 0.7}
    whole = random_engine.chat(messages, owner="go on", max_new_tokens=24, **settings)
    part = random_engine.chat(messages, owner="go on", max_new_tokens=10, **settings)
    rest = random_engine.chat(
        [*messages, assistant(part.text)],
        owner="go on",
        max_new_tokens=14,
        continue_final_message=True,
        **settings,
    )
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert rest.text
    assert whole.text.endswith(rest.text)
    assert rest.usage.completion_tokens == 14
    assert computed(rest) == 1
    # The two parts are the known reply of the next request, also if a character was cut in two.
    more = [*messages, assistant(part.text + rest.text), user("And then?")]
    reply = random_engine.chat(more, owner="go on", max_new_tokens=4)
    assert reply.usage.cached_tokens >= whole.usage.prompt_tokens + 23


def test_a_client_may_write_the_start_of_a_reply(engine):
    messages = [
        *map(user, QUESTIONS[1:2]),
        assistant("Waffles it is, good"),
    ]
    reply = engine.chat(messages, owner="start", continue_final_message=True, **GREEDY)
    assert reply.text.startswith(" ")
    with engine.stream_chat(
        messages, owner="start", continue_final_message=True, **GREEDY
    ) as stream:
        assert "".join(stream) == reply.text


# --- what is kept --------------------------------------------------------------------------------


def test_owners_share_nothing(random_engine):
    messages = [user("Plan a day in Kyoto. " * 30)]
    for owner in ("Ada", "Bob"):
        reply = random_engine.chat(messages, owner=owner, max_new_tokens=4)
        assert reply.usage.cached_tokens == 0
        assert len(random_engine.score("Plan a day. " * 40, owner=owner)) > 100


def test_a_handle_that_the_engine_lost_is_replaced(random_engine):
    client = Client(random_engine, "lost")
    client.ask("Plan a day in Kyoto.", max_new_tokens=20)
    for held in random_engine._conversations._pool._idle.of("lost"):
        random_engine.core._core.close(held.handle._id, False)
    client.messages.append(user("With children."))
    reply = random_engine.chat(client.messages, owner="lost", max_new_tokens=4, temperature=0.0)
    prompt = random_engine.chat_token_ids(client.messages, owner="lost")
    alone = random_engine.generate(prompt, owner="x", max_new_tokens=4, temperature=0.0)
    assert reply.token_ids == alone.token_ids
    client.seen.add(prompt, reply.token_ids)
    client.messages.append(assistant(reply.text))
    client.ask("And cats.", max_new_tokens=4)


def test_handles_are_bounded_and_closed(random_model, monkeypatch):
    monkeypatch.setattr(handle_pool, "MAX_HANDLES", 8)
    with lmchat.ChatEngine(random_model, store="memory") as made:
        client = Client(made, "quiet")
        client.ask("Plan a day in Kyoto.", max_new_tokens=4)
        for i in range(40):
            made.chat([user(f"{i} question")], owner="loud", max_new_tokens=1)
            assert made.stats().handles <= 9
        client.ask("With children.", max_new_tokens=4)  # others have not evicted it


def test_without_prefix_reuse_nothing_is_kept(random_model):
    with lmchat.ChatEngine(random_model, store="memory", prefix_reuse=False) as made:
        messages = [user("Plan a day in Kyoto.")]
        for _ in range(2):
            reply = made.chat(messages, max_new_tokens=4, temperature=0.0)
            assert reply.usage.cached_tokens == 0
        assert made.stats().handles == 0
        made.chat([*messages, assistant(reply.text), user("More")], max_new_tokens=4)


def test_several_choices_are_recognized_later(random_engine):
    messages = [user("Plan a day in Kyoto. " * 12)]
    reply = random_engine.chat(
        messages, owner="n", n=3, max_new_tokens=12, temperature=1.0, seed=5, ignore_eos=True
    )
    prompt = random_engine.chat_token_ids(messages, owner="n")
    for one in (reply, *reply.others):
        ids = random_engine.chat_token_ids([*messages, assistant(one.text), user("x")], owner="n")
        assert ids[len(prompt) :][: len(one.token_ids)] == one.token_ids
    assert len(reply.others) == 2


# --- errors --------------------------------------------------------------------------------------

REFUSED = [
    ([], "messages is empty"),
    ("Hi", "messages is 'Hi', expected a list"),
    ([3], r"messages\[0\] is 3, expected a mapping"),
    ([{"content": "x"}], r"messages\[0\].role is None, expected a string"),
    ([{"role": "user"}], r"messages\[0\].content is None, expected a string"),
    ([{"role": "user", "content": ["x"]}], r"messages\[0\].content is \['x'\], expected a string"),
    ([user("x"), assistant("y")], r"messages\[1\].role is 'assistant'"),
    ([{"role": "user", "content": "x", "more": {1}}], "is a mapping with a set"),
    ([{"role": "tool" * 99, "content": "x"}], "expected system, user or assistant"),
    ([user("x" + chr(0xD800))], "expected Unicode"),
]


@pytest.mark.parametrize(("messages", "words"), REFUSED)
def test_messages_that_are_no_conversation_are_refused(engine, messages, words):
    with pytest.raises(InvalidRequest, match=words):
        engine.chat(messages, **GREEDY)


def test_options_are_checked(engine):
    with pytest.raises(InvalidRequest, match="continue_final_message is 'yes'"):
        engine.chat([user("x")], continue_final_message="yes")
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role is 'user'"):
        engine.chat([user("x")], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="unknown setting 'tools'"):
        engine.chat([user("x")], tools=[])
    with pytest.raises(InvalidRequest, match="add_generation_prompt is 3"):
        engine.chat_token_ids([user("x")], add_generation_prompt=3)
    with pytest.raises(ContextFull, match="expected less than 2048"):
        engine.chat([user("word " * 4000)])
    nested = {"role": "user", "content": "x"}
    for _ in range(100):
        nested = {"role": "user", "content": "x", "more": nested}
    with pytest.raises(InvalidRequest, match="nested up to"):
        engine.chat([nested])


def test_a_full_queue_refuses_and_leaves_no_handle_in_use(random_model):
    with lmchat.ChatEngine(random_model, store="memory", max_queue=0, max_batch_size=1) as made:
        long = made.start_chat([user("a")], owner="long", ignore_eos=True)
        client = Client(made, "refused")
        with pytest.raises(Overloaded):
            made.chat([user("b")], owner="refused")
        with pytest.raises(Overloaded):
            made.score("some text", owner="refused")
        long.cancel()
        long.wait()
        client.ask("b", max_new_tokens=4)
        client.ask("c", max_new_tokens=4)


# --- scores and asyncio --------------------------------------------------------------------------


def test_scores_wait_for_a_slot_and_can_be_cancelled(random_model):
    with lmchat.ChatEngine(random_model, store="memory", max_batch_size=1) as made:
        expected = made.score("Plan a day in Kyoto.")
        assert expected == made.core.score(made.tokenizer.encode("Plan a day in Kyoto."))
        long = made.start_chat([user("a")], ignore_eos=True)
        waiting, other = made.start_score("Plan a day in Kyoto."), made.start_score("x y z")
        assert made.waiting == 2
        other.cancel()
        with pytest.raises(EngineClosed, match="cancelled"):
            other.result()
        long.cancel()
        assert waiting.result() == expected
        with pytest.raises(InvalidRequest, match="owner"):
            made.score("x", owner=3)
        with pytest.raises(InvalidRequest, match="expected at least one token"):
            made.score([])


def test_asyncio_has_the_same_verbs(random_model):
    async def talk():
        async with lmchat.AsyncChatEngine(random_model, store="memory") as made:
            messages = [user("Plan a day in Kyoto.")]
            reply = await made.chat(messages, owner="a", **GREEDY)
            more = [*messages, assistant(reply.text), user("And then?")]
            async with made.stream_chat(more, owner="a", **GREEDY) as stream:
                text = "".join([part async for part in stream])
            assert text == stream.reply.text
            assert stream.reply.usage.cached_tokens >= reply.usage.prompt_tokens
            ids = await made.chat_token_ids(more, owner="a")
            assert len(ids) == stream.reply.usage.prompt_tokens
            assert await made.score("a day", owner="a") == made.sync.score("a day", owner="a")
            long = made.stream_chat(messages, ignore_eos=True)
            async for _ in long:
                break
            scores = asyncio.create_task(made.score("Plan a day"))
            await asyncio.sleep(0)
            scores.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scores
            await long.aclose()
            while made.sync.stats().slots:  # a score that was just starting ends when it has begun
                await asyncio.sleep(0)

    asyncio.run(talk())
