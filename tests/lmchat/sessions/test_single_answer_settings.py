"""Options of one question apply to its answer alone, or to the session that it begins."""

import json

import pytest
from chat_models import CHATML, chat_model
from command import ENVIRONMENT, lmchat
from stores import assert_same, stored_session

import lmchat as lmchat_api
from lmchat.errors import InvalidRequest
from lmchat.text.tokenizer import Tokenizer

OPTIONS = ["--threads", "1", "--cache-memory", "32MiB", "--max-new-tokens", "4", "--json"]
OFF = "<think>\n\n</think>\n\n"
TEMPLATE = CHATML.removesuffix("{% endif %}") + (
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "thinker", template=TEMPLATE)


@pytest.fixture
def ask(model, data_dir):
    def one(*options, session="trip"):
        env = {**ENVIRONMENT, "LMCHAT_HOME": str(data_dir)}
        return lmchat("chat", str(model), "-p", "x", "--session", session, *OPTIONS, *options,
                      env=env)  # fmt: skip

    return one


def questions(model, data_dir):
    """Returns the tokens of each question in the transcript."""
    tokenizer = Tokenizer.from_folder(str(model))
    record = stored_session(data_dir)
    path = record.tree.path(record.leaf)
    return [tokenizer.decode(turn.token_ids) for turn in path if turn.role == "user"]


def test_thinking_is_the_answers(model, data_dir, ask):
    for options in (["--think"], ["--no-think"], []):
        assert ask(*options).returncode == 0
    assert [OFF in text for text in questions(model, data_dir)] == [False, True, False]
    assert stored_session(data_dir).template_variables == {"enable_thinking": True}  # as it began


def test_thinking_is_that_of_a_session_that_begins(model, data_dir, ask):
    for options in (["--no-think"], [], ["--think"], []):
        assert ask(*options).returncode == 0
    assert [OFF in text for text in questions(model, data_dir)] == [True, True, False, True]


@pytest.mark.parametrize(
    ("option", "own", "other"), [("history", "append", "template"), ("overflow", "drop", "refuse")]
)
def test_rules_are_the_sessions(data_dir, ask, option, own, other):
    assert ask(f"--{option}", own).returncode == 0
    assert ask(f"--{option}", own).returncode == 0
    before = stored_session(data_dir)
    done = ask(f"--{option}", other)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "InvalidRequest"
    assert error["message"].startswith(
        f"--{option} is '{other}', expected '{own}', which session 'trip' has: "
    )
    assert f"lmchat chat --session trip --{option} {other}" in error["message"]
    assert_same(stored_session(data_dir), before)
    assert ask(f"--{option}", other, session="new").returncode == 0
    assert getattr(stored_session(data_dir, "new"), option) == other


def test_variables_of_one_answer_in_python(model, data_dir):
    options = {"store": data_dir, "threads": 1, "cache_memory": "32MiB"}
    short = {"max_new_tokens": 4}
    with lmchat_api.ChatEngine(model, **options) as engine:
        chat = engine.session("trip", template_variables={"enable_thinking": False})
        chat.send("One", **short)
        chat.send("Two", template_variables={"enable_thinking": None}, **short)
        with chat.stream("Three", template_variables={"enable_thinking": True}, **short) as stream:
            list(stream)
        chat.send("Four", **short)
        assert chat.template_variables == {"enable_thinking": False}
        with pytest.raises(InvalidRequest, match="template_variables is 3, expected a mapping"):
            chat.send("Five", template_variables=3)
    assert [OFF in text for text in questions(model, data_dir)] == [True, False, False, True]


def test_a_full_context_keeps_what_one_answer_is_given(tmp_path, data_dir):
    """The question is put once more after a shorter past, and as it was asked."""
    small = chat_model(tmp_path / "small", template=TEMPLATE, context=256)
    options = {"store": data_dir, "threads": 1, "cache_memory": "32MiB"}
    with lmchat_api.ChatEngine(small, **options) as engine:
        chat = engine.session("trip", overflow="drop", settings={"max_new_tokens": 8})
        for _ in range(20):
            reply = chat.send("word " * 10, template_variables={"enable_thinking": False})
            if any("the context is full" in notice for notice in reply.notices):
                break
        else:
            pytest.fail("the context never was full")
    found = questions(small, data_dir)
    assert OFF in found[-1]
    assert not any(OFF in text for text in found[:-1])  # rendered again by the session's own
