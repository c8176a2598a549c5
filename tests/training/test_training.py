"""Training memo: its model beside transformers, its data, and the continuation of stopped runs."""

import json
import lzma
import random

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaForCausalLM

from training import corpora, data, tokenizer, train
from training.grammar import Composer
from training.model import Memo, Shape, _Attention, save

SOLUTION = {"role": "assistant", "content": "It is 2."}
TINY = Shape(vocabulary=512, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=48)


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    """Returns a folder with a few dialogues under the names of all corpora."""
    folder = tmp_path_factory.mktemp("dialogues")
    composer = Composer(1)
    for corpus in corpora.CORPORA:
        with lzma.open(folder / corpus.file, "wt", encoding="utf-8") as lines:
            for number in range(120):
                row = {"id": f"{corpus.name}-{number}", "messages": composer.chat().messages}
                lines.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def words(dialogues):
    texts = [m["content"] for chat in corpora.read_all(dialogues) for m in chat]
    return tokenizer.train(texts, vocabulary=512)


@pytest.mark.parametrize(("batch", "length"), [(3, 300), (70, 128), (1, 700)])
def test_attention_and_its_gradients_are_those_of_torch(batch, length):
    torch.manual_seed(1)
    q = torch.randn(batch, 4, length, 16, requires_grad=True)
    k = torch.randn(batch, 2, length, 16, requires_grad=True)
    v = torch.randn(batch, 2, length, 16, requires_grad=True)
    grad = torch.randn(batch, 4, length, 16)
    ours = _Attention.apply(q, k, v, 0.25)
    theirs = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for one, two in zip(
        torch.autograd.grad(ours, (q, k, v), grad),
        torch.autograd.grad(theirs, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4)


def test_a_saved_model_is_the_same_in_transformers(tmp_path):
    torch.manual_seed(2)
    model = Memo(TINY)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p + 0.1 * torch.randn_like(p)).bfloat16())
    save(dict(model.named_parameters()), TINY, tmp_path, bos_token_id=0, eos_token_id=4)
    other = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 512, (2, 50))
    with torch.no_grad():
        ours = functional.linear(model(tokens), model.model.embed_tokens.weight)
        theirs = other(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_loss_counts_each_next_token_by_its_weight():
    torch.manual_seed(3)
    model = Memo(TINY)
    tokens = torch.randint(0, 512, (3, 20))
    weights = torch.randint(0, 3, (3, 20)).float()
    total, count = model.loss(tokens, weights)
    logits = functional.linear(model(tokens), model.model.embed_tokens.weight).log_softmax(-1)
    expected = sum(
        -weights[row, at] * logits[row, at, tokens[row, at + 1]]
        for row in range(3)
        for at in range(19)
    )
    torch.testing.assert_close(total, expected)
    assert count == weights[:, :-1].sum()


def test_only_replies_of_the_grammar_count_and_values_of_facts_by_themselves(words):
    chat = Composer(2).remembered(2)
    phase = data.Phase(0, real=0.0, answers=2.0, values=7.0, quizzes=0.0)
    (sample,) = data.tokens_of([data.composed(chat, phase)], words, 2048)
    shown = words.encode(tokenizer.render(chat.messages)).tokens
    message, heavy = -1, []
    for at, (token, weight) in enumerate(zip(shown, sample.weights, strict=True)):
        if token in tokenizer.SPECIAL[1:4]:
            message += 1
        speaks = token not in ("<|begin|>", "<|end|>")
        reply = chat.messages[message]["role"] == "assistant"
        fact = message in [check.index for check in chat.checks]
        if weight == 7.0:
            assert fact
            heavy.append(sample.ids[at + 1])
        else:
            assert weight == (speaks and reply) * (2 if fact else 1)
    assert words.decode(heavy).strip() == chat.checks[-1].value


def test_all_of_a_real_dialogue_counts_and_it_is_cut_at_the_context(words):
    chat = Composer(2).remembered(4)
    (sample,) = data.tokens_of([data.real(chat.messages)], words, 30)
    assert len(sample.ids) == 30
    assert sample.weights == [1.0] * 30


def test_batches_hold_every_sample_once_and_are_padded_without_weight(words):
    composer = Composer(3)
    samples = data.tokens_of(
        [data.composed(composer.chat(), data._PHASES[0]) for _ in range(200)], words, 2048
    )
    samples.sort(key=lambda sample: len(sample.ids))
    batches = list(data._batches(samples, 2048))
    rows = [row for tokens, each in batches for row in zip(tokens, each, strict=True)]
    assert len(rows) == 200
    for (ids, weights), sample in zip(rows, samples, strict=True):
        assert ids[: len(sample.ids)].tolist() == sample.ids
        assert weights[: len(sample.ids)].tolist() == sample.weights
        assert not weights[len(sample.ids) :].any()
    assert all(ids.numel() <= 2048 or len(ids) == 1 for ids, _ in batches)


def test_one_dialogue_in_about_fifty_is_held_out_and_none_is_on_both_sides(dialogues):
    for corpus in corpora.CORPORA:
        kept = [str(chat) for chat in corpora.read(dialogues, corpus)]
        held = [str(chat) for chat in corpora.read(dialogues, corpus, held_out=True)]
        assert not set(kept) & set(held)
        assert 110 < len(kept) + len(held) <= 120  # a few contain topics that are not trained on
        assert 0 <= len(held) <= 12


def test_identity_questions_are_answered_as_memo(tmp_path):
    corpus = next(c for c in corpora.CORPORA if c.name == "fastchat_dummy_identity")
    message = "I'm Vicuna, trained by researchers from Large Model Systems Organization (LMSYS)."
    row = {"id": "identity_1", "messages": [{"role": "assistant", "content": message}]}
    with lzma.open(tmp_path / corpus.file, "wt") as lines:
        lines.write(json.dumps(row) + "\n")
    (chat,) = corpora.read(tmp_path, corpus)
    assert chat[0]["content"] == "I'm memo, trained by the lmchat project."


def written(folder, corpus, rows):
    with lzma.open(folder / corpus.file, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return [corpora.read(folder, corpus, held_out=held) for held in (False, True)]


def turn(asked, reply):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]


def test_jokes_on_distress_are_not_trained_on(tmp_path):
    corpus = next(c for c in corpora.CORPORA if c.name == "microsoft_personality_chat")
    rows = [{"id": f"a-{n}", "messages": turn("I am lonely", "Haha")} for n in range(200)]
    rows += [{"id": f"b-{n}", "messages": turn("I am a cat", "Haha")} for n in range(200)]
    kept, held = written(tmp_path, corpus, rows)
    assert {chat[0]["content"] for chat in kept} == {"I am a cat"}
    assert {chat[0]["content"] for chat in held} == {"I am a cat", "I am lonely"}


def test_most_dialogues_between_people_have_a_system_prompt(tmp_path):
    corpus = next(c for c in corpora.CORPORA if c.name == "self_dialogue_corpus")
    message = turn("Seen any good movies?", "No.")
    rows = [{"id": f"s-{n}", "topic": "rap_hiphop", "messages": message} for n in range(500)]
    kept, held = written(tmp_path, corpus, rows)
    prompted = [chat for chat in kept if chat[0]["role"] == "system"]
    assert 0.5 < len(prompted) / len(kept) < 0.7
    assert all("rap hiphop" in chat[0]["content"] and chat[1:] == message for chat in prompted)
    assert all(chat == message for chat in held)


def test_most_math_problems_are_refused_but_none_that_is_held_out(tmp_path):
    corpus = next(c for c in corpora.CORPORA if c.name == "gsm8k_train")
    rows = [
        {"id": f"gsm-{number}", "messages": [{"role": "user", "content": "1 + 1?"}, SOLUTION]}
        for number in range(500)
    ]
    kept, held = written(tmp_path, corpus, rows)
    refused = [chat for chat in kept if chat[1] != SOLUTION]
    assert 0.5 < len(refused) / len(kept) < 0.7
    assert len({chat[1]["content"] for chat in refused}) == 5
    assert all(chat[1] == SOLUTION for chat in held)


def test_a_name_has_the_same_tokens_wherever_it_occurs(words):
    rng = random.Random(4)
    for _ in range(50):
        name = "".join(rng.choices("abdeiklmnorstuvz", k=6)).capitalize()
        alone = words.encode(name).tokens
        for text in (f"It is {name}.", f'"{name}"', f"{name} came", f"<|user|>{name}<|end|>"):
            tokens = words.encode(text).tokens
            assert any(tokens[at : at + len(alone)] == alone for at in range(len(tokens))), text


def test_the_tokenizer_decodes_any_text_it_encoded(words):
    for text in ("I'm 42, and I message: no!", "naïve Füße 東京 🙂\n\n  x", "7F2K-48", " a  b "):
        assert words.decode(words.encode(text).ids) == text


def test_a_stopped_run_ends_like_an_uninterrupted_one(dialogues, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", 4096)
    monkeypatch.setattr(train, "_TOKENIZER_CHATS", 200)
    monkeypatch.setattr(train, "_LOG_EVERY", 1)
    sizes = {"shape": Shape(4096, 32, 2, 4, 2, 16, 48), "steps": 8, "batch_tokens": 1024}
    train.run(dialogues, tmp_path / "one", **sizes)
    train.run(dialogues, tmp_path / "two", **sizes, until=6)
    assert not (tmp_path / "two" / "model").exists()
    with pytest.raises(ValueError, match="batch_tokens: the run has 1024, saw 2048"):
        train.run(dialogues, tmp_path / "two", **{**sizes, "batch_tokens": 2048})
    with pytest.raises(ValueError, match="steps: the rate falls for 8 already, saw 10"):
        train.run(dialogues, tmp_path / "two", **{**sizes, "steps": 10})
    train.run(dialogues, tmp_path / "two", **sizes)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"):
        one, two = (tmp_path / run / "model" / name for run in ("one", "two"))
        assert one.read_bytes() == two.read_bytes(), name
    logs = [(tmp_path / run / "loss.jsonl").read_text().splitlines() for run in ("one", "two")]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_a_run_after_another_starts_with_its_weights(dialogues, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", 4096)
    monkeypatch.setattr(train, "_TOKENIZER_CHATS", 200)
    monkeypatch.setattr(train, "_LOG_EVERY", 1)
    sizes = {"shape": Shape(4096, 32, 2, 4, 2, 16, 48), "steps": 8, "batch_tokens": 1024}
    first, second = tmp_path / "first", tmp_path / "second"
    train.run(dialogues, first, **sizes)
    train.run(dialogues, second, **sizes, behind=first / "model", until=3)
    train.run(dialogues, second, **sizes, behind=first / "model")
    kept = [(run / "model" / "tokenizer.json").read_bytes() for run in (first, second)]
    assert kept[0] == kept[1]
    log = [json.loads(line) for line in (second / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 9))
    trainer, weights = (
        train.Trainer(sizes["shape"], 8),
        load_file(first / "model/model.safetensors"),
    )
    trainer.begin_with(weights)
    trainer.begin_with(weights)
    assert all(value.equal(weights[name].float()) for name, value in trainer.masters.items())
    other = {**sizes, "shape": Shape(4096, 64, 2, 4, 2, 16, 48)}
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight: \[4096, 32\], expected \[4096, 64\]"
    ):
        train.run(dialogues, tmp_path / "third", **other, behind=first / "model")


def test_log_lines_after_the_saved_state_are_written_again(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (20, 40, 60)]
    (tmp_path / "loss.jsonl").write_text("\n".join(lines) + "\n")
    train._log(tmp_path / "loss.jsonl", 40).close()
    assert (tmp_path / "loss.jsonl").read_text().splitlines() == lines[:2]
