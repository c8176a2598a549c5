"""`lmchat web` as a process, a slow model for it, and pages of a headless Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command
import pytest

from lmchat import bundled
from lmchat.webui.markdown import markdown

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SLOW = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1")
"""Options of a server of `slow_model()`."""


def slow_model(path: Path) -> Path:
    """Writes the folder of a model with memo's tokenizer and random weights, whose replies take
    many seconds, and returns `path`. It is loaded with load_format="dummy"."""
    shutil.copytree(bundled.FOLDER, path, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((path / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return path


class Web:
    """A running `lmchat web`.

    Args:
        home: the data directory.
        arguments: model and options.
        port: the port; 0: any.
        verb: `serve` for a server without the page.
    """

    def __init__(self, home: Path, *arguments: object, port: int = 0, verb: str = "web") -> None:
        self.home = home
        self.process = subprocess.Popen(
            [*command.LMCHAT, verb, *map(str, arguments), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**command.ENVIRONMENT, "LMCHAT_HOME": str(home)},
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        if " at " not in first:
            raise AssertionError(first + self.process.communicate()[1])
        self.usage = self.process.stdout.readline()
        self.url = first.split()[-1]
        self.port = int(self.url.split(":")[2].partition("/")[0])

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Yields a headless Chromium. Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        options += ["--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield opened
        opened.close()


class Tab:
    """A tab of a browser that shows a page of `lmchat web`.

    Args:
        context: a browser or a context of one.
        url: the address.
        options: those of a new page.
    """

    def __init__(self, context: Any, url: str, **options: Any) -> None:
        self.page = context.new_page(**options)
        self.page.set_default_timeout(20_000)
        self.foreign: list[str] = []
        """Requests to other sites, errors of scripts, and dialogs."""
        host = url.split("/")[2]
        self.page.on("request", lambda r: self._note(r.url, host))
        self.page.on("pageerror", lambda error: self.foreign.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.foreign.append("dialog"), dialog.accept()))
        self.page.goto(url)
        self.box = self.page.get_by_label("Message", exact=True)
        self.box.wait_for()

    def _note(self, url: str, host: str) -> None:
        if not url.startswith(("data:", "blob:", f"http://{host}/")):
            self.foreign.append(url)

    def send(self, text: str) -> None:
        """Sends a message."""
        self.box.fill(text)
        self.box.press("Enter")

    def button(self, name: str) -> Any:
        """Returns the button of this name."""
        return self.page.get_by_role("button", name=name, exact=True)

    @property
    def session(self) -> str:
        """Id of the session in the address."""
        return str(self.page.url.partition("session=")[2])

    @property
    def reply(self) -> str:
        """The text of the last reply."""
        return str(self.page.locator("#last .bot-row .prose").last.inner_text()).strip()

    def wait_for_reply(self, longer_than: int = 0) -> None:
        """Waits until the last reply has more characters."""
        self.page.wait_for_function(
            "n => [...document.querySelectorAll('#last .bot-row .prose')].at(-1)"
            "?.textContent.trim().length > n",
            arg=longer_than,
        )

    def wait_for_text(self, text: str) -> None:
        """Waits until the last reply is the Markdown of a text."""
        self.page.wait_for_function(
            "text => [...document.querySelectorAll('#last [data-testid=bot]')].at(-1)"
            "?.ariaLabel.replace(/^.*?: /, '').trim() === text",
            arg=markdown(text).strip(),
        )

    def wait_for_end(self) -> None:
        """Waits until nothing runs and the last round has its buttons."""
        self.button("Retry").wait_for()
