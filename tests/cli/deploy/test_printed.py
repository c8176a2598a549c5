"""`lmchat deploy --print`: HAProxy and replicas run as the printed files have them."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile

import command
import httpx
import pytest
import stores
from deployment import needs_haproxy
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.deploy import printed, proxy
from lmchat.deploy.placement import Place
from lmchat.errors import Error, InvalidRequest
from lmchat.server.config import ServerConfig

DEPLOY = ("deploy", "memo", "--replicas", "2", "--threads", "1", "--log-level", "error")


class Unit:
    """A unit of systemd as a manager reads it: its lines, and what they mean for an instance."""

    def __init__(self, folder, name, instance="", runtime=""):
        texts = [folder / name, *folder.glob(f"{name.replace('@', f'@{instance}')}.d/*.conf")]
        lines = [line for text in texts for line in text.read_text().splitlines()]
        self._pairs = [line.split("=", 1) for line in lines if "=" in line]
        self._values = {"%i": instance, "%Y": str(folder), "%%": "%"}
        self.environment = {"RUNTIME_DIRECTORY": str(runtime)}
        for line in self.all("Environment"):
            (pair,) = shlex.split(self._specified(line))
            self.environment.update([pair.split("=", 1)])

    def all(self, name):
        return [value for found, value in self._pairs if found == name]

    def one(self, name):
        (value,) = self.all(name)
        return self._specified(value)

    def command(self, name):
        words = shlex.split(self.one(name).removeprefix("-"))
        return [re.sub(r"\$\$|\$\{(\w+)\}", self._variable, word) for word in words]

    def _specified(self, text):
        return re.sub("%.", lambda found: self._values[found[0]], text)

    def _variable(self, found):
        return self.environment[found[1]] if found[1] else "$"

    @contextlib.contextmanager
    def running(self):
        """Yields the process of the service."""
        process = subprocess.Popen(
            self.command("ExecStart"), env=self.environment, stdout=subprocess.DEVNULL,
            cwd=(self.all("WorkingDirectory") or ["/"])[0],
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def notifying(self):
        """Yields the process of the service once it is ready, and has said that it is alive."""
        assert self.one("Type") == "notify"
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        ):
            manager.bind(f"{folder}/notify")
            manager.settimeout(120)
            watchdog = {"WATCHDOG_USEC": f"{self.one('WatchdogSec')}000000"}
            self.environment |= {"NOTIFY_SOCKET": f"{folder}/notify", **watchdog}
            with self.running() as process:
                assert {manager.recv(100), manager.recv(100)} == {b"READY=1", b"WATCHDOG=1"}
                yield process

    def run(self, name):
        """Runs another command of the service."""
        subprocess.run(self.command(name), env=self.environment, check=True, timeout=120)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """The folder with the units of two replicas, the one of their sockets, and the URL."""
    port, folder = free_port(), tmp_path_factory.mktemp("units")
    with stores.folder() as home:
        done = command.lmchat(
            *DEPLOY, f"--port={port}", "--print=systemd",
            env=command.ENVIRONMENT | {"LMCHAT_HOME": str(home / "a % $b"), "HF_TOKEN": "secret"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "secret" not in done.stdout
        subprocess.run(["sh", "-s", folder], input=done.stdout, text=True, check=True)
        sockets = home / "sockets"
        sockets.mkdir()
        yield folder, sockets, f"http://127.0.0.1:{port}"


@needs_haproxy
def test_the_units_serve_and_a_restart_of_one_refuses_nothing(deployment):
    folder, sockets, url = deployment
    units = [Unit(folder, "lmchat@.service", n, sockets) for n in "12"]
    haproxy = Unit(folder, "lmchat-proxy.service", runtime=sockets)
    with httpx.Client(base_url=url, timeout=60) as client, contextlib.ExitStack() as stack:
        first, _ = [stack.enter_context(unit.notifying()) for unit in units]
        front = stack.enter_context(haproxy.running())
        while not (sockets / "haproxy").exists():
            assert front.poll() is None
        for unit in units:
            unit.run("ExecStartPost")  # it returns once the replica gets requests
        paths = [
            f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['id']}" for _ in range(8)
        ]

        def ask():
            body = {"text": "Hello.", "settings": {"max_new_tokens": 1}}
            return {client.post(f"{path}/turns", json=body).status_code for path in paths}

        assert ask() == {200}
        units[0].run("ExecStop")
        first.send_signal(signal.SIGTERM)
        assert ask() == {200}
        assert first.wait(60) == 0
        assert ask() == {200}
        stack.enter_context(units[0].notifying())
        units[0].run("ExecStartPost")
        assert ask() == {200}
        client.close()
        assert haproxy.one("KillSignal") == "SIGUSR1"
        front.send_signal(signal.SIGUSR1)
        assert front.wait(60) == 0


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_units(deployment):
    folder, *_ = deployment
    names = ["lmchat.target", "lmchat@1.service", "lmchat@2.service", "lmchat-proxy.service"]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], cwd=folder,
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{folder}:"}, capture_output=True, text=True,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "lmchat" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_each_replica_has_its_cores(deployment):
    folder, *_ = deployment
    found = [Unit(folder, "lmchat@.service", n).one("CPUAffinity").split() for n in "12"]
    assert set(map(int, found[0] + found[1])) <= os.sched_getaffinity(0)
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(found[0]) & set(found[1])


@needs_haproxy
@pytest.mark.parametrize("more", [(), ("--host=::1", "--web")])
def test_haproxy_accepts_its_configuration(more, tmp_path, data_dir):
    if more:
        pytest.importorskip("gradio")
    file = tmp_path / "haproxy.cfg"
    file.write_text(shown("--print=haproxy", *more))
    subprocess.run([proxy.program(), "-c", "-f", file], check=True, capture_output=True)
    assert f"bind {'[::1]' if more else '127.0.0.1'}:23333" in file.read_text()


def shown(*arguments):
    done = CliRunner().invoke(app, [*DEPLOY, *arguments])
    if done.exception:
        raise done.exception
    return done.output


def test_a_file_of_keys_is_named_and_a_key_of_the_environment_refused(
    tmp_path, monkeypatch, data_dir
):
    monkeypatch.setenv("LMCHAT_HOME", str(data_dir))
    monkeypatch.setattr(printed, "program", lambda: "/usr/sbin/haproxy")
    file = tmp_path / "keys"
    file.write_text("ann:key-of-ann-0123456789\n")
    file.chmod(0o600)
    text = shown("--print=systemd", "--host=0.0.0.0", f"--api-keys={file}")
    assert f"--api-keys={file}" in text
    assert "key-of-ann" not in text
    monkeypatch.setenv("LMCHAT_API_KEY", "ann:key-of-ann-0123456789")
    with pytest.raises(Error, match=r"\$LMCHAT_API_KEY is set, which a unit must not show"):
        shown("--print=systemd")
    assert "key-of-ann" not in shown("--print=haproxy", "--host=0.0.0.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port=0"], "--port is 0, expected 1 to 65535"),
        (["--port=65536"], "--port is 65536, expected 0 to 65535"),
        (["--host=0.0.0.0"], "which other machines can reach"),
        (["--host=no.such.host.invalid", "--insecure"], "expected an address"),
    ],
)
@pytest.mark.parametrize("kind", ["haproxy", "systemd"])
def test_what_cannot_be_printed_is_refused(kind, arguments, message, data_dir):
    with pytest.raises(Error, match=re.escape(message)):
        shown(f"--print={kind}", *arguments)


def test_another_supervisor_is_unknown():
    done = CliRunner().invoke(app, [*DEPLOY, "--print=launchd"])
    assert done.exit_code == 2
    assert "'haproxy', 'systemd'" in done.output


def test_words_pass_as_they_are_and_a_gpu_is_named(tmp_path, monkeypatch, data_dir):
    monkeypatch.setenv("LMCHAT_HOME", str(data_dir))
    monkeypatch.setattr(printed, "program", lambda: "/usr/sbin/haproxy")
    places = [Place(frozenset({n}), f"GPU {n}", str(5 + n)) for n in (0, 1)]
    model = "./a model%i \\ \"quoted\" 'it' $HOME ${RUNTIME_DIRECTORY} ; é"
    arguments = ["lmchat", "serve", model, "--limit=body=1MiB", ""]

    def printed_with(words):
        return printed.printed("systemd", places, words, "localhost", 80, ServerConfig(), "", 9.5)

    subprocess.run(["sh", "-s", tmp_path], input=printed_with(arguments), text=True, check=True)
    unit = Unit(tmp_path, "lmchat@.service", "2", "/run/lmchat")
    assert unit.command("ExecStart") == [*arguments, "--uds=/run/lmchat/replica-2"]
    assert unit.one("TimeoutStartSec") == "10"
    assert unit.environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert unit.environment["LMCHAT_HOME"] == str(data_dir)
    for wrong in ("a\nb", "a\x1b"):
        with pytest.raises(InvalidRequest, match="has control characters"):
            printed_with(["serve", wrong])
