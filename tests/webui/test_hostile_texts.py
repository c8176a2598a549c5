"""Hostile texts in questions, replies, titles and archives stay text; a login; the keys."""

import httpx
import pytest
from web_page import Tab, Web, browser

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")

KEY = "secret-of-ann"
HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned=1'>",
    "<svg onload=window.pwned=1>",
    "<svg><script>window.pwned=1</script></svg>",
    "<iframe src='javascript:parent.pwned=1'></iframe>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<body onload=window.pwned=1>",
    "<details open ontoggle=window.pwned=1><summary>x</summary></details>",
    "<form action=http://evil.example><input name=q autofocus onfocus=window.pwned=1></form>",
    "<video><source onerror=window.pwned=1></video>",
    "<object data=http://evil.example/x></object><embed src=http://evil.example/y>",
    "<link rel=stylesheet href=http://evil.example/a.css><style>@import 'http://evil.example/b'</style>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<base href=http://evil.example/>",
    "![x](http://evil.example/a.png)",
    "![x](http://evil.example/a.png 'onerror=window.pwned=1')",
    "![x][r]\n\n[r]: http://evil.example/r.png",
    "[x](javascript:window.pwned=1)",
    "[x](data:text/html,<script>window.pwned=1</script>)",
    "<a href='javascript:window.pwned=1' id=clobber>x</a>",
    "```html\n</code></pre><script>window.pwned=1</script>\n```",
    "`` ` </code><img src=x onerror=window.pwned=1> ``",
    "` <img src=x onerror=window.pwned=1>\n\n`",
    "    </code></pre><img src=x onerror=window.pwned=1>",
    "$\\href{javascript:window.pwned=1}{x}$ $$\\includegraphics{http://evil.example/k.png}$$",
    "$$\\html@mathml{<img src=x onerror=window.pwned=1>}{}$$",
    "&lt;img src=x onerror=window.pwned=1&gt; &#60;script&#62;window.pwned=1&#60;/script&#62;",
    "<!-- --><math><mtext></p><img src=x onerror=window.pwned=1></mtext></math>",
    "{{7*7}} ${window.pwned=1} <%= 1 %> [[x]] <T> vec<T>",
    "| a |\n|---|\n| <img src=x onerror=window.pwned=1> |\n\n> <script>window.pwned=1</script>",
]  # fmt: skip
LIVE = ", ".join(
    f".messages .prose {name}" for name in
    ("script", "img", "iframe", "form", "input", "details", "video", "object", "embed", "link",
     "style", "meta", "base", "body", "[onload]", "[onerror]", "#clobber", "a[href^='javascript']",
     "a[href^='data']")
)  # fmt: skip


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    with browser() as chromium:
        home = tmp_path_factory.mktemp("home")
        with Web(home, "memo", "--api-key", f"ann:{KEY}") as running:
            running.chromium = chromium
            yield running


@pytest.fixture(scope="module")
def api(web):
    with httpx.Client(base_url=web.url, headers={"x-api-key": KEY}, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def context(web):
    """A browser that has logged in."""
    context = web.chromium.new_context()
    page = context.new_page()
    page.goto(web.url + "/?session=x")
    assert page.url == web.url + "/login"
    page.get_by_label("Name").fill("ann")
    page.get_by_label("Key").fill("wrong-key")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("The name or the key is wrong.").wait_for()
    page.get_by_label("Name").fill("ann")
    page.get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Log in").click()
    page.get_by_label("Message", exact=True).wait_for()
    page.close()
    yield context
    context.close()


def made(api, title, texts):
    session = api.post("/v1/sessions", json={"title": title}).json()["id"]
    messages = [
        {"role": "assistant" if n % 2 else "user", "content": t} for n, t in enumerate(texts)
    ]
    assert api.post(f"/v1/sessions/{session}/append", json={"messages": messages}).is_success
    return session


def test_hostile_texts_stay_text(web, api, context):
    assert len(HOSTILE) == 30
    session = made(api, HOSTILE[0], HOSTILE)
    archive = api.get(f"/v1/sessions/{session}/export").content
    zip_type = {"Content-Type": "application/zip"}
    copied = api.post("/v1/sessions/import?name=copied", content=archive, headers=zip_type)
    swapped = made(api, HOSTILE[1], [*HOSTILE[1:], HOSTILE[0]])  # replies become questions
    for one in (session, copied.json()["id"], swapped):
        tab = Tab(context, f"{web.url}/?session={one}")
        tab.page.locator(".user-row").nth(14).wait_for()
        tab.page.locator("#sessions-panel a").nth(2).wait_for()
        assert tab.page.locator(LIVE).count() == 0
        shown = tab.page.locator("#conversation").inner_text()
        for text in ("<script>window.pwned = 1</script>", "<svg onload=window.pwned=1>", "vec<T>",
                     "<base href=http://evil.example/>"):  # fmt: skip
            assert text in shown
        for link in tab.page.locator(".messages .prose a").all():
            assert (link.get_attribute("href") or "#").startswith(("http://evil.example", "#"))
        assert tab.page.evaluate("typeof window.pwned") == "undefined"
        assert tab.page.title() in (f"{HOSTILE[0]} - lmchat", f"{HOSTILE[1]} - lmchat")
        assert tab.foreign == []
        tab.page.close()


def test_the_keys_and_the_log_out(web, api, context):
    session = made(api, "Keys", ["first", "1", "second", "2"])
    tab = Tab(context, f"{web.url}/?session={session}")
    tab.button("Edit reply").last.wait_for()
    tab.box.press("ArrowUp")
    area = tab.page.get_by_label("Edited question")
    assert area.input_value() == "second"
    area.press("Escape")
    area.wait_for(state="detached")
    api.patch(f"/v1/sessions/{session}", json={"settings": {"ignore_eos": True}})
    tab.send("Tell me")
    tab.box.press("Escape")  # memo may be faster than the key
    tab.wait_for_end()
    tab.button("Log out").click()
    tab.page.get_by_label("Key").wait_for()
    tab.page.goto(f"{web.url}/?session={session}")
    assert tab.page.url == web.url + "/login"
    tab.page.close()
