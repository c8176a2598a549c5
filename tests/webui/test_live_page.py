"""The chat page in Chromium: streams, stops, reloads, tabs, and turns made elsewhere."""

import httpx
import pytest
from web_page import SLOW, Tab, Web, browser, slow_model

import lmchat

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return slow_model(tmp_path_factory.mktemp("models") / "slow")


@pytest.fixture(scope="module")
def web(chromium, folder, tmp_path_factory):
    with Web(tmp_path_factory.mktemp("home"), folder, *SLOW) as running:
        yield running


@pytest.fixture
def tab(chromium, web):
    context = chromium.new_context()
    opened = Tab(context, web.url)
    yield opened
    assert opened.foreign == []
    context.close()


def stored(web, session):
    found = httpx.get(f"{web.url}/v1/sessions/{session}?details=true").json()
    return [turn["text"] for turn in found["turns"]]


def test_a_reply_streams_stops_and_continues(tab, web):
    assert tab.page.url == web.url + "/"
    tab.send("Tell me **more**")
    tab.button("Stop").wait_for()
    lengths = tab.page.evaluate(
        """() => new Promise(done => {
          const seen = new Set();
          const look = () => {
            const shown = [...document.querySelectorAll('#last .bot-row .prose')].at(-1);
            seen.add(shown?.textContent.length);
            seen.size > 6 ? done([...seen].length) : requestAnimationFrame(look);
          };
          look();
        })"""
    )
    assert lengths > 6
    assert tab.page.locator("#last .user-row strong").inner_text() == "more"
    tab.button("Stop").click()
    tab.page.get_by_text("Stopped. Continue resumes it").wait_for()
    question, reply = stored(web, tab.session)
    assert question == "Tell me **more**"
    tab.wait_for_text(reply)
    tab.button("Continue").click()
    tab.button("Stop").wait_for()
    tab.wait_for_reply(len(reply) + 20)
    tab.button("Stop").click()
    tab.wait_for_end()
    continued = stored(web, tab.session)[1]
    tab.wait_for_text(continued)
    assert continued.startswith(reply.rstrip("\ufffd"))


def test_a_reload_and_a_second_tab_show_the_running_reply(tab, web, chromium):
    tab.send("Tell me")
    tab.wait_for_reply(10)
    before = len(tab.reply)
    tab.page.reload()
    tab.wait_for_reply(before)
    second = Tab(chromium, f"{web.url}/?session={tab.session}")
    second.wait_for_reply(before)
    second.button("Stop").click()
    for one in (tab, second):
        one.page.get_by_text("Stopped. Continue resumes it").wait_for()
        one.wait_for_text(stored(web, tab.session)[1])
    second.page.close()


def test_back_and_forward_open_sessions_and_a_new_chat_is_stored_with_its_message(tab, web):
    count = len(httpx.get(web.url + "/v1/sessions").json()["data"])
    tab.send("First question")
    tab.button("Stop").click()
    tab.wait_for_end()
    first = tab.session
    tab.button("New chat").click()
    tab.page.get_by_text("First question", exact=True).first.wait_for()  # in the side panel
    tab.page.locator("#history .user-row, #last .user-row").first.wait_for(state="hidden")
    assert tab.session == ""
    assert len(httpx.get(web.url + "/v1/sessions").json()["data"]) == count + 1
    tab.page.get_by_role("link", name="First question").click()
    tab.page.locator("#last .user-row").get_by_text("First question").wait_for()
    assert tab.session == first
    tab.page.go_back()
    tab.page.locator("#last .user-row").first.wait_for(state="hidden")
    tab.page.go_forward()
    tab.page.locator("#last .user-row").get_by_text("First question").wait_for()
    assert tab.page.title() == "First question - lmchat"


def test_a_session_of_the_terminal_and_one_on_which_it_generates(tab, web, folder):
    with lmchat.ChatEngine(
        folder, store=web.home, load_format="dummy", dtype="float32", threads=1
    ) as engine:
        chat = engine.session("from-the-terminal", settings={"max_new_tokens": 400})
        chat.append([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
        tab.page.get_by_role("link", name="Hello").click()
        tab.page.locator("#last").get_by_text("Hi", exact=True).wait_for()
        chat.start_send("Tell me")
        tab.page.locator("#last .user-row").get_by_text("Tell me").wait_for()
        tab.wait_for_reply(20)
        tab.button("Stop").click()
        reply = chat.follow().result()
        assert reply.finish_reason == "cancelled"
        tab.page.get_by_text("Stopped. Continue resumes it").wait_for()
        tab.wait_for_text(reply.text)


def test_an_unknown_session_is_a_new_chat_with_a_notice(tab, web):
    tab.page.goto(f"{web.url}/?session={'0' * 32}")
    tab.page.get_by_text("No session of the id").wait_for()
    tab.send("Tell me")
    tab.button("Stop").click()
    tab.wait_for_end()
    assert stored(web, tab.session)[0] == "Tell me"


def test_after_a_kill_and_a_restart_the_page_shows_what_was_shown(chromium, folder, tmp_path):
    with Web(tmp_path, folder, *SLOW) as running:
        tab = Tab(chromium, running.url)
        tab.send("Tell me")
        tab.wait_for_reply(30)
        shown = tab.reply
    with Web(tmp_path, folder, *SLOW, port=running.port) as again:
        tab.page.get_by_text("The process ended during this reply").wait_for()
        assert tab.reply.startswith(shown.rstrip("\ufffd"))
        tab.button("Continue").click()
        tab.wait_for_reply(len(shown) + 20)
        tab.button("Stop").click()
        tab.wait_for_end()
        tab.wait_for_text(stored(again, tab.session)[1])
        tab.page.close()
