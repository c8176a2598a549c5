"""The chat page of a deployment, in Chromium."""

import asyncio
import os
import re
import signal
import threading

import httpx
import pytest
import stores
from deployment import deployed, needs_haproxy
from web_page import SLOW, Tab, browser, slow_model

from lmchat.deploy import proxy

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")

pytestmark = needs_haproxy


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    model = slow_model(tmp_path_factory.mktemp("models") / "slow")
    with (
        stores.folder() as home,
        deployed(home, "--replicas", "2", "--web", *SLOW, model=model) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture
def tab(chromium, deployment):
    context = chromium.new_context()
    yield Tab(context, deployment.url)
    context.close()


def replica_of(tab):
    """Returns the replica that the cookie of the page names."""
    (cookie,) = tab.page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
    return int(re.fullmatch(r"r(\d)", cookie["value"])[1])


def stored(deployment, tab):
    path = f"{deployment.url}/v1/sessions/{tab.session}?details=true"
    return httpx.get(path).json()["turns"][-1]["text"]


def done(work):
    """Runs a coroutine. Playwright's loop is that of this thread."""
    thread = threading.Thread(target=asyncio.run, args=[work])
    thread.start()
    thread.join()


def test_a_tab_shows_and_stops_its_reply_while_its_replica_drains(deployment, tab):
    tab.send("Tell me")
    tab.wait_for_reply(30)
    shown, home = tab.reply, replica_of(tab)
    with tab.page.expect_event("load"):
        done(proxy.drain(proxy.admin_of(deployment.folder), home))
    tab.wait_for_reply(len(shown) + 20)
    assert replica_of(tab) == 3 - home
    tab.button("Stop").click()
    tab.page.get_by_text("Stopped. Continue resumes it").wait_for()
    assert stored(deployment, tab).startswith(shown.rstrip("\ufffd"))
    tab.wait_for_text(stored(deployment, tab))
    done(proxy.resume(proxy.admin_of(deployment.folder), home))
    done(proxy.wait_until_up(proxy.admin_of(deployment.folder), home))


def test_a_tab_goes_on_at_another_replica_when_its_own_is_killed(deployment, tab):
    tab.send("Tell me")
    tab.wait_for_reply(30)
    shown, home = tab.reply, replica_of(tab)
    os.kill(deployment.status()["replicas"][home - 1]["pid"], signal.SIGKILL)
    tab.page.get_by_text("The process ended during this reply").wait_for()
    assert replica_of(tab) == 3 - home
    assert tab.reply.startswith(shown.rstrip("\ufffd"))
    tab.button("Continue").click()
    tab.wait_for_reply(len(shown) + 20)
    tab.button("Stop").click()
    tab.wait_for_end()
    tab.wait_for_text(stored(deployment, tab))
