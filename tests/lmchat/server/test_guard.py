"""The guard: keys name owners, and without keys only this machine's own clients pass."""

import asyncio

import http_raw
import pytest
from http_paths import routes, spellings
from http_server import RunningServer
from starlette.responses import PlainTextResponse

from lmchat.server import Limits, MountedApp, ServerConfig
from lmchat.server.http.guard import OPEN_PATHS, Keys, is_own_host

KEYS = {"secret-a": "ann", "secret-b": "bob"}
JSON = ("Content-Type", "application/json")
HOST = ("Host", "localhost")


async def hello(scope, receive, send):
    await PlainTextResponse(f"hello {scope.get('lmchat.owner')}")(scope, receive, send)


MOUNTS = (MountedApp("/mine", hello), MountedApp("/", hello, own_login=True))


@pytest.fixture(scope="module")
def keyed():
    limits = Limits(body=1000)
    with RunningServer(ServerConfig(keys=KEYS, limits=limits)) as server:
        yield server


@pytest.fixture(scope="module")
def keyless():
    with RunningServer(ServerConfig(limits=Limits(body=1000))) as server:
        yield server


def status(server, *parts, **options):
    found = http_raw.exchange(server.port, http_raw.request(*parts, **options))
    return None if found is None else found.status


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_needs_no_key(keyed, path):
    assert keyed.client().get(path).status_code == 200


@pytest.mark.parametrize("key", [None, "secret-c", "secret-", ""])
def test_a_wrong_key_is_refused_with_an_error_object(keyed, key):
    answer = keyed.client(key).get("/version")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "bearer secret-b"}, {"x-api-key": "secret-b"}],
)
def test_a_key_is_accepted(keyed, headers):
    assert keyed.client().get("/version", headers=headers).status_code == 200


def test_a_key_names_its_owner():
    keys = Keys(KEYS)
    assert [keys.owner(key) for key in (b"secret-a", b"secret-b", b"", b"\xff")] == [
        "ann", "bob", None, None,
    ]  # fmt: skip


def test_no_route_answers_without_a_key_however_its_path_is_spelled(keyed, caplog):
    caplog.set_level("WARNING", "lmchat.server.access")
    found = routes(keyed.app)
    assert {path for _, path in found} >= {"/metrics", "/version", "/openapi.json"}
    passed = []
    with http_raw.connected(keyed.port) as connection:
        for method, path in found:
            assert len(spellings(path)) >= 60
            for spelling in spellings(path):
                connection.sendall(http_raw.request(method, spelling))
                answer = http_raw.answer(connection, method)
                if path in OPEN_PATHS and answer.status == 200:
                    continue
                if answer.status != 401:
                    passed.append((method, spelling, answer.status))
    assert passed == []


def test_bytes_that_are_no_path_reach_no_route(keyed):
    for target in (b"/metrics\xff", b"/metrics\x00", b"/metri cs", b"", b"\x7f"):
        assert status(keyed, "GET", target) == 400
    assert status(keyed, "GET", b"*") == 401


def test_mounted_apps_need_a_key_unless_they_identify_their_users():
    with RunningServer(ServerConfig(keys=KEYS), mounts=MOUNTS) as server:
        client = server.client()
        for path in ("/mine/x", "/version", "/metrics", "/v2"):
            assert client.get(path).status_code == 401
        assert client.get("/other").text == "hello None"
        answer = client.get("/mine/x", headers={"x-api-key": "secret-a"})
        assert answer.text == "hello ann"


# --- hosts and origins --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "127.0.0.1.evil.example", "", "[bad", "[::2]:80", "localhost:x", "10.0.0.1",
        "localhost@evil.example", "evil@localhost", "localhost/", "0.0.0.0", "localhost, evil",
    ],
)  # fmt: skip
def test_without_keys_foreign_hosts_are_refused(keyless, host):
    assert status(keyless, "GET", "/version", [("Host", host)]) in (400, 403)
    assert not is_own_host(host)


@pytest.mark.parametrize(
    "host",
    ["localhost:1", "127.0.0.1", "[::1]:80", "localhost.", "LOCALHOST", "127.0.0.2:23333"],
)
def test_without_keys_loopback_hosts_are_accepted(keyless, host):
    assert status(keyless, "GET", "/version", [("Host", host)]) == 200


def test_without_a_host_or_with_several_a_request_is_refused(keyless):
    assert status(keyless, "GET", "/version", [], version="1.0") == 403
    assert status(keyless, "GET", "/version", []) == 400
    two = [("Host", "localhost"), ("Host", "evil.example")]
    assert status(keyless, "GET", "/version", two) == 400


def test_only_configured_names_are_accepted_beside_loopback():
    assert is_own_host("box.lan:80", frozenset({"box.lan"}))
    assert not is_own_host("box.lan.evil:80", frozenset({"box.lan"}))


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://[bad"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_without_keys_requests_of_other_sites_are_refused(keyless, headers):
    assert keyless.client().get("/version", headers=headers).status_code == 403


def test_the_server_s_own_pages_are_accepted(keyless):
    client = keyless.client()
    assert client.get("/version", headers={"Origin": keyless.url}).status_code == 200
    navigation = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/version", headers=navigation).status_code == 200


def test_any_host_may_be_allowed_but_no_other_site():
    with RunningServer(ServerConfig(any_host=True)) as server:
        client = server.client()
        assert client.get("/version", headers={"Host": "box.lan"}).status_code == 200
        foreign = {"Host": "box.lan", "Origin": "http://evil.example"}
        assert client.get("/version", headers=foreign).status_code == 403


# --- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None,
     "application/jsonx", "", "application/octet-stream"],
)  # fmt: skip
def test_bodies_that_are_not_json_are_refused(keyless, kind):
    headers = [HOST] if kind is None else [HOST, ("Content-Type", kind)]
    assert status(keyless, "POST", "/v1/conversations", headers, b"{}") == 415


def test_compressed_bodies_are_refused(keyless):
    headers = [HOST, JSON, ("Content-Encoding", "gzip")]
    assert status(keyless, "POST", "/v1/conversations", headers, b"{}") == 415


def test_two_lengths_are_refused(keyless):
    both = [HOST, JSON, ("Transfer-Encoding", "chunked"), ("Content-Length", "2")]
    assert status(keyless, "POST", "/v1/conversations", both) == 400
    conflict = [HOST, JSON, ("Content-Length", "3")]
    assert status(keyless, "POST", "/v1/conversations", conflict, b"{}") == 400
    coded = [HOST, JSON, ("Transfer-Encoding", "gzip, chunked")]
    assert status(keyless, "POST", "/v1/conversations", coded) in (400, 501)


@pytest.mark.parametrize("path", ["/v1/conversations", "/v2/models/memo/generate"])
def test_large_bodies_are_refused_announced_or_not(keyless, path):
    client = keyless.client()
    headers = dict([JSON])
    text = b'{"x": "%s"}' % (b"y" * 2000)
    assert client.post(path, content=text, headers=headers).status_code == 413
    pieces = client.post(path, content=iter([text[:900], text[900:]]), headers=headers)
    assert pieces.status_code == 413


def test_a_body_that_no_route_reads_does_no_harm(keyless):
    client = keyless.client()
    for _ in range(2):
        answer = client.request("GET", "/version", content=b"{}", headers=dict([JSON]))
        assert answer.status_code == 200


def test_unknown_routes_are_error_objects(keyless):
    answer = keyless.client().get("/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such route: GET /nothing"


def test_no_response_allows_other_sites_to_read_it(keyless):
    headers = {"Origin": keyless.url, "Access-Control-Request-Method": "POST"}
    answer = keyless.client().options("/v1/conversations", headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


# --- the end ------------------------------------------------------------------------------------


def test_while_the_server_ends_only_harmless_requests_pass():
    with RunningServer() as server:
        client = server.client()
        assert client.get("/ready").status_code == 200
        server.app.state.draining = True
        assert client.get("/ready").status_code == 503
        refused = client.post("/v1/conversations", json={})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close"
        for path in ("/health", "/metrics", "/version"):
            assert client.get(path).status_code == 200
        assert client.post("/v1/responses/resp_x/cancel").status_code == 404


# --- errors of routes ---------------------------------------------------------------------------


async def fails_at_once(scope, receive, send):
    raise ValueError(" ".join(["what", "the", "client", "wrote"]))


async def fails_later(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    raise ValueError(" ".join(["what", "the", "client", "wrote"]))


async def fails_with_the_client(scope, receive, send):
    while (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"late"})


def test_errors_of_routes_are_logged_once_and_without_their_texts(caplog):
    mounts = [MountedApp(f"/{f.__name__}", f) for f in (fails_at_once, fails_later)]
    with RunningServer(mounts=tuple(mounts)) as server:
        answer = server.client().get("/fails_at_once/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        with http_raw.connected(server.port) as connection:
            connection.sendall(http_raw.request("GET", "/fails_later/"))
            found = http_raw.rest(connection)
        assert found.startswith(b"HTTP/1.1 200")
        assert not found.endswith(b"0\r\n\r\n")  # the client sees that it is incomplete
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert all("ValueError" in record.getMessage() for record in errors)
    assert "what the client wrote" not in caplog.text


def test_a_disconnect_leaves_no_task_and_no_error(caplog):
    mount = MountedApp("/waits", fails_with_the_client)
    with RunningServer(mounts=(mount,)) as server:
        with http_raw.connected(server.port) as connection:
            connection.sendall(http_raw.request("GET", "/waits/"))
        server.call(none_running(server))
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


async def none_running(server):
    """Waits until no request is being answered."""
    while server.app.state.in_flight or server.uvicorn.server_state.tasks:
        await asyncio.sleep(0.01)


def test_the_bodies_of_one_owner_are_bounded_and_leave_room_for_others():
    limits = Limits(body=1000, bodies=1500)
    with RunningServer(ServerConfig(keys=KEYS, limits=limits)) as server:
        path, headers = "/tokenize", dict([JSON])
        text = b'{"prompt": "%s"}' % (b"y" * 884)
        ann, bob = (server.client(key) for key in KEYS)
        key = ("Authorization", "Bearer secret-a")
        with http_raw.connected(server.port) as slow:
            whole = http_raw.request("POST", path, [HOST, JSON, key], text)
            slow.sendall(whole[:-1])
            while ann.post(path, content=text, headers=headers).status_code == 200:
                pass  # until the slow body has arrived
            refused = ann.post(path, content=text, headers=headers)
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["code"] == "too_many_bodies"
            assert bob.post(path, content=text, headers=headers).status_code == 200
            slow.sendall(whole[-1:])
            assert http_raw.answer(slow).status == 200
        assert ann.post(path, content=text, headers=headers).status_code == 200
