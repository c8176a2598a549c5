"""A server below a path of a proxy, which may remove the path from its requests or not."""

import http_raw
import openai
import pytest
from http_paths import routes
from http_server import RunningServer
from starlette.responses import JSONResponse

import lmchat
from lmchat.errors import InvalidRequest
from lmchat.server import MountedApp, ServerConfig
from lmchat.server.root_path import TAKEN, parse_root_path

KEYS = {"secret-a": "ann"}


async def place(scope, receive, send):
    await JSONResponse([scope["root_path"], scope["path"]])(scope, receive, send)


MOUNT = MountedApp("/mine", place)


@pytest.fixture(scope="module")
def server():
    with RunningServer(ServerConfig(keys=KEYS, root_path="/ai/chat"), mounts=(MOUNT,)) as running:
        yield running


@pytest.fixture
def client(server):
    return server.client("secret-a")


@pytest.mark.parametrize("prefix", ["", "/ai/chat"])
def test_paths_are_understood_with_the_root_path_and_without_it(server, client, prefix):
    assert client.get(f"{prefix}/v1/models").status_code == 200
    assert server.client().get(f"{prefix}/health").status_code == 200
    assert server.client().get(f"{prefix}/metrics").status_code == 401
    assert client.get(f"{prefix}/mine/x").json() == ["/ai/chat/mine", "/ai/chat/mine/x"]
    assert client.get(f"{prefix}/v2/none").json().keys() == {"error"}
    assert client.options(f"{prefix}/v1/models").headers["allow"] == "GET, HEAD"


def test_no_other_prefix_is_removed(server, client):
    for path in ("/ai/v1/models", "/ai/chatter/v1/models", "/ai/chat/ai/chat/v1/models"):
        assert client.get(path).status_code == 404
    for path in ("/ai/chat/ai/chat/health", "/ai/chat/mine", "/AI/chat/health"):
        assert server.client().get(path).status_code == 401


def test_what_names_a_path_has_the_root_path(server, client):
    made = client.post("/v1/sessions", json={})
    assert made.headers["location"] == f"/ai/chat/v1/sessions/{made.json()['id']}"
    copy = client.post(f"{made.headers['location']}/fork", json={})
    assert client.get(copy.headers["location"]).json()["id"] == copy.json()["id"]
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/ai/chat"}]
    assert "'/ai/chat/openapi.json'" in client.get("/docs").text.replace('"', "'")
    message = client.post("/v1/v1/chat/completions", json={}).json()["error"]["message"]
    assert message == (
        "no such route: POST /ai/chat/v1/v1/chat/completions, expected POST "
        f"/ai/chat/v1/chat/completions: the base URL is {server.url}/ai/chat/v1"
    )


def test_the_root_path_itself_is_redirected_to_what_is_below_it(server):
    answer = http_raw.exchange(server.port, http_raw.request("GET", "/ai/chat?session=a%20b"))
    assert answer.status == 308
    assert answer.headers["location"] == "/ai/chat/?session=a%20b"


def test_clients_use_an_address_with_the_path(server):
    url = f"{server.url}/ai/chat"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret-a", max_retries=0) as found:
        assert found.models.list().data[0].id == "memo"
    with lmchat.connect(url, "secret-a") as engine:
        assert engine.session("pets").send("Hello.", max_new_tokens=2).text


def test_outer_apps_give_the_root_path_too():
    """ASGI servers and outer apps have a field for it."""
    with RunningServer(ServerConfig()) as server:
        inner = server.app

        async def outer(scope, receive, send):
            if scope["type"] == "http":
                scope = {**scope, "root_path": "/chat", "path": "/chat" + scope["path"]}
            await inner(scope, receive, send)

        server.uvicorn.config.loaded_app = outer
        assert server.client().post("/v1/sessions", json={}).headers["location"].startswith("/chat")


@pytest.mark.parametrize(
    ("text", "root"), [("/chat", "/chat"), ("/a/b-c_d.e~f/", "/a/b-c_d.e~f"), ("/", ""), ("", "")]
)
def test_a_root_path_has_no_slash_at_its_end(text, root):
    assert parse_root_path(text) == root


@pytest.mark.parametrize(
    "text",
    ["chat", "//", "/chat//", "/a//b", "/..", "/a/../b", "/ä", "/a b", "/a?b", "/a%20b", "/a'",
     "http://a/b", "/chat\n", "/{x}"],
)  # fmt: skip
def test_what_is_not_a_path_is_refused_by_name(text):
    with pytest.raises(InvalidRequest, match="--root-path is .* expected a path such as /chat"):
        ServerConfig(root_path=text)


def test_a_path_of_the_server_is_not_a_root_path(server):
    firsts = {path.split("/")[1] for _, path in routes(server.app)}
    assert firsts - {"mine"} <= TAKEN
    for first in firsts - {"mine"}:
        with pytest.raises(InvalidRequest, match="a path of the server"):
            parse_root_path(f"/{first}/x")
