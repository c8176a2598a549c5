"""With any number of free file descriptors, opening works or raises one kind of error."""

import gc
import os
import resource
import subprocess

import process_limits
import pytest
from chat_models import chat_model
from command import ENVIRONMENT, LMCHAT

import lmchat
import turbomind
from lmchat.store.sqlite.sqlite_store import SqliteStore
from turbomind.config.limits import explain_limits
from turbomind.engine.pages import PageStore

OPTIONS = {"dtype": "float32", "threads": 1, "cache_memory": "8MiB"}
MOST = 40  # descriptors that an opening needs at most


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


def openings(model, data_dir):
    return {
        "chat": lambda: lmchat.ChatEngine(model, store=data_dir, **OPTIONS),
        "engine": lambda: turbomind.Engine(model, page_folder=data_dir / "pages", **OPTIONS),
        "store": lambda: SqliteStore(data_dir),
        "pages": lambda: PageStore(data_dir / "pages"),
    }


@pytest.mark.parametrize("what", ["chat", "engine", "store", "pages"])
def test_every_opening_reports_too_many_files_alike(model, tmp_path, what):
    make = openings(model, tmp_path / "data_dir")[what]
    make().close()  # imports and first files
    refused, opened = [], 0
    for limit in range(3, max(map(int, os.listdir("/proc/self/fd"))) + MOST):
        with process_limits.lowered(resource.RLIMIT_NOFILE, limit):
            try:
                make().close()
                opened += 1
            except Exception as error:
                refused.append((type(error), str(error)))  # the error object holds files open
        if opened == 3:
            break
    assert (opened, bool(refused)) == (3, True)
    for kind, text in refused:
        assert kind is lmchat.errors.InternalError
        assert text.startswith("too many files are open: the ")
        assert "; `ulimit -n 4096` in the shell that starts it raises that" in text
    gc.collect()
    make().close()


def test_the_command_reports_too_many_files_in_one_line(model, tmp_path):
    environment = {**ENVIRONMENT, "LMCHAT_HOME": str(tmp_path / "data_dir")}
    for arguments in (["chat", str(model), "-p", "x"], ["sessions", "list"]):
        done = subprocess.run(
            ["bash", "-c", 'ulimit -n 5; exec "$@"', "bash", *LMCHAT, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 1, done
        assert "too many files are open" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_error_that_is_its_own_cause_is_checked_once():
    first, second = OSError("one"), OSError("two")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(OSError, match="one"), explain_limits("it"):
        raise first
