"""`lmchat serve` as a process."""

import contextlib
import re
import subprocess

import command
import httpx


@contextlib.contextmanager
def serving(*arguments):
    """Yields a running process and its URL."""
    process = subprocess.Popen(
        [*command.LMCHAT, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command.ENVIRONMENT,
    )
    try:
        first = process.stdout.readline()
        found = re.search(r"at (\S+)$", first)
        assert found, first + process.stderr.read()
        assert "curl" in process.stdout.readline()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def poll_ready(url):
    """Returns the first answer of /ready that is not 200."""
    while (answer := httpx.get(url + "/ready")).status_code == 200:
        pass
    return answer
