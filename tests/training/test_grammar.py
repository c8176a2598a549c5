"""The grammar that memo is trained on: its files, its chats, and its held-out values."""

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from training.grammar import Composer, casual, is_held_out
from training.grammar.casual import casually
from training.grammar.recall import kinds, yours
from training.grammar.several import talk
from training.grammar.systems import draw_system
from training.grammar.values import CLOSED, Values, classes, words_of
from training.grammar.wordings import (
    TEXT,
    choose,
    fill,
    read_sections,
    slots_of,
    with_article,
)


def all_text(chat):
    return "\n".join(message["content"] for message in chat.messages)


def has(text, value):
    return re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text.casefold()) is not None


def test_every_class_of_value_that_a_kind_names_can_be_sampled():
    drawn = Values(random.Random(1))
    for kind in kinds():
        words = kind.slots.get(kind.value, {})
        named = words.values() if isinstance(words, dict) and words else [kind.value]
        named = [*named, *(w[1:] for w in kind.slots.values() if isinstance(w, str))]
        for name in named:
            assert drawn.draw(name), kind.name


def test_lines_that_state_a_value_have_it_and_questions_do_not_give_it_away():
    for kind in kinds():
        for part in ("tell", "fix", "answer"):
            for line in kind.parts[part]:
                assert "v" in slots_of(line), (kind.name, part, line)
        for part in ("ask", "unknown"):
            for line in kind.parts[part]:
                assert not {"v", "old"} & slots_of(line), (kind.name, part, line)


def test_every_kind_has_many_wordings():
    assert len(kinds()) > 150
    for kind in kinds():
        assert len(kind.parts["tell"]) >= 10, kind.name
        assert len(kind.parts["ask"]) >= 10, kind.name


def test_chats_have_no_slot_or_choice_left_and_ascii():
    composer = Composer(3)
    for _ in range(1500):
        for message in composer.chat().messages:
            text = message["content"]
            assert not re.search(r"[{}\[\]|]", text), text
            assert text.strip()
            # Users leave a space in place of a value.
            assert message["role"] == "user" or (text == text.strip() and "  " not in text), text
            assert text.isascii(), text


def test_roles_take_turns_and_a_system_prompt_stands_in_front():
    composer = Composer(4)
    for _ in range(1000):
        roles = [message["role"] for message in composer.chat().messages]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


def test_several_facts_of_one_message_are_asked_for():
    for held_out in (False, True):
        composer = Composer(11, held_out=held_out)
        found = Counter()
        for _ in range(600):
            chat = composer.several()
            for check in chat.checks:
                found[check.kind] += 1
                before = [m["content"] for m in chat.messages[: check.index] if m["role"] == "user"]
                assert has(before[-1 - check.distance], check.value)
                assert has(chat.messages[check.index]["content"], yours(check.value))
        assert len(found) > 40


def test_a_talk_recalls_only_values_stated_in_it():
    values = Values(random.Random(12))
    checks = [
        (chat, check)
        for chat in (talk(values, values.rng) for _ in range(500))
        for check in chat.checks
    ]
    assert len(checks) > 200
    for chat, check in checks:
        assert any(has(m["content"], check.value) for m in chat.messages[: check.index - 1])


@pytest.mark.parametrize(("held_out", "quizzes"), [(False, 0.0), (True, 0.0), (False, 0.8)])
def test_checked_answers_contain_a_value_stated_before(held_out, quizzes):
    composer = Composer(5, held_out=held_out, quizzes=quizzes)
    checks = 0
    for _ in range(800):
        chat = composer.chat()
        for check in chat.checks:
            assert has(chat.messages[check.index]["content"], yours(check.value))
            asked = chat.messages[check.index - 1]["content"]
            told = "\n".join(m["content"] for m in chat.messages[: check.index - 1])
            assert has(told, check.value)
            assert not has(asked, check.value), asked
            checks += 1
    assert checks > 800


def test_a_fact_is_asked_for_at_the_requested_distance():
    composer = Composer(6, held_out=True)
    for number in range(300):
        distance, corrected = number % 6 + 1, number % 2 == 0
        chat = composer.remembered(distance, corrected=corrected)
        check = chat.checks[-1]
        users = [m["content"] for m in chat.messages if m["role"] == "user"]
        assert check.index == len(chat.messages) - 1
        assert check.distance == distance
        assert has(users[-1 - distance], check.value)
        assert bool(check.stale) == corrected
        assert not any(has(chat.messages[-1]["content"], value) for value in check.stale)


def test_held_out_values_never_occur_in_training_chats(monkeypatch):
    monkeypatch.setattr(casual, "_slip", lambda line, rng: line)
    training = Composer(7, quizzes=0.5)
    words = {word for _ in range(10_000) for word in words_of(all_text(training.chat()))}
    assert not [word for word in words if is_held_out(word)]
    held = Composer(8, held_out=True)
    values = [held.remembered(number % 6 + 1).checks[-1].value for number in range(600)]
    # The rest are of classes that are too small.
    assert sum(not words.issuperset(words_of(value)) for value in values) > 500


def test_every_open_class_has_values_on_both_sides_of_the_split():
    training, held = Values(random.Random(1)), Values(random.Random(1), held_out=True)
    for name in set(classes()) - CLOSED:
        for _ in range(40):
            assert any(map(is_held_out, words_of(held.draw(name)))), name
            assert not any(map(is_held_out, words_of(training.draw(name)))), name


def test_equal_seeds_give_equal_chats_in_every_process():
    program = (
        "import hashlib, json; from training.grammar import Composer; c = Composer(9);"
        "print(hashlib.sha256(json.dumps([c.chat().messages for _ in range(300)]).encode())"
        ".hexdigest())"
    )
    composer = Composer(9)
    here = json.dumps([composer.chat().messages for _ in range(300)]).encode()
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            cwd=TEXT.parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_an_unknown_class_of_value_is_named_in_the_error():
    with pytest.raises(KeyError, match="'shoe'"):
        Values(random.Random(1)).draw("shoe")


def test_system_prompts_shape_the_replies():
    composer = Composer(10)
    seen = Counter()
    for _ in range(2000):
        chat = composer.chat()
        if chat.messages[0]["role"] != "system":
            continue
        replies = [m["content"] for m in chat.messages if m["role"] == "assistant"]
        seen["upper"] += all(reply == reply.upper() for reply in replies)
        seen["lower"] += all(reply == reply.lower() for reply in replies)
        seen["stated"] += any(has(chat.messages[0]["content"], c.value) for c in chat.checks)
    assert min(seen.values()) > 15


def test_system_prompts_state_what_they_are_asked_for():
    values = Values(random.Random(2), held_out=True)
    for _ in range(300):
        system = draw_system(values, values.rng, rules=("named", "user_named", "fact", "role"))
        asked = system.question(values.rng)
        assert asked is not None
        assert has(system.text, asked[2])
        assert has(asked[1], asked[2])


def test_alternatives_slots_and_articles():
    rng = random.Random(1)
    lines = {choose("[a|b|] cat[, {v}|]", rng) for _ in range(100)}
    assert lines == {"a cat", "b cat", "cat", "a cat, {v}", "b cat, {v}", "cat, {v}"}
    assert fill("{a:v} and {w}", {"v": "engineer", "w": "Bo"}) == "an engineer and Bo"
    for value in ("unicorn", "university teacher", "one-pot meal", "nurse"):
        assert with_article(value) == f"a {value}"
    for value in ("umbrella", "Irish setter", "owl"):
        assert with_article(value) == f"an {value}"


def test_a_casual_line_has_unchanged_slots():
    rng = random.Random(3)
    for _ in range(2000):
        line = casually("My {R} is called {v}, you see.", rng, asks=False)
        assert slots_of(line) == {"R", "v"}


@pytest.mark.parametrize("text", ["no section\n", "-- tell\nI am {v}.\n"])
def test_a_line_outside_of_a_section_is_named(tmp_path, text):
    (tmp_path / "facts.txt").write_text(text)
    with pytest.raises(ValueError, match=r"facts.txt:1: expected"):
        read_sections(tmp_path / "facts.txt")
