"""A process that ends with an open engine: it exits with 0, and persistent pages are saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import TINY
from command import ENVIRONMENT

import turbomind

OPTIONS = {"load_format": "dummy", "device": "cpu", "threads": 1, "cache_memory": "4MiB"}
PROMPT = [3 + i % 60 for i in range(100)]


@pytest.fixture(name="config")
def made_config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


def test_a_daemon_thread_that_reads_a_stream_does_not_abort_the_exit(config: Path) -> None:
    for _ in range(5):
        done = run(
            "import threading, turbomind\n"
            f"engine = turbomind.Engine({str(config)!r}, **{OPTIONS!r})\n"
            "engine.itself = engine  # never collected\n"
            "streams = [engine.stream([3, 4 + i], ignore_eos=True) for i in range(4)]\n"
            "for stream in streams:\n"
            "    threading.Thread(target=list, args=(stream,), daemon=True).start()\n"
            "import time; time.sleep(0.01)\n"
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_an_engine_that_is_not_closed_saves_persistent_pages(config: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "page_folder": str(tmp_path / "pages")}
    done = run(
        "import turbomind\n"
        f"engine = turbomind.Engine({str(config)!r}, **{options!r})\n"
        "engine.itself = engine\n"
        "handle = engine.open(persist=True)\n"
        f"handle.append({PROMPT!r})\n"
        "handle.generate(max_new_tokens=1, temperature=0).result()\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    with turbomind.Engine(config, **options) as engine:
        assert engine.residence(PROMPT).disk == len(PROMPT)


# How a forked child leaves or drops the engine of its parent, in which requests run.
WAYS = {
    "delete the engine": "del engine, handle, stream; gc.collect()",
    "close the engine": "engine.close()",
    "close the handle": "ends(handle.close)",
    "close the stream": "ends(stream.close)",
    "read the stream": "ends(lambda: list(stream))",
    "cancel the stream": "stream.cancel()",
    "open a handle": "ends(engine.open)",
    "ask for counters": "ends(engine.stats)",
    "leave the block": "ends(lambda: engine.__exit__(None, None, None))",
    "drop the stream alone": "del stream; gc.collect()",
    "exit": "sys.exit(0)",
    "exit at once": "os._exit(0)",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_ends_whatever_it_does_with_the_engine(way: str, config: Path) -> None:
    """It has none of the engine's threads; the parent's request goes on."""
    done = run(
        "import gc, os, sys, turbomind\n"
        "def ends(call):\n"
        "    try:\n"
        "        call()\n"
        "    except turbomind.EngineClosed:\n"
        "        pass\n"
        f"engine = turbomind.Engine({str(config)!r}, **{OPTIONS!r})\n"
        "handle = engine.open()\n"
        f"stream = handle.advance(0, {PROMPT!r}, max_new_tokens=150, ignore_eos=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    {WAYS[way]}\n"
        "    sys.exit(0)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "print(os.waitstatus_to_exitcode(status), len(stream.result().token_ids))\n"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0 150\n", "", 0)
