"""Replies of another process, which ends well, is killed, or is taken over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys

import pytest
from assets import ROOT
from chat_models import chat_model
from command import ENVIRONMENT

import lmchat

NO_END = {0: -100.0, 2: -100.0}
LONG = {"temperature": 0.0, "max_new_tokens": 400, "logit_bias": NO_END}
# Of a reply that is cut off: its process may lose the processor for a while before it stops itself.
UNENDING = {**LONG, "max_new_tokens": 3500}
CUT = {**LONG, "stop_strings": ["never said"], "max_new_tokens": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"), hidden=128)


@pytest.fixture
def engine(folder, device, data_dir):
    with lmchat.ChatEngine(folder, device=device, threads=1, cache_memory="32MiB") as engine:
        yield engine


class Writer:
    """The process of `killed_chat.py`, which generates a reply to "Tell me" in session "trip"."""

    def __init__(self, folder, data_dir, settings, shown):
        script = ROOT / "tests" / "support" / "killed_chat.py"
        arguments = [folder, data_dir, json.dumps(settings), shown, "Tell me"]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip

    def read(self, count):
        return [json.loads(self.process.stdout.readline()) for _ in range(count)]

    def end(self):
        """Returns what it wrote until it ended."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.close()
        lines = self.process.stdout.read().split("\n")[:-1]
        self.process.stdout.close()
        self.process.wait(60)
        return [json.loads(line) for line in lines]


def joined(parts):
    deltas = [part for part in parts if isinstance(part, lmchat.Delta)]
    return "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids]


@pytest.mark.parametrize("settings", [LONG, CUT])
def test_a_reply_is_followed_to_its_end(engine, folder, data_dir, settings):
    writer = Writer(folder, data_dir, settings, -1)
    shown = writer.read(1)
    followers = [engine.session("trip").follow() for _ in range(2)]
    found = [joined(follower.events()) for follower in followers]
    shown += writer.end()
    reply = followers[0].result()
    assert found == [(reply.text, reply.token_ids)] * 2
    assert (reply.finish_reason, reply.text) == ("length", "".join(shown))
    assert engine.session("trip").turns[-1] == reply.turn


def test_a_killed_writer_ends_its_followers_with_what_is_recovered(engine, folder, data_dir):
    writer = Writer(folder, data_dir, UNENDING, 70)
    shown = writer.read(1)
    chat = engine.session("trip")
    follower = chat.follow()
    parts = list(follower.events())
    shown += writer.end()
    assert writer.process.returncode == -signal.SIGKILL
    reply = follower.result()
    assert (reply.finish_reason, chat.interrupted) == ("interrupted", True)
    assert joined(parts) == (reply.text, reply.token_ids)
    assert reply.text.startswith("".join(shown))
    assert chat.turns[-1] == reply.turn
    whole = chat.continue_()
    alone = engine.session("alone").send("Tell me", **UNENDING)
    assert whole.token_ids == alone.token_ids


def test_a_writer_that_is_killed_while_followed_for_asyncio(folder, device, data_dir):
    async def run():
        async with lmchat.AsyncChatEngine(folder, device=device, threads=1) as engine:
            writer = Writer(folder, data_dir, UNENDING, -1)
            writer.read(1)
            chat = await engine.session("trip")
            follower = await chat.follow()
            text = [await anext(follower)]
            writer.process.kill()
            text += [more async for more in follower]
            writer.end()
            reply = await follower.result()
            assert reply.finish_reason == "interrupted"
            assert "".join(text) == reply.text == (await chat.turns())[-1].text

    asyncio.run(run())
