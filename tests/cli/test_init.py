"""The command as process 1 of a container: signals, and processes whose parent has ended."""

import signal
import subprocess

import command
import pytest

NAMESPACE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]


@pytest.fixture
def as_first():
    """Starts Python code as process 1, and kills it at the end."""
    try:
        subprocess.run([*NAMESPACE, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs user and process namespaces ({error})")
    started = []

    def start(code):
        code = f"import conftest\nfrom lmchat.cli.init import run_in_child\n{code}"
        line = [*NAMESPACE, command.LMCHAT[0], "-c", code]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env=command.ENVIRONMENT, **pipe))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


SEND = "import os, signal, sys, time\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_process_1_before_anything_handles_it(as_first, name):
    process = as_first(
        f"{SEND}run_in_child()\nsignal.signal(signal.{name}, signal.SIG_DFL)\n"
        f"assert os.getpid() != 1\nos.kill(1, signal.{name})\nsignal.pause()\n"
    )
    assert process.wait(60) == 128 + getattr(signal, name)


def test_a_signal_gets_to_the_handler_and_the_exit_code_out(as_first):
    process = as_first(
        f"{SEND}run_in_child()\nsignal.signal(signal.SIGHUP, lambda *_: os._exit(7))\n"
        "os.kill(1, signal.SIGHUP)\nsignal.pause()\n"
    )
    assert process.wait(60) == 7


def test_orphans_are_collected(as_first):
    process = as_first(
        f"{SEND}import pathlib, subprocess\nrun_in_child()\n"
        "shell = ['sh', '-c', 'sleep 0 & echo $!']\n"
        "orphan = int(subprocess.run(shell, stdout=-1).stdout)\n"
        "while pathlib.Path(f'/proc/{orphan}').exists(): pass\n"
    )
    assert process.wait(60) == 0


def test_elsewhere_nothing_is_forked():
    code = "import conftest, os, lmchat.cli.init as i\ndel os.fork\ni.run_in_child()\n"
    subprocess.run([command.LMCHAT[0], "-c", code], env=command.ENVIRONMENT, check=True, timeout=60)
