"""Forked children: an inherited engine refuses every call, one that is made there works."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import asyncio, os, sys, lmchat
SHORT = dict(max_new_tokens=3)
OPTIONS = dict(threads=1, cache_memory="32MiB", device="cpu")
engine = lmchat.ChatEngine(store=sys.argv[1], **OPTIONS)
session = engine.session("a")
session.send("Hi", **SHORT)
unstarted = lmchat.AsyncChatEngine(store=sys.argv[1] + "/other", **OPTIONS)
stream = session.stream("Tell", max_new_tokens=300, ignore_eos=True)
next(iter(stream))
generation = session.running
follower = session.follow()

def call(name):
    if name == "own":
        with lmchat.ChatEngine(store=sys.argv[1], **OPTIONS) as own:
            return own.session("own").send("x", **SHORT)
    if name == "unstarted":
        async def answer():
            async with unstarted as started:
                return await (await started.session("a")).send("x", **SHORT)
        return asyncio.run(answer())
    if name == "with":
        with engine:
            pass
    return eval(name)

CALLS = '''engine.session("n")
engine.session("a")
engine.sessions()
engine.generate("x", max_new_tokens=2)
engine.chat([{"role": "user", "content": "x"}])
engine.score("x y")
engine.stats()
engine.model
engine.close()
session.send("x")
session.stream("x")
session.turns
session.stop()
session.fork()
session.set(temperature=0)
session.export(sys.argv[1] + "/x.zip")
session.close()
next(iter(stream))
stream.result()
stream.close()
next(iter(follower))
generation.cancel()
with
own
unstarted'''.splitlines()
for name in CALLS:
    pid = os.fork()
    if pid == 0:
        try:
            found = type(call(name)).__name__
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        assert isinstance(engine, lmchat.ChatEngine) and repr(session)
        os.write(1, f"{name}|{found}\\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
stream.close()
print("parent|" + session.send("Still?", **SHORT).finish_reason, flush=True)
engine.close()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each call gave in a child of its own."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path_factory.mktemp("store"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split("|", 1) for line in done.stdout.splitlines())


def test_every_call_of_what_is_inherited_says_so(outcomes):
    inherited = {k: v for k, v in outcomes.items() if k not in ("own", "unstarted", "parent")}
    assert len(inherited) == 23
    refused = "EngineClosed: the process was forked: its parent has the engine"
    assert [k for k, v in inherited.items() if not v.startswith(refused)] == []


def test_an_engine_that_is_made_in_the_child_works(outcomes):
    assert outcomes["own"] == "Reply"
    assert outcomes["unstarted"] == "Reply"  # it was constructed before the fork, and has no thread


def test_the_parent_goes_on(outcomes):
    assert outcomes["parent"] in ("stop", "length")


@pytest.mark.parametrize(
    "code",
    [
        "e = lmchat.ChatEngine(**o); e.session('a').send('Hi', max_new_tokens=3)",
        "s = lmchat.ChatEngine(**o).session('a'); s.send('Hi', max_new_tokens=3)",
        "e = lmchat.ChatEngine(**o); next(iter(e.session('a').stream('Hi', max_new_tokens=99)))",
        "e = lmchat.ChatEngine(**o); s = e.session('a')\n"
        "atexit.register(lambda: s.send('Bye', max_new_tokens=3))",
    ],
)
def test_a_program_that_never_closes_ends_in_silence(code, tmp_path):
    options = "o = dict(store=sys.argv[1], threads=1, cache_memory='32MiB', device='cpu')"
    program = f"import atexit, sys, lmchat\n{options}\n{code}\n"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
