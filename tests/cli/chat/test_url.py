"""`lmchat chat --url`: one question over a server, the choice of its sessions, refused options."""

import json
import signal
import subprocess

import pytest
from assets import ROOT
from chat_models import chat_model
from chat_terminal import ChatUser
from command import ENVIRONMENT, LMCHAT, lmchat
from http_server import RunningServer
from terminal import Terminal

from lmchat.server import ServerConfig

LENGTH = ["--max-new-tokens", "12"]
GREEDY = ["--temperature", "0", *LENGTH]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("models") / "tiny", context=100_000))


@pytest.fixture(scope="module")
def server(model):
    with RunningServer(model=model, threads=1, cache_memory="32MiB") as running:
        yield running


def ask(server, *arguments, env=None):
    return lmchat("chat", "--url", server.url, *arguments, env=ENVIRONMENT | (env or {}))


def test_one_answer_is_that_of_an_engine_here(server, model):
    here = lmchat("chat", model, "--no-store", "-p", "hello", *GREEDY)
    there = ask(server, "-p", "hello", *GREEDY)
    assert (there.stdout, there.returncode) == (here.stdout, 0)
    found = json.loads(ask(server, "-p", "hello", "--json", *GREEDY).stdout)
    assert found["text"] + "\n" == there.stdout
    assert found["usage"]["completion_tokens"] == 12


def test_an_answer_leaves_nothing_on_the_server(server, model):
    engine = server.engine.sync
    before = [one.name for one in engine.sessions(hidden=True)]
    asked = ["-p", "hello", "--json", "--system", "Be kind.", "--seed", "7", "--temperature", "1"]
    one, two = (
        json.loads(done.stdout)
        for done in (lmchat("chat", model, *asked, *LENGTH), ask(server, *asked, *LENGTH))
    )
    assert one["token_ids"] == two["token_ids"]
    assert one["session"] is two["session"] is None
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]
    assert [one.name for one in engine.sessions(hidden=True)] == before
    for option, value in (("--history", "append"), ("--overflow", "drop")):
        refused = ask(server, "-p", "x", option, value)
        assert refused.returncode == 2
        assert f"{option} is given, but this answer is not stored, expected" in refused.stderr
    assert ask(server, "-p", "x", "--no-think").returncode == 2  # the template has no switch


def test_ctrl_c_stops_an_answer_that_is_not_stored(server):
    engine = server.engine.sync
    before = [one.name for one in engine.sessions(hidden=True)]
    process = subprocess.Popen(
        [*LMCHAT, "chat", "--url", server.url, "-p", "go on", "--set", "ignore_eos=on"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert engine.queue_stats().running == 0
    assert [one.name for one in engine.sessions(hidden=True)] == before


def test_a_session_goes_on_and_the_last_one_continues(server):
    first = ask(server, "--session", "trip", "-p", "hello", "--json", *GREEDY)
    second = ask(server, "--continue", "-p", "and now?", "--json", *GREEDY)
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    assert two["session"] == one["session"] == "trip"
    assert two["usage"]["cached_tokens"] >= one["usage"]["prompt_tokens"]
    chat = server.engine.sync.session("trip")
    assert [turn.text for turn in chat.turns if turn.role == "user"] == ["hello", "and now?"]
    refused = ask(server, "--session", "trip", "--history", "template", "-p", "x")
    assert refused.returncode == 2
    assert "expected 'append', which session 'trip' has" in refused.stderr


def test_ctrl_c_stops_the_answer_on_the_server(server):
    chat = server.engine.sync.session("stopped", settings={"ignore_eos": True})
    process = subprocess.Popen(
        [*LMCHAT, "chat", "--url", server.url, "--session", "stopped", "-p", "go on"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert chat.running is None
    assert chat.turns[-1].finish_reason == "cancelled"
    assert out.decode()[:-1] in chat.turns[-1].text


def test_save_and_the_greeting_name_the_server(server, tmp_path):
    command = [*LMCHAT, "chat", "--url", server.url, *GREEDY]
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(tmp_path)}
    with Terminal(command, columns=200, env=env) as terminal:
        terminal.wait("tiny answers")
        user = ChatUser(terminal)
        user.type("hello", "new + ")
        shown = user.type("/save", "Not needed: ")
        assert f"{server.url} stores every message" in shown.replace("\n", "")
        assert f"lmchat chat --url {server.url} --session chat-" in shown.replace("\n", " ")
        user.leave()


def test_the_key_comes_from_the_option_or_the_environment(model):
    config = ServerConfig(keys={"the-right-key": "ann"})
    with RunningServer(config, model, threads=1, cache_memory="32MiB") as server:
        question = ["-p", "hello", *GREEDY]
        assert ask(server, *question, "--api-key", "the-right-key").returncode == 0
        for value in ("the-right-key", "ann:the-right-key"):
            given = ask(server, *question, env={"LMCHAT_API_KEY": value})
            assert given.returncode == 0, given.stderr
        refused = ask(server, *question, "--api-key", "a-wrong-key")
        assert refused.returncode == 2
        assert "the server refused the request" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memo", "--url", "http://127.0.0.1:9"], "the server has the model"),
        (["--url", "http://127.0.0.1:9", "--threads", "1"], "--url and --threads are given"),
        (["--url", "http://127.0.0.1:9", "--no-store"], "the server stores its sessions"),
        (["--api-key", "the-right-key"], "--api-key is given without --url"),
        (["--url", "ftp://h"], "url is 'ftp://h'"),
    ],
)
def test_options_that_a_server_decides_are_refused(arguments, words):
    done = lmchat("chat", *arguments, "-p", "x")
    assert done.returncode == 2
    assert words in done.stderr


def test_a_server_that_is_absent_is_named():
    done = lmchat("chat", "--url", "http://127.0.0.1:9", "-p", "x", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "Unreachable"
    assert "no answer from http://127.0.0.1:9" in done.stderr
