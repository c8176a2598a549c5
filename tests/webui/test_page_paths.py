"""The paths and headers of the page, without a browser."""

import json
import re
from urllib.parse import urljoin

import pytest
from http_server import RunningServer

pytest.importorskip("gradio")

from lmchat.server import ServerConfig
from lmchat.webui.page import mounts
from lmchat.webui.paths import claims

KEYS = {"secret-ann": "ann", "secret-bob": "bob"}


class WebServer(RunningServer):
    """A server with the page, in this process."""

    async def _serve(self):
        self._mounts = tuple(mounts(self.engine, self.config))  # Gradio needs the running loop
        await super()._serve()


@pytest.fixture(scope="module")
def server():
    with WebServer() as running:
        yield running


def test_the_page_and_its_files(server):
    client = server.client()
    page = client.get("/")
    assert page.status_code == 200
    assert "/page/static/page.js" in page.text
    for path in ("/page/static/page.js", "/page/static/page.css", "/theme.css"):
        assert client.get(path).status_code == 200
    policy = page.headers["content-security-policy"]
    assert "unsafe-eval" not in policy
    assert "default-src 'self'" in policy
    assert "http" not in policy.replace("https", "http")


@pytest.mark.parametrize(
    "path",
    [
        "/config", "/gradio_api/info", "/gradio_api/upload", "/gradio_api/file=/etc/passwd",
        "/gradio_api/heartbeat/x", "/gradio_api/startup-events", "/gradio_api/call/show",
        "/monitoring", "/manifest.json", "/gradio_api/mcp", "/gradio_api/runs",
        "/page/static/../page.py", "/page/static/page.py", "/assets/../../etc/passwd", "/v1/none",
        "/gradio_api/component_server", "/gradio_api/proxy=http://evil.example/x",
    ],
)  # fmt: skip
def test_other_paths_are_the_server_s(server, path):
    assert not claims(path)
    for method in ("GET", "POST"):
        answer = server.client().request(method, path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("no such route: ")


def test_wrong_methods_of_the_api_stay_405_and_its_routes_stay(server):
    assert server.client().get("/v1/chat/completions").status_code == 405
    assert server.client().get("/v1/models").status_code == 200


# --- several users ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed():
    with WebServer(ServerConfig(keys=KEYS)) as running:
        yield running


def logged_in(server, name):
    client = server.client()
    answer = client.post("/login", data={"name": name, "key": f"secret-{name}"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    return client


def test_a_login_is_a_cookie_that_opens_the_page_alone(keyed):
    client = keyed.client()
    answer = client.post("/login", data={"name": "ann", "key": "secret-ann"})
    header = answer.headers["set-cookie"].lower()
    for part in ("httponly", "samesite=strict", "max-age=2592000", "path=/"):
        assert part in header
    assert client.get("/").status_code == 200
    assert client.get("/v1/sessions").status_code == 401
    assert client.post("/logout").headers["location"] == "/login"
    assert client.get("/").status_code == 303


def test_without_a_login_only_the_login_page_and_the_probes_answer(keyed):
    client = keyed.client()
    page = client.get("/login")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert (client.get("/").status_code, client.get("/").headers["location"]) == (303, "/login")
    for path in ("/health", "/ready"):
        assert client.get(path).status_code == 200
    for path in ("/page/static/page.js", "/assets/index.js", "/theme.css", "/gradio_api/app_id",
                 "/gradio_api/queue/data?session_hash=x", f"/page/v1/sessions/{'0' * 32}/export",
                 "/config", "/v1/models", "/metrics"):  # fmt: skip
        assert client.get(path).status_code == 401, path
    for path in ("/gradio_api/queue/join", "/gradio_api/run/predict", "/page/v1/sessions/import"):
        assert client.post(path, content=b"{}").status_code == 401, path
    for cookie in ("ann", "ann|99999999999|x", "", "local|99999999999|"):
        assert client.get("/", headers={"Cookie": f"lmchat_login={cookie}"}).status_code == 303


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"name": "ann", "key": "secret-bob"}, 401), ({}, 401), ({"name": "<b>", "key": "x"}, 401),
        ({"name": "ann", "key": "x" * 5000}, 413), ({f"n{i}": "x" for i in range(20)}, 400),
    ],
)  # fmt: skip
def test_a_refused_login_is_the_login_page_with_the_reason(keyed, form, status):
    answer = keyed.client().post("/login", data=form)
    assert answer.status_code == status
    assert '<p role="alert"></p>' not in answer.text
    assert "<b>" not in answer.text
    assert "set-cookie" not in answer.headers


def test_a_login_from_another_site_is_refused(keyed):
    form = {"name": "ann", "key": "secret-ann"}
    headers = {"Origin": "http://evil.example"}
    assert keyed.client().post("/login", data=form, headers=headers).status_code == 403


def test_an_export_of_another_owner_answers_as_unknown_and_imports_are_one_s_own(keyed):
    ann, bob = logged_in(keyed, "ann"), logged_in(keyed, "bob")
    made = keyed.client("secret-ann").post("/v1/sessions", json={"name": "mine"}).json()["id"]
    path = "/page/v1/sessions/{}/export"
    archive = ann.get(path.format(made))
    assert (archive.status_code, archive.headers["content-type"]) == (200, "application/zip")
    answers = [bob.get(path.format(session)) for session in (made, "0" * 32)]
    assert [one.status_code for one in answers] == [404, 404]
    assert answers[0].text.replace(made, "0" * 32) == answers[1].text
    copied = bob.post("/page/v1/sessions/import?name=copy", content=archive.content)
    assert copied.status_code == 201
    listed = keyed.client("secret-bob").get("/v1/sessions").json()["data"]
    assert [one["name"] for one in listed] == ["copy"]


def test_the_events_of_a_tab_are_its_owner_s(keyed):
    ann, bob = logged_in(keyed, "ann"), logged_in(keyed, "bob")
    tick = {"data": [""], "fn_index": 1, "trigger_id": 1, "session_hash": "tabofann"}
    assert ann.post("/gradio_api/run/predict", json=tick).status_code == 200
    path = "/gradio_api/queue/data?session_hash=tabofann"
    assert bob.get(path).status_code == 401


def function_of(server, client, target):
    """Returns the number of the page's first event of a kind, as its requests have it."""
    page = client.get("/").text
    config = json.loads(re.search(r"window.gradio_config = (.*?);</script>", page)[1])
    return next(d["id"] for d in config["dependencies"] if d["targets"][0][1] == target)


def test_what_an_idle_tab_repeats_is_logged_for_debugging_only(server, keyed, caplog):
    caplog.set_level("DEBUG", "lmchat.server.access")

    def levels(running, call, status):
        caplog.clear()
        client = running.client()
        assert client.post("/gradio_api/run/predict", json=call).status_code == status
        client.get("/health")  # the line of a request is written before the next one is answered
        lines = [one for one in caplog.records if one.name == "lmchat.server.access"]
        return [one.levelname for one in lines if one.getMessage().startswith("POST ")]

    call = {"session_hash": "idle", "fn_index": function_of(server, server.client(), "tick")}
    assert levels(server, {**call, "data": [""]}, 200) == ["DEBUG"]
    call["fn_index"] = function_of(server, server.client(), "submit")
    assert levels(server, {**call, "data": ["", ""]}, 200) == ["INFO"]
    assert levels(keyed, {}, 401) == ["DEBUG"]


def test_without_keys_there_is_no_login(server):
    for path in ("/login", "/logout"):
        answer = server.client().get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")


# --- below a path of a proxy ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def below():
    with WebServer(ServerConfig(keys=KEYS, root_path="/chat")) as running:
        yield running


@pytest.mark.parametrize("prefix", ["", "/chat"])
def test_below_a_path_links_and_redirects_have_it(below, prefix):
    client = below.client()
    assert client.get(f"{prefix}/").headers["location"] == "/chat/login"
    form = {"name": "ann", "key": "secret-ann"}
    answer = client.post(f"{prefix}/login", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/chat/")
    assert "path=/chat/;" in answer.headers["set-cookie"].lower() + ";"
    cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
    page = client.get(f"{prefix}/", headers=cookie)
    assert page.status_code == 200
    config = json.loads(re.search(r"window.gradio_config = (.*?);</script>", page.text)[1])
    assert config["root"] == f"{below.url}/chat"
    # Everything that the page loads is below the path, as its address ends with a slash.
    loaded = re.findall(r'<(?:script|link)[^>]* (?:src|href)="([^"]*)"', page.text + config["head"])
    assert {"/chat/page/static/page.js", "/chat/page/static/page.css"} <= set(loaded)
    links = {urljoin("http://localhost/chat/", link).partition("?")[0] for link in loaded}
    local = {link for link in links if "://localhost" in link and "/manifest." not in link}
    assert any("/assets/" in link for link in local)
    for link in local:
        path = link.removeprefix("http://localhost")
        assert path.startswith("/chat/")
        assert client.get(path, headers=cookie).status_code == 200, path
    out = client.post(f"{prefix}/logout", headers=cookie)
    assert (out.headers["location"], out.status_code) == ("/chat/login", 303)
    assert "path=/chat/;" in out.headers["set-cookie"].lower() + ";"
