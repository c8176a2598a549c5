"""Rounds of a conversation as messages of a Chatbot."""

from lmchat.generation.parts import Delta, Progress
from lmchat.store.turns import Turn
from lmchat.webui.views import ENDINGS, Answer, Round, messages, rounds


def turn(number, role, text, **more):
    return Turn(number, number - 1 or None, role, text, {"role": role, "content": text}, **more)


QUESTION = turn(1, "user", "a<b>")


def test_rounds_are_questions_with_their_replies():
    turns = [turn(1, "system", "Be brief."), turn(2, "user", "a"), turn(3, "assistant", "b")]
    found = rounds([*turns, turn(4, "user", "c")], 100)
    assert [(one.number, one.question.text) for one in found] == [(0, "a"), (1, "c")]
    assert found[0].answer.text == "b"
    assert found[1].answer is None


def test_a_reply_grows_by_its_parts():
    answer = Answer(is_running=True)
    answer.take([Progress(1, 2), Delta("reasoning", "hm"), Delta("text", "a"), Delta("text", "<")])
    assert (answer.reasoning, answer.text, answer.progress.done) == ("hm", "a<", 1)


def test_reasoning_folds_when_it_ends():
    def shown(answer):
        return messages(Round(0, QUESTION, answer))

    question, thinking = shown(Answer("", "hm", is_running=True))
    assert question == {"role": "user", "content": "a&lt;b>"}
    assert thinking["metadata"] == {"title": "Thinking", "status": "pending"}
    _, thought, text = shown(Answer("a", "hm", is_running=True))
    assert thought["metadata"]["status"] == "done"
    assert text == {"role": "assistant", "content": "a"}


def test_a_reply_without_text_is_shown_as_such():
    assert messages(Round(0, QUESTION, Answer(is_running=True)))[-1]["content"] == "…"
    assert messages(Round(0, QUESTION, Answer()))[-1]["content"] == "*(empty)*"
    assert len(messages(Round(0, QUESTION))) == 1


def test_an_incomplete_reply_names_what_continues_it():
    for reason in ("cancelled", "length", "interrupted", "error"):
        assert "Continue" in ENDINGS[reason]
    assert "stop" not in ENDINGS
