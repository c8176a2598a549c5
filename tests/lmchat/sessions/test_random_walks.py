"""Random walks through sessions: only what is new is computed, and every reply is the one that a
request of its own gives for the same tokens."""

from __future__ import annotations

import random

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Computed, Conversation

import lmchat
from turbomind import Engine

WALKS = 200
SAMPLING = {
    "temperature": 1.0,
    "top_k": 20,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend():
    return make_tokenizer()


@pytest.fixture(scope="module")
def engine(folder, device, store_kind):
    # Without prefix reuse nothing is found but the KV of the session itself.
    options = {"threads": 2, "cache_memory": "64MiB", "prefix_reuse": False}
    with lmchat.ChatEngine(folder, device=device, **options) as engine:
        yield engine
        engine.core.check_invariants()


@pytest.fixture(scope="module")
def reference(folder, device):
    with Engine(folder, device=device, threads=2, cache_memory="64MiB") as engine:
        yield engine


class Walk:
    """One session, and what it must be."""

    def __init__(self, engine, reference, backend, rng):
        self.engine, self.reference, self.rng = engine, reference, rng
        self.system = rng.choice([None, "You are brief."])
        self.session = engine.session(system=self.system, settings=SAMPLING)
        self.conversation = Conversation(backend)
        self.rounds = []  # of the current branch: (conversation before it, text, prompt, reply ids)
        self.computed = Computed()
        self.branches = {}  # last turn -> (rounds, conversation)

    def step(self):
        verbs = [self.send]
        if self.rounds:
            verbs += [self.send, self.continue_, self.retry, self.edit, self.undo]
        if len(self.branches) > 1:
            verbs += [self.switch]
        self.rng.choice(verbs)()
        assert self.session.token_ids == self.conversation.ids
        assert self.session.length == len(self.conversation.ids)

    def text(self):
        return f"{self.rng.choice('abcdef')} {self.rng.randint(0, 9)} " * self.rng.choice(
            [1, 4, 20]
        )

    def send(self):
        text = self.text()
        self.answer(
            self.conversation, self.rounds, text, lambda **o: self.session.stream(text, **o)
        )

    def retry(self):
        base, text, *_ = self.rounds[-1]
        self.answer(base, self.rounds[:-1], text, self.session.stream_retry)

    def edit(self):
        turn, text = self.rng.randrange(len(self.rounds)), self.text()
        base = self.rounds[turn][0]
        edit = self.session.stream_edit
        self.answer(base, self.rounds[:turn], text, lambda **o: edit(turn, text, **o))

    def undo(self):
        base, text, *_ = self.rounds[-1]
        before = self.engine.stats().tokens_prefilled
        assert self.session.undo() == text
        assert self.engine.stats().tokens_prefilled == before
        self.rounds, self.conversation = self.rounds[:-1], base.copy()

    def switch(self):
        turn = self.rng.randrange(len(self.rounds) + 1)
        branches = self.session.branches(turn)
        if branches:
            self.session.switch(turn, self.rng.randrange(len(branches)))
            rounds, conversation = self.branches[self.session.turns[-1].id]
            self.rounds, self.conversation = list(rounds), conversation.copy()

    def fork(self):
        other = object.__new__(Walk)
        other.__dict__ |= self.__dict__
        other.session = self.session.fork()
        ids = self.conversation.ids
        # Of what this one has computed, the start of the branch it is on.
        other.computed = Computed([ids[: len(ids) - self.computed.missing(ids)]])
        other.branches = {}
        other.remember(self.rounds, self.conversation)
        return other

    def answer(self, base, rounds, text, start):
        conversation = base.copy()
        conversation.user(text, self.system)
        prompt, unanswered = list(conversation.ids), self.session.unanswered
        reply = self.generate(start, prompt, [])
        if not reply:  # the session is as it was
            asked = unanswered if start == self.session.stream_retry else text
            assert self.session.unanswered == asked
            return
        assert self.session.unanswered is None
        conversation.reply(reply)
        self.remember([*rounds, (base.copy(), text, prompt, reply)], conversation)

    def continue_(self):
        base, text, prompt, before = self.rounds[-1]
        ended = self.conversation.ends_with_stop or self.conversation.dropped
        prefix = before[:-1] if ended else before
        new = self.generate(self.session.stream_continue, prompt, prefix, continues=True)
        reply = [*prefix, *new] if new else before
        conversation = base.copy()
        conversation.user(text, self.system)
        conversation.reply(reply)
        self.remember([*self.rounds[:-1], (base, text, prompt, reply)], conversation)

    def remember(self, rounds, conversation):
        self.rounds, self.conversation = list(rounds), conversation.copy()
        if not self.session.turns:  # its first turn was stopped before its first token
            return
        self.branches[self.session.turns[-1].id] = (list(rounds), conversation.copy())

    def generate(self, start, prompt, before, continues=False):
        """Generates on `prompt` and the tokens `before` of a reply; returns those that came. A
        reply that `continues` a turn keeps it, also one that was no more than a stop token."""
        whole = [*prompt, *before]
        expected = self.computed.new_tokens(whole)
        at_start = self.engine.stats().tokens_prefilled
        reply = self.run(start)
        prefilled = self.engine.stats().tokens_prefilled - at_start
        new = reply.token_ids[len(before) :] if reply.usage.completion_tokens else []
        assert reply.usage.completion_tokens == len(new)
        assert reply.usage.prompt_tokens == len(whole)
        if not new:  # stopped before, while or after its prompt was computed
            assert reply.finish_reason == "cancelled"
            assert reply.token_ids[: len(before)] == before
            assert (reply.turn is not None) == continues
            assert prefilled <= expected
            self.computed.add(whole[: len(whole) - expected + prefilled], [])
            return []
        assert prefilled == expected
        assert reply.usage.cached_tokens == len(whole) - expected
        alone = self.reference.generate(
            whole,
            **SAMPLING,
            continued=len(before),
            seed=reply.turn.settings["seed"],
            attempt=reply.turn.settings["attempt"],
            max_new_tokens=len(new),
            min_new_tokens=reply.turn.settings.get("min_new_tokens", 0),
        )
        assert new == alone.token_ids
        self.computed.add(whole, new)
        return new

    def run(self, start):
        """To the end, or stopped somewhere."""
        limit = self.rng.randint(1, 12)
        kind = self.rng.choice(["whole", "whole", "stop", "drop", "early"])
        if kind == "whole":
            return start(max_new_tokens=limit).result()
        stream = start(max_new_tokens=limit + 40)
        if kind != "early":
            for _ in range(self.rng.randint(1, 6)):
                next(stream, None)
        if kind == "stop":
            self.session.stop()
        stream.close()
        return stream.reply


@pytest.mark.parametrize("seed", range(WALKS // 20))
def test_random_walks_compute_nothing_twice(engine, reference, backend, seed):
    for number in range(20):
        rng = random.Random(1000 * seed + number)
        walks = [Walk(engine, reference, backend, rng)]
        for _ in range(7):
            rng.choice(walks).step()
            if len(walks) == 1 and walks[0].rounds and rng.random() < 0.15:
                walks.append(walks[0].fork())
        for walk in walks:
            walk.session.delete()
    stats = engine.stats()
    assert (stats.handles, stats.pages_referenced) == (0, 0)
