"""Where the system refuses another thread, work goes on with fewer, or words say what lacks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from command import ENVIRONMENT, LMCHAT
from serving.serving_process import serving

from lmchat.aio.threads import Threads
from lmchat.cli.chat.repl import Repl
from lmchat.errors import InternalError, InvalidRequest
from lmchat.server.errors import error_object, log_failure, status_of
from lmchat.text.tokenizer import _start_pool
from turbomind.config.limits import TASKS, explain_limits, shortage

GROUPS = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]  # version 1, version 2


@contextlib.contextmanager
def tasks_limited(monkeypatch: pytest.MonkeyPatch, most: int) -> Iterator[None]:
    """Has the system refuse every thread after `most` more."""
    start, left = threading.Thread.start, [most]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        yield


def test_calls_go_on_with_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(8, "test")
    with tasks_limited(monkeypatch, 2):
        threads.start_threads(2)

        async def calls() -> list[int]:
            return list(await asyncio.gather(*(threads.run(lambda k=k: k) for k in range(20))))

        assert asyncio.run(calls()) == list(range(20))
    threads.close()


def test_a_start_without_its_threads_says_how_many_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for most in (0, 1, 3):
        threads = Threads(8, "test")
        with tasks_limited(monkeypatch, most), pytest.raises(InternalError) as refused:
            threads.start_threads(4)
        assert f"lmchat needs {TASKS} besides those of `threads`" in str(refused.value)
        threads.close()


def test_a_call_without_any_thread_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(8, "test")
    with tasks_limited(monkeypatch, 0), pytest.raises(InternalError, match="another thread for a"):
        asyncio.run(threads.run(int))
    threads.close()


def test_a_chat_goes_on_after_a_reply_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = SimpleNamespace(name="x", turns=(), overflow="drop", unanswered=None)
    engine: Any = SimpleNamespace(max_context=100)
    repl = Repl(engine, session, name="x", plain=True, private=True)
    with repl.interrupts, tasks_limited(monkeypatch, 0):
        repl._prefetch()
        assert repl.handle("Hi") is None
    assert "the system refuses another thread for a reply" in "".join(capsys.readouterr())


def test_requests_that_lack_threads_or_files_can_be_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare: list[Exception] = [RuntimeError("can't start new thread"), OSError(24, "Too many")]
    for error in bare:
        with pytest.raises(InternalError) as explained, explain_limits("it"):
            raise error
        for one in (error, explained.value):
            assert shortage(one) == str(one)
            assert status_of(one) == 503
            assert error_object(one)["error"]["code"] == "out_of_resources"
            log_failure("it", one)
            assert str(one) in caplog.text  # the operator needs it at every level
    assert status_of(RuntimeError("a bug")) == 500
    for text in ("can't start new thread", "Too many open files"):  # a client's own words
        assert status_of(InvalidRequest(f"model is {text!r}, expected another")) == 400


def test_a_tokenizer_works_without_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")

    class Panic(BaseException):
        pass

    class Backend:
        error = Panic("not initialized: ThreadPoolBuildError { kind: IOError }")

        def decode_batch(self, _ids: list[list[int]]) -> list[str]:
            raise self.error

    _start_pool(Backend())  # type: ignore[arg-type]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    Backend.error = Panic("something else")
    with pytest.raises(Panic):
        _start_pool(Backend())  # type: ignore[arg-type]


def test_a_ready_server_has_the_threads_that_are_named() -> None:
    with serving("--threads", "2") as (process, url):
        tasks = len(os.listdir(f"/proc/{process.pid}/task"))
        for path in ("/metrics", "/v1/models"):
            assert httpx.get(url + path).status_code == 200
        assert httpx.post(url + "/v1/sessions", json={}).status_code == 201
        assert tasks <= len(os.listdir(f"/proc/{process.pid}/task")) <= 2 + TASKS


@pytest.fixture(name="group")
def made_group() -> Iterator[Path]:
    """A control group that limits tasks."""
    for parent in GROUPS:
        group = parent / f"lmchat-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / "pids.max").exists():
                break
            group.rmdir()
    else:
        pytest.skip("needs the right to make a control group that limits tasks")
    yield group
    group.rmdir()


def under(group: Path, most: int) -> list[str]:
    """Returns the start of a command line that runs under a limit."""
    (group / "pids.max").write_text(f"{most}\n")
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@pytest.mark.parametrize("most", [1, 6, 10])
def test_a_limit_that_is_too_low_is_refused_in_one_line(group: Path, most: int) -> None:
    done = subprocess.run(
        [*under(group, most), *LMCHAT, "serve", "--port", "0", "--threads", "1"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout) == (1, "")
    line = rf"lmchat: the system refuses another thread.* allows {most} tasks .* needs {TASKS} .*\n"
    assert re.fullmatch(line, done.stderr)


def test_a_server_answers_all_under_the_limit_that_is_named(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("command.LMCHAT", [*under(group, 1 + TASKS), *LMCHAT])
    with serving("--threads", "1") as (_, url), ThreadPoolExecutor(24) as clients:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}

        def ask(_: int) -> int:
            return httpx.post(url + "/v1/chat/completions", json=body, timeout=60).status_code

        assert set(clients.map(ask, range(24))) == {200}
        assert httpx.get(url + "/health").status_code == 200
