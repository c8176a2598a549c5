"""Commands that serve further apps beside the server's routes, as processes."""

import contextlib
import signal
import subprocess
import sys

import command
import httpx

PROGRAM = """
from lmchat.cli.serve.command import serving
from lmchat.server import MountedApp
import typer

async def endless(scope, receive, send):
    assert scope["type"] == "http"  # it has no lifespan
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": b"begun\\n", "more_body": True}})
    while (await receive())["type"] != "http.disconnect":
        pass

async def fails(scope, receive, send):
    await receive()
    await send({{"type": "lifespan.startup.failed", "message": "no such folder"}})

def mounts(engine, config):
    return [MountedApp("/endless", fails if {fails} else endless)]

def usage(url, uds, name, needs_key):
    return f"see {{url}}/endless/"

app = typer.Typer()
app.command()(serving("Serve a stream.", mounts, usage))
app()
"""


@contextlib.contextmanager
def program(*arguments, fails=False):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(fails=fails), "memo", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command.ENVIRONMENT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_an_open_stream_of_a_mounted_app_does_not_delay_the_end():
    with program("--drain-seconds", "100000") as process:
        url = process.stdout.readline().split()[-1]
        where = process.stdout.readline().split()[-1]
        assert where == url + "/endless/"
        with httpx.stream("GET", where, timeout=60) as answer:
            assert next(answer.iter_raw()) == b"begun\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_a_mounted_app_that_cannot_start_ends_the_command_with_its_reason():
    with program(fails=True) as process:
        assert process.wait(60) != 0
        assert "a mounted app failed at startup: no such folder" in process.stderr.read()
