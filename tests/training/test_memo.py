"""memo, the model that ships: its weights here and in transformers, and its recall."""

import json
from concurrent.futures import ThreadPoolExecutor

import devices
import pytest
import torch
from assets import asset
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

import lmchat
from training.evaluation.matching import loops, remembers
from training.grammar import Composer
from training.tokenizer import CHAT_TEMPLATE, render

TOLD = ["My name is Zorvin.", "I have a cat called Blip.", "My sister lives in Norwick."]


@pytest.fixture(scope="module")
def folder():
    return lmchat.bundled_model()


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine(store="memory", **devices.EXACT) as opened:
        yield opened


def users(chat):
    return [m["content"] for m in chat.messages if m["role"] == "user"]


def ask(session, *messages):
    """Returns the reply to the last of `messages`."""
    for message in messages:
        reply = session.send(message, temperature=0.0, max_new_tokens=80)
    return reply.text


def test_memo_is_small_and_of_the_documented_family(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 2048
    with safe_open(folder / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) <= 7_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16 << 20


@pytest.mark.cpu_only("transformers computes in float32")
def test_greedy_tokens_are_those_of_transformers(folder, engine):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    composer = Composer(11, held_out=True)
    for number in range(24):
        messages = composer.remembered(number % 6 + 1, corrected=number % 3 == 0).messages[:-1]
        text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = words(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)
        reply = engine.generate(prompt, temperature=0.0, max_new_tokens=60)
        assert list(reply.token_ids) == out[0, len(prompt) :].tolist()


def test_the_template_only_appends_and_equals_that_of_the_training(folder, engine):
    words = AutoTokenizer.from_pretrained(folder)
    assert words.chat_template == CHAT_TEMPLATE
    messages = Composer(12).recall(6).messages
    for count in range(1, len(messages) + 1):
        shown = words.apply_chat_template(messages[:count], tokenize=False)
        assert shown == render(messages[:count])
    assert engine.template_info.kind == "append"


@pytest.mark.parametrize(
    ("corrected", "goal"), [(False, 0.65), (True, 0.6)], ids=["told", "corrected"]
)
def test_memo_recalls_facts_with_held_out_values(engine, corrected, goal):
    composer = Composer(13, held_out=True)
    chats = [composer.remembered(number % 6 + 1, corrected=corrected) for number in range(72)]

    def right(chat):
        with engine.session() as session:
            reply = ask(session, *users(chat))
        check = chat.checks[-1]
        return remembers(reply, check.value, check.stale)

    with ThreadPoolExecutor(8) as pool:  # that share their steps
        assert sum(pool.map(right, chats)) >= goal * 72


def test_a_session_reacts_to_its_history(engine):
    session = engine.session()
    assert "Zorvin" in ask(session, *TOLD, "What's my name?")
    assert "Blip" in ask(session, "What is my cat's name?")
    other = session.fork(at=1)
    assert "Blip" not in ask(other, "What is my cat's name?")
    assert "Zorvin" in ask(other, "What's my name?")
    ask(session, "Sorry, my name is actually Brelda, not Zorvin.")
    assert "Brelda" in ask(session, "What's my name?")
    session.undo()
    session.undo()
    assert "Zorvin" in ask(session, "What's my name?")


def test_a_system_prompt_changes_the_reply(engine):
    session = engine.session(system="Your name is Rosie.")
    assert "Rosie" in ask(session, "What's your name?")
    loud = engine.session(system="Answer in capital letters.")
    reply = ask(loud, "Hello!")
    assert reply == reply.upper()


@pytest.mark.parametrize(
    "message",
    [
        "Hi",
        " ",
        "?",
        "asdf qwer zxcv",
        "Tell me a story about a fox.",
        "Count to ten",
        "Was ist die Hauptstadt von Frankreich?",
        "東京",
        "What's your favorite movie and why?",
    ],
)
def test_replies_to_any_message_end_without_loops(engine, message):
    with engine.session() as session:
        reply = session.send(message, temperature=0.0, max_new_tokens=256)
    assert reply.finish_reason == "stop"
    assert not loops(reply.text)
    assert "\ufffd" not in reply.text


def test_the_script_makes_the_same_tokenizer(folder, tmp_path):
    from training.train import make_tokenizer

    made = make_tokenizer(asset("dialogues"))
    assert made.to_str(pretty=True) + "\n" == (folder / "tokenizer.json").read_text("utf-8")
