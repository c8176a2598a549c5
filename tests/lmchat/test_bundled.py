"""The model that ships: `lmchat chat` and `ChatEngine()` without a name, offline.

The content of an answer is not checked, only that there is one, and which model gave it.
"""

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from assets import ROOT
from chat_models import chat_model
from chat_terminal import check_restored, leave, send, wait_replies
from command import ENVIRONMENT, LMCHAT, lmchat
from terminal import Terminal

import lmchat as api
from lmchat import bundled
from lmchat.cli.chat.command import ABOUT_MEMO
from lmchat.errors import ModelError
from turbomind.loading.loader import describe

OFFLINE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
ENV = {**ENVIRONMENT, **OFFLINE}
GREEDY = ["--temperature", "0", "--max-new-tokens", "40"]
KEYS = "Alt-Enter new line · Ctrl-C stop · Ctrl-D leave · /help"
WITH_FOLDER = """
import sys, pathlib, conftest, lmchat.bundled
lmchat.bundled.FOLDER = pathlib.Path(sys.argv.pop(1))
from lmchat.cli.main import main
main()
"""


def quick(*arguments, text=""):
    """`lmchat` without a way to a hub."""
    return lmchat(*arguments, text=text, env=ENV)


def terminal(folder, *arguments, command=LMCHAT, **options):
    env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(folder / "data"), **OFFLINE}
    return Terminal([*command, *arguments], env=env, **options)


@pytest.fixture
def copy(tmp_path):
    """A copy of the model's folder, to damage."""
    return shutil.copytree(bundled.FOLDER, tmp_path / "memo")


@pytest.fixture(scope="module")
def greeting():
    """The greedy answer to "Hello!", from Python."""
    with api.ChatEngine() as engine:
        return engine.session().send("Hello!", temperature=0, max_new_tokens=40).text


# --- the folder ----------------------------------------------------------------------------------


def test_the_model_is_small_and_what_it_is_said_to_be():
    folder = api.bundled_model()
    assert folder == ROOT / "lmchat" / "memo" == bundled.FOLDER
    assert {path.name for path in folder.iterdir()} >= {*bundled.FILES, "README.md"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16_000_000
    info = describe(folder)
    assert info.description.architecture == "LlamaForCausalLM"
    assert info.description.tied_head
    assert info.description.max_context >= 2048
    assert all(layer.kv_heads < layer.heads for layer in info.description.layers)
    assert info.parameters <= 7_000_000
    assert info.dtype == "bfloat16"


@pytest.mark.parametrize("name", bundled.FILES)
def test_a_missing_file_is_named(copy, monkeypatch, name):
    monkeypatch.setattr(bundled, "FOLDER", copy)
    assert api.bundled_model() == copy
    (copy / name).unlink()
    with pytest.raises(ModelError) as caught:
        api.bundled_model()
    assert f"{copy} has no {name};" in str(caught.value)
    with pytest.raises(ModelError, match=name):
        api.ChatEngine()


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "FOLDER", tmp_path / "gone")
    with pytest.raises(ModelError) as caught:
        bundled.find_model(None)
    assert f"{tmp_path / 'gone'} has no {', '.join(bundled.FILES)};" in str(caught.value)


def test_which_names_mean_the_model_that_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bundled.find_model(None) == bundled.FOLDER
    assert bundled.find_model("memo") == bundled.FOLDER
    for name in ("", "./memo", "someone/memo", "Memo", tmp_path):
        assert bundled.find_model(name) == name
    (tmp_path / "memo").write_text("notes")
    assert bundled.find_model("memo") == bundled.FOLDER
    (tmp_path / "memo").unlink()
    (tmp_path / "memo").mkdir()
    assert bundled.find_model("memo") == "memo"
    assert bundled.find_model(None) == bundled.FOLDER


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(), (None,), ("memo",)])
def test_an_engine_without_a_name(given, greeting):
    with api.ChatEngine(*given, threads=2) as engine:
        assert engine.info.path == bundled.FOLDER
        assert (engine.template_info.kind, engine.template_info.system) == ("append", "yes")
        reply = engine.session().send("Hello!", temperature=0, max_new_tokens=40)
        assert (reply.text, reply.error) == (greeting, None)
        assert reply.text.strip()


def test_an_asyncio_engine_without_a_name(greeting):
    async def talk():
        async with api.AsyncChatEngine() as engine:
            chat = await engine.session()
            return (await chat.send("Hello!", temperature=0, max_new_tokens=40)).text

    assert asyncio.run(talk()) == greeting


# --- one answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "piped"),
    [(["-p", "Hello!"], ""), ([], "Hello!\n"), (["memo", "-p", "Hello!"], "")],
)
def test_one_question_without_a_name(greeting, arguments, piped):
    done = quick("chat", *arguments, *GREEDY, text=piped)
    assert (done.returncode, done.stdout, done.stderr) == (0, greeting + "\n", "")


def test_json_without_a_name(greeting):
    done = quick("chat", "--json", *GREEDY, text="Hello!")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["model"], found["text"]) == ("memo", greeting)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_terminal_after_stderr_is_told_which_model_answers(tmp_path, greeting, form):
    command = shlex.join([*LMCHAT, "chat", "-p", "Hello!", *GREEDY, *form])
    answer = tmp_path / "answer"
    shell = ["sh", "-c", f"{command} > {shlex.quote(str(answer))}"]
    with terminal(tmp_path, command=shell) as screen:
        assert screen.wait_end() == 0
        lines = screen.everything.split("\n")
    assert lines[0] == ABOUT_MEMO
    assert "context" in lines[1]  # what it took
    assert len(lines) == 2
    text = answer.read_text()
    assert (json.loads(text)["text"] if form else text.removesuffix("\n")) == greeting


def test_another_model_is_not_announced(tmp_path):
    model = str(chat_model(tmp_path / "tiny"))
    with terminal(tmp_path, "chat", model, "-p", "Hello!", *GREEDY) as screen:
        assert screen.wait_end() == 0
        assert "memo" not in screen.everything
    with terminal(tmp_path, "chat", model) as screen:
        screen.wait_prompt()
        assert screen.display[0].startswith("tiny answers · Alt-Enter")
        assert "memo" not in screen.everything
        leave(screen)


# --- the chat ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [[], ["memo"]])
def test_a_chat_without_a_name(tmp_path, name):
    with terminal(tmp_path, "chat", *name, "--temperature", "0", columns=80, rows=24) as screen:
        screen.wait_prompt()
        assert screen.text.split("\n") == [ABOUT_MEMO, KEYS, ">"]
        assert len(ABOUT_MEMO) < 80
        assert b"\x1b[2m" + ABOUT_MEMO.encode() in screen.raw  # dim
        for count in (1, 2, 3):
            send(screen, "Hello!")
            wait_replies(screen, count)
        assert screen.everything.count(ABOUT_MEMO) == 1
        assert "error" not in screen.everything
        reply, spent = screen.everything.split("> Hello!\n")[1].split(" new + 0 cached · ")
        assert len(reply.strip().split("\n")) >= 2  # the answer, and the tokens that were new
        assert "context " in spent
        leave(screen)


def test_the_line_is_wrapped_at_words_in_a_narrow_terminal(tmp_path):
    with terminal(tmp_path, "chat", columns=44, rows=24) as screen:
        screen.wait_prompt()
        command = "lmchat chat Qwen/Qwen2.5-0.5B-Instruct"
        assert screen.display[:2] == [ABOUT_MEMO.removesuffix(command).rstrip(), command]
        leave(screen)


def test_the_line_suggests_a_command_that_asks_the_hub(tmp_path):
    *_, suggested = ABOUT_MEMO.split(": ")
    done = lmchat(*shlex.split(suggested)[1:], "-p", "x", env={**ENV, "HF_HOME": str(tmp_path)})
    assert done.returncode == 2
    assert "Qwen/Qwen2.5-0.5B-Instruct is neither a folder here nor found" in done.stderr


# --- damage --------------------------------------------------------------------------------------


def damaged(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-c", WITH_FOLDER, str(folder), *arguments],
        input="",
        capture_output=True,
        encoding="utf-8",
        env=ENV,
        timeout=300,
    )


@pytest.mark.parametrize("arguments", [["chat", "-p", "x"], ["info", "memo"], ["chat", "memo"]])
def test_a_damaged_folder_is_one_line_and_exit_code_2(copy, arguments):
    (copy / "tokenizer.json").unlink()
    done = damaged(copy, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"lmchat: memo, the model that ships with lmchat, is damaged: {copy}"
    )
    assert done.stderr.count("\n") == 1


def test_a_damaged_folder_is_an_object_in_json(copy):
    (copy / "config.json").unlink()
    done = damaged(copy, "chat", "-p", "x", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "ModelError"
    assert f"{copy} has no config.json;" in error["message"]


def test_half_a_weight_file_is_told_and_leaves_the_terminal_as_it_was(tmp_path, copy):
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    command = [sys.executable, "-c", WITH_FOLDER, str(copy)]
    with terminal(tmp_path, "chat", command=command, columns=200) as screen:
        assert screen.wait_end() == 2
        assert "model.safetensors" in screen.text
        assert "Traceback" not in screen.everything
        check_restored(screen)


# --- the other commands --------------------------------------------------------------------------


def test_info_and_bench_know_its_name():
    found = json.loads(quick("info", "memo", "--json").stdout)["model"]
    assert found["path"] == str(bundled.FOLDER)
    assert found["chat"]["template"] == "append"
    small = ["--turns", "2", "--new-tokens", "8", "--reply-tokens", "4", "--repeat", "1"]
    done = quick("bench", "turns", "memo", *small, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(bundled.FOLDER)


def test_the_name_of_a_model_ends_as_it_was_typed(tmp_path, monkeypatch):
    """A link that is switched to another folder keeps its name."""
    for version in ("v1", "v2"):
        (tmp_path / "models" / version).mkdir(parents=True)
    (tmp_path / "link").symlink_to("models")
    current = tmp_path / "models" / "current"
    monkeypatch.chdir(tmp_path)
    for version in ("v1", "v2"):
        current.unlink(missing_ok=True)
        current.symlink_to(version)
        for typed in ("models/current", "./link/current/", str(current), current):
            assert bundled.name_of(typed) == str(current)
    monkeypatch.chdir(current)
    assert bundled.name_of(".") == str(tmp_path / "models" / "v2")
    assert bundled.name_of("..") == str(tmp_path / "models")
    assert bundled.name_of("Org/Model") == "Org/Model"
    assert bundled.name_of(None) == "memo"
