"""Edits, arrows and forks in Chromium; a second tab follows."""

import httpx
import pytest
from web_page import Tab, Web, browser

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def web(chromium, tmp_path_factory):
    with Web(tmp_path_factory.mktemp("home"), "memo") as running:
        yield running


def session_of(web, *texts):
    made = httpx.post(web.url + "/v1/sessions", json={"settings": {"max_new_tokens": 8}}).json()
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    path = f"{web.url}/v1/sessions/{made['id']}"
    assert httpx.post(path + "/append", json={"messages": messages}).status_code == 200
    return made["id"]


def texts_of(web, session):
    found = httpx.get(f"{web.url}/v1/sessions/{session}?details=true").json()
    return [turn["text"] for turn in found["turns"]]


def bar(tab, number):
    return tab.page.get_by_role("group", name=f"Round {number}", exact=True)


def edit(tab, number, what, text, done):
    bar(tab, number).get_by_role("button", name=f"Edit {what}").click(force=True)
    area = tab.page.get_by_label(f"Edited {what}")
    before = area.input_value()
    area.fill(text)
    bar(tab, number).get_by_role("button", name=done).click()
    return before


def test_edits_arrows_and_a_second_tab(chromium, web):
    session = session_of(web, "What is <b>?", "A `tag`.", "And <i>?", "Another.")
    tab, second = (Tab(chromium, f"{web.url}/?session={session}") for _ in range(2))
    for one in (tab, second):
        one.page.locator("#last").get_by_text("Another.").wait_for()

    assert edit(tab, 1, "reply", "A <T> of *mine*.", "Save") == "A `tag`."
    for one in (tab, second):
        one.page.locator("#last").get_by_text("A <T> of mine.").wait_for(timeout=5000)
        bar(one, 1).get_by_text("2 / 2").wait_for()
    assert texts_of(web, session) == ["What is <b>?", "A <T> of *mine*."]

    bar(second, 1).get_by_role("button", name="Previous").click()
    for one in (tab, second):
        one.page.locator("#last").get_by_text("Another.").wait_for(timeout=5000)
        bar(one, 1).get_by_text("1 / 2").wait_for()
        assert bar(one, 1).get_by_role("button", name="Previous").is_disabled()

    assert edit(tab, 1, "question", "What is <u>?", "Ask again") == "What is <b>?"
    tab.page.locator("#last .user-row").get_by_text("What is <u>?").wait_for()
    for one in (tab, second):
        bar(one, 1).get_by_text("3 / 3").wait_for(timeout=5000)
    question, reply = texts_of(web, session)
    assert question == "What is <u>?"
    tab.wait_for_text(reply)
    second.wait_for_text(reply)
    assert tab.foreign == second.foreign == []
    for one in (tab, second):
        one.page.close()


def test_a_fork_ends_with_its_round(chromium, web):
    session = session_of(web, "one", "1", "two", "2", "three", "3")
    tab = Tab(chromium, f"{web.url}/?session={session}")
    bar(tab, 2).get_by_role("button", name="Fork from here").click(force=True)
    tab.page.wait_for_function("id => !location.search.endsWith(id)", arg=session)
    tab.page.locator("#last").get_by_text("two", exact=True).wait_for()
    assert texts_of(web, tab.session) == ["one", "1", "two", "2"]
    assert texts_of(web, session)[-1] == "3"
    tab.page.go_back()
    tab.page.locator("#last").get_by_text("three", exact=True).wait_for()
    tab.page.close()


def test_earlier_rounds_are_shown_on_request(chromium, web):
    session = session_of(web, *(text for n in range(50) for text in (f"q{n}.", f"a{n}.")))
    tab = Tab(chromium, f"{web.url}/?session={session}")
    rows = tab.page.locator(".user-row")
    tab.page.get_by_text("q49.", exact=True).wait_for()
    assert rows.count() == 20
    tab.button("Show earlier messages (30)").click()
    tab.page.get_by_text("q10.", exact=True).wait_for()
    assert rows.count() == 40
    bar(tab, 11).wait_for(state="attached")
    tab.page.close()
