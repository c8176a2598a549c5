"""The panels in Chromium: search, form, export, import, delete."""

import zipfile

import httpx
import pytest
from web_page import Tab, Web, browser

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser() as chromium, Web(tmp_path_factory.mktemp("home"), "memo") as running:
        for number in range(3):
            made = httpx.post(running.url + "/v1/sessions", json={}).json()
            messages = [{"role": "user", "content": f"question {number} <b>"},
                        {"role": "assistant", "content": f"reply {number}"}]  # fmt: skip
            path = f"{running.url}/v1/sessions/{made['id']}/append"
            httpx.post(path, json={"messages": messages}).raise_for_status()
        opened = Tab(chromium, running.url)
        opened.web = running
        yield opened
        assert opened.foreign == ["dialog"]  # the one before the deletion


def links(tab):
    return tab.page.locator("#sessions-panel a span")


def test_search_form_archives_and_deletion(tab, tmp_path):
    links(tab).nth(2).wait_for()
    tab.page.get_by_label("Search").fill("reply 1")
    links(tab).nth(1).wait_for(state="detached")
    assert links(tab).all_inner_texts() == ["question 1 <b>"]
    links(tab).first.click()
    tab.page.locator("#last").get_by_text("reply 1").wait_for()

    tab.page.locator("#settings .toggle-button").click()
    title, top_p = tab.page.get_by_label("Title"), tab.page.get_by_label("Top p")
    tab.page.wait_for_function(
        "() => document.querySelector('#settings input, #settings textarea')"
    )
    title.fill("A <i>title</i>")
    top_p.fill("3")
    tab.button("Save").click()
    tab.page.get_by_text("⚠ top_p is 3").wait_for()
    tab.page.get_by_role("heading", name="A <i>title</i>").wait_for()

    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="Export").click()
    file = tmp_path / "session.zip"
    download.value.save_as(file)
    assert "session.json" in zipfile.ZipFile(file).namelist()
    first = tab.session
    tab.page.locator("#sessions-panel input[type=file]").set_input_files(file)
    tab.page.wait_for_function("id => !location.search.endsWith(id)", arg=first)
    tab.page.locator("#last").get_by_text("reply 1").wait_for()
    (tmp_path / "bad.zip").write_bytes(b"PK")
    tab.page.locator("#sessions-panel input[type=file]").set_input_files(tmp_path / "bad.zip")
    tab.page.get_by_role("alert").get_by_text("zip").wait_for()

    copy = tab.session
    tab.button("Delete").click()
    tab.page.get_by_role("heading", name="New chat").wait_for()
    assert httpx.get(f"{tab.web.url}/v1/sessions/{copy}").status_code == 404
    assert httpx.get(f"{tab.web.url}/v1/sessions/{first}").status_code == 200
