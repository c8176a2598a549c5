"""Programs in a browser: their preflights, and who may read the answers."""

import pytest
from http_server import RunningServer
from starlette.responses import PlainTextResponse

from lmchat.errors import InvalidRequest
from lmchat.server import MountedApp, ServerConfig
from lmchat.server.http.cors import EXPOSED
from lmchat.server.origins import parse_origins

NOTES = "app://notes.example"
PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-session-id,x-stainless-os",
}


async def page(scope, receive, send):
    await PlainTextResponse("page")(scope, receive, send)


async def broken(scope, receive, send):
    raise ValueError("it is broken")


MOUNTS = (
    MountedApp("/page", page, own_login=True),
    MountedApp("/mine", page),
    MountedApp("/broken", broken),
)


@pytest.fixture(scope="module")
def keyed():
    config = ServerConfig(keys={"secret-a": "ann"}, allow_origins=[NOTES, "http://localhost:5173"])
    with RunningServer(config, mounts=MOUNTS) as running:
        yield running


@pytest.fixture(scope="module")
def keyless():
    with RunningServer(ServerConfig(allow_origins=[NOTES]), mounts=MOUNTS) as running:
        yield running


def cors(answer):
    return {n: v for n, v in answer.headers.items() if n.startswith("access-control")}


def test_a_preflight_is_answered_without_a_key(keyed):
    answer = keyed.client().options(PATH, headers={"Origin": NOTES, **PREFLIGHT})
    assert answer.status_code == 200
    found = cors(answer)
    assert found["access-control-allow-origin"] == NOTES
    assert "access-control-allow-credentials" not in found
    assert "origin" in answer.headers["vary"].lower()
    allowed = found["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(PREFLIGHT["Access-Control-Request-Headers"].split(",")) <= set(allowed)
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        assert method in found["access-control-allow-methods"]


def test_a_preflight_for_a_server_of_a_private_network_is_answered(keyed):
    headers = {"Origin": NOTES, **PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
    assert keyed.client().options(PATH, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("secret-a", BODY, 200), ("secret-a", {**BODY, "stream": True}, 200),
        ("secret-a", {**BODY, "max_tokens": "three"}, 400), (None, BODY, 401),
    ],
)  # fmt: skip
def test_answers_streams_and_errors_can_be_read(keyed, key, body, status):
    answer = keyed.client(key).post(PATH, json=body, headers={"Origin": NOTES})
    assert answer.status_code == status
    assert cors(answer)["access-control-allow-origin"] == NOTES
    exposed = cors(answer)["access-control-expose-headers"].split(", ")
    assert set(exposed) == set(EXPOSED) >= {"x-session-id", "Retry-After", "retry-after-ms"}


def test_failures_and_unknown_paths_can_be_read(keyed):
    client, found = keyed.client("secret-a"), {}
    for method, path in (
        ("GET", "/nothing"), ("DELETE", "/v1/models"), ("GET", "/mine/x"), ("GET", "/broken/x"),
    ):  # fmt: skip
        answer = client.request(method, path, headers={"Origin": NOTES})
        found[answer.status_code] = cors(answer)["access-control-allow-origin"]
    assert found == dict.fromkeys([404, 405, 200, 500], NOTES)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "APP://notes.example", NOTES + ".evil", NOTES + ":1"]
)
def test_other_origins_stay_out(keyed, keyless, origin):
    for server, status in ((keyed, 401), (keyless, 403)):
        headers = {"Origin": origin, **PREFLIGHT}
        answer = server.client().options(PATH, headers=headers)
        assert (answer.status_code, cors(answer)) == (status, {})
        assert cors(server.client("secret-a").post(PATH, json=BODY, headers=headers)) == {}


def test_without_a_key_an_origin_that_is_named_passes(keyless):
    headers = {"Origin": NOTES, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    answer = keyless.client().post(PATH, json=BODY, headers=headers)
    assert answer.status_code == 200
    assert cors(answer)["access-control-allow-origin"] == NOTES
    rebound = keyless.client().get("/version", headers={**headers, "Host": "evil.example"})
    assert rebound.status_code == 403
    twice = [("Origin", NOTES), ("Origin", "https://evil.example")]
    assert keyless.client().get("/version", headers=twice).status_code == 400


def test_pages_with_logins_of_their_own_are_for_themselves_alone(keyed, keyless):
    for server in (keyed, keyless):
        for method in ("OPTIONS", "POST", "GET"):
            headers = {"Origin": NOTES, **PREFLIGHT}
            answer = server.client().request(method, "/page/x", headers=headers)
            assert (answer.status_code, cors(answer)) == (403, {})


def test_any_origin_passes_with_a_key_alone():
    config = ServerConfig(keys={"secret-a": "ann"}, allow_origins=["*"])
    with RunningServer(config) as server:
        headers = {"Origin": "https://any.example"}
        assert cors(server.client("secret-a").get("/version", headers=headers)) == {
            "access-control-allow-origin": "*",
            "access-control-expose-headers": ", ".join(EXPOSED),
        }
        assert server.client().get("/version", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://Notes.Example:443", "https://notes.example"), ("HTTP://[::1]:80", "http://[::1]"),
        ("http://localhost:5173", "http://localhost:5173"), ("app://Notes", "app://Notes"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"), ("null", "null"), ("*", "*"),
    ],
)  # fmt: skip
def test_an_origin_is_read_as_browsers_write_it(text, origin):
    assert parse_origins([text], has_keys=True) == {origin}


@pytest.mark.parametrize(
    "text",
    [
        "https://notes.example/", "notes.example", "https://", "http://localhost:*", "https://a b",
        "https://ann@notes.example", "http://localhost:0", "http://localhost:65536", "",
        "https://*.example", "https://été.example", "http://a,http://b", "file:///x", "http://a\n",
    ],
)  # fmt: skip
def test_what_is_not_an_origin_is_refused_by_name(text):
    with pytest.raises(InvalidRequest, match="--allow-origin is .* expected SCHEME://HOST"):
        parse_origins([text], has_keys=True)


@pytest.mark.parametrize("text", ["*", "null"])
def test_pages_of_any_site_need_a_key(text):
    with pytest.raises(InvalidRequest, match="no API key"):
        parse_origins([text], has_keys=False)
