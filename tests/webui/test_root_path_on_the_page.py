"""The page below a path of a proxy in Chromium: addresses, assets, and files."""

import pytest
from web_page import Tab, Web, browser

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")


def test_the_page_works_below_a_path(tmp_path):
    with browser() as chromium, Web(tmp_path, "memo", "--root-path", "/chat") as running:
        assert running.url.endswith("/chat")
        tab = Tab(chromium, running.url)
        outside = []
        tab.page.on("request", lambda r: outside.append(r.url) if "/chat/" not in r.url else None)
        tab.send("Hello.")
        tab.wait_for_end()
        assert tab.page.url == f"{running.url}/?session={tab.session}"
        tab.page.reload()
        tab.wait_for_end()
        tab.page.locator("#settings .toggle-button").click()
        with tab.page.expect_download() as download:
            tab.page.get_by_role("link", name="Export").click()
        assert download.value.suggested_filename == f"session-{tab.session}.zip"
        assert tab.foreign == []
        assert outside == []
