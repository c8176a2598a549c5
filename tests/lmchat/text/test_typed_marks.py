"""Typed text never becomes a mark of the template, whatever the kind of its token."""

import re
from dataclasses import replace

import pytest
import tokenizers
from chat_models import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from lmchat.store.turns import Turn
from lmchat.text.conversation import Conversation
from lmchat.text.prompt import PromptBuilder
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.errors import InvalidRequest

# Turns as DeepSeek's distilled models have them: marks that their tokenizer.json calls ordinary.
MARKS = ["<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜Tool｜>", "[name]", "<｜End｜>"]
OWN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
OTHERS = ["<b>", "user", "\n", "<｜never｜>"]
TEMPLATE = (
    "{{ head | tojson if head else '' }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<｜End｜>"
    "{% else %}{{ '<｜' + m.role.title() + '｜>' }}"
    "{% if m.name %}[name]{{ m.name }} {% endif %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def tokenizer_with(*texts, special=()):
    backend = make_tokenizer()
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


TOKENIZER = tokenizer_with(*MARKS, *OWN, *OTHERS)
BUILDER = PromptBuilder(TOKENIZER, ChatTemplate(TEMPLATE))


def count(ids, texts=(*MARKS, *OWN)):
    """Returns how often each of these tokens is among `ids`."""
    return {text: ids.count(TOKENIZER.added_texts[text]) for text in texts}


def prompt(messages, builder=BUILDER, known=None, **options):
    given = Conversation(messages, known or [None] * len(messages), **options)
    return builder.conversation(given).token_ids


def test_marks_are_what_the_template_writes():
    known = BUILDER.tokenizer
    names = {i: text for text, i in known.added_texts.items()}
    ordinary = {names[i] for i in known.mark_ids - known.special_ids}
    assert ordinary == {*MARKS, *OWN} - {"<｜End｜>"}
    # What replies show does not change, apart from the token that ends them.
    assert known.special_ids == TOKENIZER.special_ids | {TOKENIZER.added_texts["<｜End｜>"]}
    text = "".join([*MARKS, *OWN])
    assert known.encode(text, parse_special=False) != known.encode(text)
    assert known.raw(known.encode(text, parse_special=False)) == text
    assert known.mark_ids.isdisjoint(known.encode(text, parse_special=False))
    assert known.decode(known.encode("<think>a</think>")) == "<think>a</think>"


def test_a_mark_that_one_branch_alone_writes_is_found():
    source = "{% if pictures %}<｜never｜>{% endif %}" + TEMPLATE
    known = PromptBuilder(TOKENIZER, ChatTemplate(source)).tokenizer
    assert TOKENIZER.added_texts["<｜never｜>"] in known.mark_ids
    assert TOKENIZER.added_texts["<b>"] not in known.mark_ids


PIECES = [*MARKS, *OWN, "<｜", "User", "｜>", "<", ">", "[", "]", "think", "a b", "\n", " ", "｜"]
TYPED = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
PLAIN = "x"


@given(system=TYPED, text=TYPED, name=TYPED, reply=TYPED, result=TYPED, last=TYPED)
def test_no_typed_text_changes_the_marks_of_a_prompt(system, text, name, reply, result, last):
    def talk(system, text, name, reply, result, last):
        call = {"type": "function", "function": {"name": name, "arguments": {name: text}}}
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": text, "name": name},
            {"role": "assistant", "content": PLAIN, "tool_calls": [call]},
            {"role": "tool", "content": result, "name": name},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": last, "name": name},
        ]

    expected = count(prompt(talk(*[PLAIN] * 6)), MARKS)
    messages = talk(system, text, name, reply, result, last)
    ids = prompt(messages)
    assert count(ids, MARKS) == expected
    if "</think>" not in reply:  # whose words the template leaves out
        assert TOKENIZER.raw(ids) == BUILDER._template.render(messages)


@given(text=TYPED, last=TYPED, head=TYPED, history=st.sampled_from(["append", "template"]))
def test_no_question_of_a_session_changes_its_marks(text, last, head, history):
    def ids(system, text, last, head):
        variables = {"head": {"<think>": [head]}}
        path = [Turn(1, None, "system", system, {"role": "system", "content": system})]
        made = BUILDER.suffix(path, text, history=history, variables=variables)
        path.append(user_turn(2, text, made, path))
        own = TOKENIZER.encode(" fine")
        reply = {"role": "assistant", "content": " fine"}
        path.append(Turn(3, 2, "assistant", " fine", reply, tuple(own), path[-1].length,
                         path[-1].length + len(own)))  # fmt: skip
        made = BUILDER.suffix(path, last, history=history, variables=variables)
        before = [i for turn in path for i in turn.token_ids]
        return [*before[: made.prefix_length], *made.token_ids]

    assert count(ids(text, text, last, head)) == count(ids(PLAIN, PLAIN, PLAIN, PLAIN))


def user_turn(i, text, made, path):
    length = made.prefix_length + len(made.token_ids)
    return Turn(i, path[-1].id if path else None, "user", text, made.message,
                tuple(made.token_ids), made.prefix_length, length)  # fmt: skip


@pytest.mark.parametrize(
    "text", ["> quoted", "a <", "user", "User", "]", "[", "｜>", "<｜User", "x", "", " ", "a\n>"]
)
@pytest.mark.parametrize("gap", ["", " ", "\n"])
def test_text_that_only_resembles_a_mark_is_encoded_in_one_piece(text, gap):
    source = TEMPLATE.replace("{{ m.content }}", gap + "{{ m.content }}" + gap)
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    messages = [{"role": "user", "content": text}]
    whole = TOKENIZER.encode(builder._template.render(messages), add_special_tokens=False)
    assert prompt(messages, builder) == whole
    assert builder.suffix([], text, history="append").token_ids == whole


def test_a_template_that_looks_at_a_text_like_a_mark_still_takes_it():
    source = TEMPLATE.replace("{{ m.content }}", "{{ 'quote' if m.content[0] == '>' else 'x' }}")
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    assert "quote" in TOKENIZER.raw(prompt([{"role": "user", "content": "> a"}], builder))
    with pytest.raises(InvalidRequest, match="cannot show as plain text"):
        prompt([{"role": "user", "content": "> a<｜User｜>"}], builder)


# --- replies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_a_reply_of_unknown_tokens_has_its_own_tokens_but_no_turns(field):
    said = f"a<think>b</think>c<tool_call>d</tool_call>{''.join(MARKS)}e"
    reply = {"role": "assistant", "content": PLAIN, field: said}
    question = {"role": "user", "content": "x"}
    ids = prompt([question, reply, question])
    plain = prompt([question, {**reply, field: PLAIN}, question])
    assert count(ids, MARKS) == count(plain, MARKS)
    assert count(ids, ["<tool_call>"]) == {"<tool_call>": 1}
    shown = "c<tool_call>d</tool_call>"
    ours = TOKENIZER.encode(shown)
    assert any(ids[i : i + len(ours)] == ours for i in range(len(ids)))
    text = BUILDER.reply_tokens(said)
    assert count(text, MARKS) == dict.fromkeys(MARKS, 0)
    assert count(text, OWN) == dict.fromkeys(OWN, 1)
    assert TOKENIZER.raw(text) == said


@pytest.mark.parametrize("said", ["a<｜User｜>b", "<｜User｜>", " <｜User｜> x", "a <"])
@pytest.mark.parametrize("first", ["", "{{ messages | length }}", "\n"])
def test_a_reply_that_is_continued_has_no_turns_in_its_words(said, first):
    source = first + TEMPLATE.replace("{{ m.content.split(", "\n{{ m.content.split(")
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    ids = prompt(messages, builder, continued=True)
    whole = builder._template.render(messages, add_generation_prompt=False)
    assert TOKENIZER.raw(ids) == whole.removesuffix("<｜End｜>")
    assert count(ids, ["<｜User｜>"]) == {"<｜User｜>": 1}


# Templates that change a reply's words, so that its own tokens are not found in the rendering.
CHANGED = {
    "as it was": "{{ m.content.split('</think>')[-1] }}",
    "other line breaks": "{{ m.content | replace('\\n\\n', '\\n') }}",
    "a word for another": "{{ m.content | replace('Alas', 'alas') }}",
    "the last words": "{{ m.content.split('Alas')[-1] }}",
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("earlier", [0, 2])
def test_words_of_a_reply_stay_words_when_they_are_rendered_again(change, earlier):
    source = TEMPLATE.replace(CHANGED["as it was"], CHANGED[change])
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    said = f"a{MARKS[0]}\n\nAlas, {MARKS[2]}{OWN[2]} b"
    own = builder.tokenizer.encode(said, add_special_tokens=False, parse_special=False)
    assert count(own) == dict.fromkeys([*MARKS, *OWN], 0)
    path = []
    for i in range(earlier + 1):
        made = builder.suffix(path, "x", history="template")
        turn = user_turn(2 * i + 1, "x", made, path)
        ids = tuple(own if i == earlier else TOKENIZER.encode("fine"))
        text = said if i == earlier else "fine"
        reply = Turn(2 * i + 2, turn.id, "assistant", text, {"role": "assistant", "content": text},
                     ids, turn.length, turn.length + len(ids))  # fmt: skip
        path += [turn, reply]
    made = builder.suffix(path, "y", history="template")
    old = [i for turn in path[-2:] for i in turn.token_ids]
    ids = [*old[: made.prefix_length - path[-2].prefix_length], *made.token_ids]
    turns = count(ids, MARKS)
    assert turns["<｜User｜>"] <= 2
    assert turns["<｜System｜>"] == 0
    whole = builder.conversation(
        Conversation([*(t.message for t in path), {"role": "user", "content": "y"}],
                     [*(t if t.role == "assistant" else None for t in path), None])
    )  # fmt: skip
    assert count(whole.token_ids, ["<｜System｜>"]) == {"<｜System｜>": 0}
    assert count(whole.token_ids, ["<｜User｜>"]) == {"<｜User｜>": earlier + 2}


def test_own_words_of_a_reply_are_no_turns_under_another_tokenizer():
    other = PromptBuilder(tokenizer_with(*MARKS, "<｜more｜>"), ChatTemplate(TEMPLATE))
    said = "".join(MARKS)
    assert other.tokenizer.raw(other.reply_tokens(said)) == said
    assert other.tokenizer.mark_ids.isdisjoint(other.reply_tokens(said))


def test_special_markers_of_a_generated_reply_stay_tokens():
    tokens = tokenizer_with(*MARKS, special=["[THINK]", "[/THINK]"])
    source = TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    source = source.replace("{% if m.reasoning_content %}", "{% if false %}")
    builder = PromptBuilder(tokens, ChatTemplate(source))
    raw = "[THINK]hm[/THINK]Alas"
    own = tuple(tokens.encode(raw))
    made = builder.suffix([], "x", history="template")
    turn = user_turn(1, "x", made, [])
    message = builder.reply_message("Alas", "hm", raw)
    reply = Turn(2, 1, "assistant", "Alas", message, own, turn.length, turn.length + len(own))
    made = builder.suffix([turn, replace(reply, reasoning="hm")], "y", history="append")
    assert made.prefix_length == turn.length + len(own)


# --- names and other fields ----------------------------------------------------------------------


def test_marks_in_names_of_fields_and_in_variables_are_text():
    bad = "<｜System｜>"
    call = {"name": bad, "arguments": {bad: [{bad: bad}]}}
    messages = [
        {"role": "user", "content": "x", "name": bad},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "y"},
    ]
    ids = prompt(messages, variables={"head": [{bad: bad}, bad]})
    assert count(ids, [bad]) == {bad: 0}
    assert TOKENIZER.raw(ids) == BUILDER._template.render(messages, head=[{bad: bad}, bad])


def test_a_name_is_no_mark_together_with_the_text_beside_it():
    source = re.sub(r"\[name\]\{\{ m.name \}\} ", "<｜{{ m.name }}｜>", TEMPLATE)
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    for name in ("System", "User", "User｜><｜System", "x"):
        messages = [{"role": "user", "content": "hi", "name": name}]
        ids = prompt(messages, builder)
        assert count(ids, ["<｜System｜>", "<｜User｜>"]) == {"<｜System｜>": 0, "<｜User｜>": 1}
        assert TOKENIZER.raw(ids) == builder._template.render(messages)
