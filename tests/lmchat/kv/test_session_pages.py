"""The KV cache outlives the process: after a restart only what is new is computed, and every
reply is the one that it would have been."""

from __future__ import annotations

import random
import threading
import time

import devices
import gguf
import gguf_files
import pytest
from chat_models import chat_model
from chat_reference import Computed

import lmchat
from lmchat.store.sqlite import tables
from lmchat.store.turns import common_prefix
from turbomind import Engine, Handle

NO_END = {0: -100.0, 2: -100.0}
SETTINGS = {"temperature": 1.0, "top_k": 20, "logit_bias": NO_END}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}

OPTIONS = {"threads": 1, "cache_memory": "16MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder, device):
    with Engine(folder, device=device, **OPTIONS) as engine:
        yield engine


class Talk:
    """One session over many processes, and what its engines must have computed."""

    def __init__(self, folder, device, reference, seed):
        self.folder, self.device, self.reference = folder, device, reference
        self.rng = random.Random(seed)
        self.computed = Computed()
        self.engine = None
        self.past = []
        self.open()

    def open(self):
        self.past.append("open")
        if self.engine is not None:
            self.engine.close()
        self.engine = lmchat.ChatEngine(self.folder, device=self.device, **OPTIONS)
        self.chat = self.engine.session("trip", settings=SETTINGS)

    def text(self):
        return f"{self.rng.choice('abcdef')} " * self.rng.choice([1, 5, 40])

    def step(self):
        rng, chat = self.rng, self.chat
        verbs = ["send", "send", "stop"]
        users = sum(turn.role == "user" for turn in chat.turns)
        if users:
            verbs += ["edit", "retry", "continue", "undo", "fork"]
        verb, count = rng.choice(verbs), rng.randint(1, 30)
        if verb == "undo":
            chat.undo()
            return self.step()
        if verb == "fork":
            self.past.append((verb, chat.length))
            other = chat.fork()
            return self.check(other, lambda: other.send(self.text(), max_new_tokens=count))
        answer = {
            "send": lambda: chat.send(self.text(), max_new_tokens=count),
            "edit": lambda: chat.edit(rng.randrange(users), self.text(), max_new_tokens=count),
            "retry": lambda: chat.retry(max_new_tokens=count),
            "continue": lambda: chat.continue_(max_new_tokens=count),
            "stop": lambda: self.stopped(chat.stream(self.text(), max_new_tokens=500), count),
        }
        self.past.append((verb, chat.length))
        return self.check(chat, answer[verb], continued=verb == "continue")

    def stopped(self, stream, count):
        for _ in zip(range(count), stream, strict=False):
            pass
        self.chat.stop()
        stream.close()
        return stream.reply

    def check(self, chat, answer, continued=False):
        before = self.engine.stats().tokens_prefilled
        reply = answer()
        new = reply.usage.completion_tokens
        ids = chat.token_ids
        prompt, tokens = ids[: len(ids) - new], ids[len(ids) - new :]
        assert len(prompt) == reply.usage.prompt_tokens
        expected = self.computed.new_tokens(prompt)
        prefilled = self.engine.stats().tokens_prefilled - before
        assert reply.usage.cached_tokens == len(prompt) - prefilled
        assert prefilled == expected, (self.past, prompt, self.computed.known)
        self.computed.add(prompt, tokens)
        alone = self.reference.generate(
            prompt,
            **SETTINGS,
            continued=len(reply.token_ids) - new if continued else 0,
            seed=reply.turn.settings["seed"],
            attempt=reply.turn.settings["attempt"],
            max_new_tokens=new,
        )
        assert alone.token_ids == tokens
        return reply


@pytest.mark.parametrize("seed", range(3))
def test_only_what_is_new_is_computed(folder, device, reference, seed):
    """20 turns with stops, edits, retries, forks and restarts in between."""
    talk = Talk(folder, device, reference, seed)
    try:
        for number in range(20):
            talk.step()
            if number % 4 == 3:
                talk.open()
    finally:
        talk.engine.close()


@pytest.fixture(scope="module", params=["int4", "gguf"])
def quantized(request, folder, tmp_path_factory):
    """A model with quantized weights, and its options: quantized while it is loaded, or a file of
    Q4_K with other types where the kind Q4_K_M has them."""
    if request.param == "int4":
        return folder, {**OPTIONS, "quantize": "int4", "group_size": 32, "head": "int4"}
    path = chat_model(tmp_path_factory.mktemp("gguf"), hidden=256)
    kinds = {"attn_v": "Q6_K", "token_embd": "Q6_K", "ffn_down": "Q8_0"}

    def kind(name):
        return gguf.GGMLQuantizationType[kinds.get(name.split(".")[-2], "Q4_K")]

    tokenizer = gguf_files.byte_level(path, "gpt-2")
    return gguf_files.write_gguf(path, path / "model.gguf", kind, tokenizer=tokenizer), OPTIONS


@pytest.mark.cpu_only("a GPU refuses quantized weights")
def test_quantized_weights_reply_after_restarts_as_without_one(quantized, device):
    model, options = quantized
    loaded = 0
    with Engine(model, device=device, **options) as reference:
        assert "int4" in reference.info.weights_text
        for text in ("word " * 200, "And now?", "again " * 70, "Why?"):
            with lmchat.ChatEngine(model, device=device, **options) as engine:
                chat = engine.session("trip", settings=SETTINGS)
                reply = chat.send(text, max_new_tokens=20)
                prompt, tokens = chat.token_ids[:-20], chat.token_ids[-20:]
            seeds = {name: reply.turn.settings[name] for name in ("seed", "attempt")}
            alone = reference.generate(prompt, **SETTINGS, **seeds, max_new_tokens=20)
            assert alone.token_ids == tokens
            loaded += reply.usage.loaded_tokens
    assert loaded >= 200


def test_after_a_restart_the_past_is_loaded(folder, device):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.send("word " * 200)
        length = chat.length
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip")
        assert (chat.residence.device, chat.residence.disk) == (0, length - 1)
        assert chat.predicted_ttft() >= 0.0
        reply = chat.send("And now?")
        assert reply.notices == ()
        assert reply.usage.loaded_tokens == length - 1
        assert reply.usage.foreign_tokens == 0
        assert engine.stats().tokens_prefilled == 1 + len(chat.turns[-2].token_ids)


def test_warm_brings_it_up(folder, device):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.warm()  # nothing to bring
        chat.send("word " * 200)
        wanted = chat.length - 1
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip")
        chat.warm()
        deadline = time.monotonic() + 20
        while chat.residence.device < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert chat.residence.device == wanted
        chat.warm()
        reply = chat.send("And now?")
        assert (reply.usage.cached_tokens, reply.usage.loaded_tokens) == (wanted, 0)


def test_without_pages_it_is_computed_again(folder, device):
    options = {**OPTIONS, "persist_pages": False}
    with lmchat.ChatEngine(folder, device=device, **options) as engine:
        chat = engine.session("trip", settings=GREEDY)
        first = chat.send("One")
    with lmchat.ChatEngine(folder, device=device, **options) as engine:
        chat = engine.session("trip")
        assert chat.turns[-1].token_ids == tuple(first.token_ids)
        reply = chat.send("Two")
        assert reply.usage.cached_tokens == 0
        assert reply.notices == ()


def test_other_weights_are_noted(folder, device, tmp_path):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.send("One " * 100)
        ids = chat.token_ids
    other = chat_model(tmp_path / "other", seed=1)
    with lmchat.ChatEngine(other, device=device, **OPTIONS) as engine:
        chat = engine.session("trip")
        assert chat.token_ids == ids
        reply = chat.send("Two")
        assert reply.notices == (
            f"its KV is computed again: the model is {other}, and was {folder}",
        )
        assert reply.usage.cached_tokens == 0
        assert chat.token_ids[: len(ids)] == ids
        assert chat.send("Three").notices == ()
    with lmchat.ChatEngine(other, device=device, dtype="float16", **OPTIONS) as engine:
        [notice] = engine.session("trip").send("Four").notices
        assert notice.endswith(f"the weights of {other}, or how they are computed, have changed")


def test_another_kind_of_machine_is_noted(folder, device):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.send("One " * 100)
        length = chat.length
    options = {**OPTIONS, **devices.another_machine()}
    with lmchat.ChatEngine(folder, **options) as engine:
        reply = engine.session("trip").fork().send("Two", **GREEDY)
        assert reply.usage.foreign_tokens == reply.usage.loaded_tokens == length - 1
        [notice] = reply.notices
        assert f"{length - 1} tokens was computed by another kind of machine" in notice
    with lmchat.ChatEngine(folder, **options) as engine:
        reply = engine.session("trip").send("Two", exact=True)
        assert (reply.usage.foreign_tokens, reply.usage.cached_tokens) == (0, 0)
        assert reply.notices == ()


def test_a_deleted_session_frees_what_no_other_needs(folder, device):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.send("word " * 100)
        other = chat.fork("other")
        chat.send("Two " * 100)
        chat.edit(1, "Other " * 100)
        ids, shared = chat.token_ids, other.token_ids
        engine.core.flush_pages()
        assert engine.core.residence(ids, "local").disk == len(ids) - 1
        chat.delete()
        engine.core.flush_pages()
        engine.core.evict()
        assert engine.core.residence(ids, "local").disk <= len(shared)
        assert engine.core.residence(shared, "local").disk >= len(shared) - 1
        other.delete()
        engine.core.flush_pages()
        engine.core.evict()
        assert engine.core.residence(shared, "local").disk == 0
        disk = engine.stats().tiers["disk"]
        assert disk.pages == 0


def test_pages_of_a_session_that_no_one_has_open_stay(folder, device):
    """Those that it shares with the one that is deleted, on disk alone."""
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.send("word " * 100)
        other = chat.fork("other")
        other.send("Two " * 40)
        chat.send("Three " * 40)
        ids, branch = chat.token_ids, other.token_ids
        same = common_prefix(ids, branch)
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        pages = pages_left(engine)
        engine.delete("trip")
        assert pages_left(engine) < pages
        assert engine.core.residence(branch, "local").disk == len(branch) - 1
        assert same - 64 < engine.core.residence(ids, "local").disk <= same
        engine.delete("other")
        assert pages_left(engine) == 0


def test_to_delete_reads_no_other_session(folder, device, monkeypatch):
    """It costs what the session itself is."""
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        for number in range(5):
            engine.session(f"s{number}").send("word " * 70, **GREEDY)
        read, load = [], tables.load

        def counted(connection, row):
            read.append(row.name)
            return load(connection, row)

        monkeypatch.setattr(tables, "load", counted)
        pages = pages_left(engine)
        engine.delete("s2")
        assert read == [b"s2"]
        assert pages_left(engine) < pages  # its reply's
        for number in (0, 1, 3, 4):
            engine.delete(f"s{number}")
        assert pages_left(engine) == 0


def test_deleted_beside_a_session_of_a_larger_model(folder, device):
    with lmchat.ChatEngine("memo", device=device, cache_memory="8MiB") as engine:
        larger = engine.session("larger")
        larger.send("Hello! My dog is called Waffles.", **GREEDY)
        ids = larger.token_ids
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        assert max(ids) >= engine.core.vocab_size
        engine.session("trip").send("One", **GREEDY)
        engine.delete("trip")
        assert [found.name for found in engine.sessions()] == ["larger"]
        engine.delete("larger")
        assert engine.sessions() == []


def pages_left(engine):
    """On disk and in the engine's memory."""
    engine.core.flush_pages()
    stats = engine.stats()
    return stats.tiers["disk"].pages + stats.pages_cached + stats.pages_referenced


@pytest.mark.parametrize("by_name", [False, True])
def test_deleted_in_the_middle_of_a_reply(folder, device, by_name):
    """Nothing stays of what was generated meanwhile."""
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings={**GREEDY, "max_new_tokens": 3000})
        stream = chat.stream("word " * 100)
        for _ in zip(stream, range(150), strict=False):
            pass
        engine.delete("trip") if by_name else chat.delete()
        assert pages_left(engine) == 0


def test_a_stopped_question_is_deleted_with_its_session(folder, device):
    """Its pages are of no turn: those of a first question, and those after a reply."""
    options = OPTIONS | {"prefill_chunk": 64, "isa": "portable"}
    with lmchat.ChatEngine(folder, device=device, **options) as engine:
        for questions in (["word " * 600], ["word " * 20, "other " * 600]):
            chat = engine.session("trip", settings=GREEDY)
            for text in questions[:-1]:
                chat.send(text)
            before = pages_left(engine)
            generation = chat.start_send(questions[-1])
            parts = (p for p in generation.follow().events() if isinstance(p, lmchat.Progress))
            assert next(p for p in parts if p.done > 200)
            generation.cancel()
            generation.wait()
            assert pages_left(engine) > before + 2
            chat.delete()
            assert pages_left(engine) == 0


def test_what_a_dead_process_had_generated_is_deleted(folder, device, monkeypatch):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings={**GREEDY, "max_new_tokens": 200})
        chat.send("word " * 100)
        with monkeypatch.context() as patch:  # the process dies: nothing more is acknowledged
            for name in ("finish", "change", "release"):
                patch.setattr(engine._runtime.store, name, dying)
            chat.send("Two")
            engine.close()
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        assert pages_left(engine) > 5
        engine.delete("trip")
        assert pages_left(engine) == 0


def dying(*_):
    raise lmchat.StoreError("the process is dead")


def test_deleted_while_it_is_loaded(folder, device, monkeypatch):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        engine.session("trip", settings=GREEDY).send("word " * 200)
    coming, go_on = [], threading.Event()
    warm = Handle.warm

    def slow(handle):
        warm(handle)
        coming.append(handle)
        go_on.wait(20)

    monkeypatch.setattr(Handle, "warm", slow)
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip")
        chat.warm()
        while not coming:
            time.sleep(0.001)
        chat.delete()
        with pytest.raises(lmchat.NotFound):  # transfers under way are abandoned first
            _ = coming[0].length
        go_on.set()
        assert pages_left(engine) == 0
        engine.core.check_invariants()


def test_another_process_continues_where_this_one_was(folder, device):
    with (
        lmchat.ChatEngine(folder, device=device, **OPTIONS) as one,
        lmchat.ChatEngine(folder, device=device, **OPTIONS) as two,
    ):
        chats = [one.session("trip", settings=GREEDY), two.session("trip")]
        for number in range(4):
            chat = chats[number % 2]
            before = chat._runtime.core.stats().tokens_prefilled
            deadline = time.monotonic() + 60
            while True:
                try:
                    reply = chat.send(f"{number} " + "word " * 30)
                    break
                except lmchat.SessionBusy:  # its pages are not down yet
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            new = len(chat.turns[-2].token_ids) + (number > 0)
            assert chat._runtime.core.stats().tokens_prefilled - before == new
            assert reply.usage.cached_tokens == reply.usage.prompt_tokens - new


def test_an_archive_with_its_pages(folder, device, data_dir, tmp_path):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.send("word " * 99)
        length = chat.length
        notices = []
        done = chat.export(tmp_path / "trip.zip", pages=True, notify=notices.append)
        assert (done.turns, notices) == (2, [])
        assert done.pages >= length // 64
        wanted = chat.send("Two").token_ids
    options = {**OPTIONS, "store": tmp_path / "elsewhere"}
    with lmchat.ChatEngine(folder, device=device, **options) as engine:
        chat = engine.import_(tmp_path / "trip.zip", "journey")
        assert (chat.name, chat.length) == ("journey", length)
        reply = chat.send("Two")
        assert reply.token_ids == wanted
        assert reply.usage.loaded_tokens == length - 1
        with pytest.raises(lmchat.InvalidRequest, match="taken"):
            engine.import_(tmp_path / "trip.zip", "journey")
