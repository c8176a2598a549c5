"""`lmchat deploy` as a process."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import command
import httpx
import pytest
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.deploy import proxy, registry
from lmchat.deploy.proxy import program
from lmchat.errors import InvalidRequest


def _missing():
    """Returns why no deployment can start here, or an empty string."""
    try:
        return program() and ""
    except InvalidRequest as error:
        return f"{error}; requirements/test.txt has it for x86-64"


needs_haproxy = pytest.mark.skipif(bool(_missing()), reason=_missing())
"""Skips a test where there is no HAProxy."""


QUESTION = {"text": "Tell me more."}
MOST = 1800
LONG = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": MOST}
"""Settings of a session whose replies are long, and always the same."""

_ANSWERED = "lmchat:e2e_request_latency_seconds_count"


class Deployment:
    """A running deployment: its process, its URL, its data directory, the headers of clients, and
    the file of its log."""

    def __init__(
        self, process: subprocess.Popen, url: str, home: Path, headers=(), log=None
    ) -> None:
        self.process, self.url, self.home, self.headers = process, url, home, dict(headers)
        self._log = log

    def log_lines(self):
        """Returns the lines that launcher, proxy and replicas have written to stderr."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode().splitlines()

    def status(self):
        """Returns the status, from the launcher's socket."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LMCHAT_HOME", str(self.home))
            return registry.status()

    def client(self):
        """Returns a client of the address."""
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=60)

    def direct(self, number):
        """Returns a client of one replica, without HAProxy."""
        transport = httpx.HTTPTransport(uds=proxy.socket_of(self.folder, number))
        url = "http://localhost"
        return httpx.Client(transport=transport, base_url=url, headers=self.headers, timeout=60)

    def answered(self):
        """Returns how many generations each replica has ended."""
        found = []
        for replica in self.status()["replicas"]:
            with self.direct(replica["replica"]) as client:
                lines = client.get("/metrics").text.splitlines()
            found += [float(line.split()[-1]) for line in lines if line.startswith(_ANSWERED)]
        return found

    def session_at(self, client, number):
        """Returns the path of a session of this replica, with one turn."""
        while True:
            before, path = self.answered(), created(client, **LONG)
            body = {"text": "Hello.", "settings": {"max_new_tokens": 1}}
            assert client.post(f"{path}/turns", json=body).status_code == 200
            if self.answered()[number - 1] > before[number - 1]:
                return path

    @property
    def folder(self):
        """The launcher's private folder."""
        return Path(json.loads((self.home / "deployment").read_text())["folder"])

    def wait(self, wanted):
        """Returns the first status for which `wanted(replicas)` is true."""
        while not wanted((found := self.status())["replicas"]):
            time.sleep(0.05)
        return found

    def stop(self, *arguments):
        """Runs `lmchat deploy stop`."""
        self._run("stop", *arguments)

    def restart(self):
        """Runs `lmchat deploy restart` and returns the lines of its output."""
        return self._run("restart").splitlines()

    def _run(self, *arguments):
        """Runs a command in this process, which is quicker than a reply."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LMCHAT_HOME", str(self.home))
            done = CliRunner().invoke(app, ["deploy", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    def lmchat(self, *arguments):
        """Runs a command on the deployment's data directory."""
        return command.lmchat(*arguments, env=command.ENVIRONMENT | {"LMCHAT_HOME": str(self.home)})


def created(client, **settings):
    """Returns the path of a new session."""
    made = client.post("/v1/sessions", json={"settings": settings})
    assert made.status_code == 201, made.text
    return f"/v1/sessions/{made.json()['id']}"


def tokens(client, path):
    """Returns the tokens of the last reply of a session, as they are stored."""
    return client.get(f"{path}?token_ids=true").json()["turns"][-1]["token_ids"]


@contextlib.contextmanager
def streaming(client, path, body=QUESTION, headers=()):
    """Yields the tokens of a reply, part by part, but those that a continued one had before."""
    body = {**body, "stream": True, "token_ids": True}
    with client.stream("POST", path, json=body, headers=dict(headers)) as answer:
        assert answer.status_code == 200, answer.read()
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        parts = (
            event["token_ids"]
            for event in events
            if event.get("kind") == "text" and not event.get("before")
        )
        yield parts


def all_ready(replicas):
    """Returns whether all replicas of a status are ready."""
    return all(replica["state"] == "ready" for replica in replicas)


@contextlib.contextmanager
def deployed(home, *arguments, model="memo", env=(), headers=()):
    """Yields a deployment of a model, all of whose replicas are ready."""
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads would block the replicas
        process = subprocess.Popen(
            [*command.LMCHAT, "deploy", str(model), "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=command.ENVIRONMENT | {"LMCHAT_HOME": str(home)} | dict(env),
        )
        try:
            first = process.stdout.readline()
            found = re.search(r"at (\S+)$", first)
            if not found:
                process.wait()
                log.seek(0)
            assert found, first + log.read()
            deployment = Deployment(process, found[1], Path(home), headers, log)
            deployment.wait(all_ready)
            yield deployment
        finally:
            process.terminate()
            process.communicate()
