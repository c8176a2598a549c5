"""Takes the pictures of the chat page: `make pictures`, or python tools/pictures.py FOLDER.

It serves memo on a data directory of its own, asks it some questions in a headless Chromium, and
writes web.png (wide, light) and web-dark.png (360 pixels, dark).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHATS = (
    ("What is your name?", "Tell me a joke."),
    ("My dog is called Waffles.", "What's my dog's name?", "How are you?"),
)
PICTURES = (("web.png", (1100, 640), "light"), ("web-dark.png", (360, 640), "dark"))


def main() -> None:
    """Takes the pictures."""
    from playwright.sync_api import sync_playwright

    folder = Path(sys.argv[1])
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        command = [sys.executable, "-m", "lmchat.cli", "web", "memo", "--port", "0"]
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"LMCHAT_HOME": home},
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            root = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=program, args=root)
            _chat(browser.new_page(), url)
            last = f"{url}/?session={_sessions(browser.new_page(), url)}"
            for name, (width, height), scheme in PICTURES:
                size = {"width": width, "height": height}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(last)
                page.get_by_role("button", name="Retry").wait_for()
                page.locator("#sessions-panel small").first.wait_for(state="attached")
                page.wait_for_timeout(1000)  # the panel closes slowly
                page.screenshot(path=folder / name)
        finally:
            server.kill()
            server.wait()


def _chat(page: Any, url: str) -> None:
    """Has the chats."""
    for questions in CHATS:
        page.goto(url)
        box = page.get_by_label("Message", exact=True)
        for number, question in enumerate(questions, start=1):
            box.fill(question)
            box.press("Enter")
            page.get_by_role("group", name=f"Round {number}").wait_for(state="attached")
            page.get_by_role("button", name="Retry").wait_for()


def _sessions(page: Any, url: str) -> str:
    """Returns the id of the last session."""
    page.goto(url)
    link = page.locator("#sessions-panel a").first
    link.wait_for()
    return str(link.get_attribute("href")).partition("=")[2]


if __name__ == "__main__":
    main()
