"""Users without a home directory: containers and services run as a number without a name."""

import json
import os
import subprocess
import sys

import pytest
from assets import ROOT
from chat_models import chat_model
from command import ENVIRONMENT
from http_server import RunningServer
from terminal import Terminal

HOMELESS = """
import pwd
def unknown(_user):
    raise KeyError("no entry in the list of users")
pwd.getpwuid = pwd.getpwnam = unknown
import conftest
from lmchat.cli.main import main
main()
"""
SHORT = ["--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("models") / "tiny"))


def environment():
    unset = ("HOME", "LMCHAT_HOME", *(name for name in os.environ if name.startswith("XDG_")))
    return {name: value for name, value in ENVIRONMENT.items() if name not in unset}


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", HOMELESS, *arguments],
        input="", capture_output=True, encoding="utf-8", env=environment(), timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "MODEL", "-p", "x", "--session", "trip", *SHORT],
        ["chat", "-p", "x", "--continue"],
        ["sessions", "list"],
        ["serve", "MODEL", "--port", "0"],
        ["deploy", "status"],
    ],
)
def test_what_is_stored_needs_a_folder_that_the_user_names(model, arguments):
    done = run(*[model if word == "MODEL" else word for word in arguments])
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no home directory for stored sessions; set LMCHAT_HOME to a folder" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_not_stored_needs_no_home(model):
    for arguments in (["-p", "x"], ["-p", "x", "--no-store"]):
        done = run("chat", model, *arguments, *SHORT)
        assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(run("info", model, "--json").stdout)
    assert report["data_directory"] is None
    missing = run("chat", "~/model", "-p", "x")
    assert (missing.returncode, missing.stderr) == (2, "lmchat: no such folder: ~/model\n")


def test_a_chat_over_a_server_has_no_history_then(model):
    with RunningServer(model=model, threads=1, cache_memory="32MiB") as server:
        line = ["env", *(f"--unset={name}" for name in ("HOME", "LMCHAT_HOME", "XDG_STATE_HOME"))]
        command = [*line, sys.executable, "-c", HOMELESS, "chat", "--url", server.url]
        with Terminal(command, env={"PYTHONPATH": str(ROOT)}) as terminal:
            terminal.wait("no input history: there is no home directory; set LMCHAT_HOME")
            terminal.wait_prompt()
            terminal.type("/save")
            terminal.key("enter")
            terminal.wait("stores every message")
            terminal.type("/export ~/talk.md")
            terminal.key("enter")
            terminal.wait("cannot be written")
            terminal.wait_prompt()
            terminal.key("ctrl-d")
            assert terminal.wait_end() == 0
