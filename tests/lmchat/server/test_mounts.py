"""Mounted apps: their lifespans, bodies, logins, paths, and the end of the server beside them."""

import asyncio
import contextlib

import http_raw
import pytest
from http_server import RunningServer
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import lmchat
from lmchat.server import Limits, MountedApp, ServerConfig, create_app

OWNER = "lmchat.owner"
KEYS = {"secret-a": "ann"}
HOST = ("Host", "localhost")
FORM = ("Content-Type", "application/x-www-form-urlencoded")


async def owner(scope, receive, send):
    await PlainTextResponse(f"owner {scope.get(OWNER)}")(scope, receive, send)


async def size(scope, receive, send):
    """Answers with the type and the size of the body, which it reads in pieces."""
    count, more = 0, True
    while more:
        message = await receive()
        count, more = count + len(message.get("body", b"")), message.get("more_body", False)
    kind = dict(scope["headers"]).get(b"content-type", b"").decode()
    await PlainTextResponse(f"{kind} {count}")(scope, receive, send)


async def endless(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


# --- lifespans ----------------------------------------------------------------------------------


def with_lifespan(events):
    @contextlib.asynccontextmanager
    async def lifespan(app):
        events.append("start")
        yield {"made": "at the start"}
        events.append("end")

    async def show(request):
        return PlainTextResponse(request.state.made)

    return Starlette(routes=[Route("/", show)], lifespan=lifespan)


def test_a_mounted_app_starts_and_ends_with_the_server():
    events = []
    with RunningServer(mounts=(MountedApp("/page", with_lifespan(events)),)) as server:
        assert events == ["start"]
        assert server.client().get("/page/").text == "at the start"
    assert events == ["start", "end"]


def test_apps_without_a_lifespan_are_mounted_beside_it():
    async def refuses(scope, receive, send):
        assert scope["type"] == "http"
        await owner(scope, receive, send)

    async def waits(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    events = []
    apps = (refuses, owner, with_lifespan(events), waits, endless)
    mounts = tuple(MountedApp(f"/{number}", app) for number, app in enumerate(apps))
    with RunningServer(mounts=mounts) as server:
        assert server.client().get("/0/").text == "owner local"
        assert server.client().get("/2/").text == "at the start"
    assert events == ["start", "end"]


def test_an_app_that_cannot_start_ends_the_start_of_the_server():
    @contextlib.asynccontextmanager
    async def fails(app):
        raise ValueError("no such folder")
        yield

    async def main():
        async with lmchat.AsyncChatEngine("memo", store="memory") as engine:
            mount = MountedApp("/page", Starlette(lifespan=fails))
            lifespan = create_app(engine, mounts=[mount]).app.router.lifespan_context
            with pytest.raises(
                RuntimeError, match="a mounted app failed at startup: [^$]*no such folder"
            ):
                async with lifespan(None):
                    pytest.fail("it has started")

    asyncio.run(main())


# --- bodies -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bodies():
    mounts = (
        MountedApp("/small", size),
        MountedApp("/archives", size, body=5000),
        MountedApp("/", size, own_login=True),
    )
    limits = Limits(body=1000, bodies=1500)
    with RunningServer(ServerConfig(limits=limits), mounts=mounts) as server:
        yield server


@pytest.mark.parametrize("path", ["/small/", "/archives/", "/login"])
@pytest.mark.parametrize(
    "kind", [FORM[1], "multipart/form-data; boundary=x", "application/zip", "text/plain"]
)
def test_bodies_below_a_mount_may_have_any_type(bodies, path, kind):
    answer = bodies.client().post(path, content=b"a=b", headers={"Content-Type": kind})
    assert (answer.status_code, answer.text) == (200, f"{kind} 3")


@pytest.mark.parametrize(("path", "most"), [("/small/", 1000), ("/archives/", 5000), ("/x", 1000)])
def test_bodies_below_a_mount_have_its_limit_announced_or_not(bodies, path, most):
    client = bodies.client()
    assert client.post(path, content=b"x" * most).text == f" {most}"
    assert client.post(path, content=b"x" * (most + 1)).status_code == 413
    pieces = iter([b"x" * most, b"x"])
    assert client.post(path, content=pieces).status_code == 413


def test_the_bodies_of_an_app_with_its_own_login_are_bounded_together(bodies):
    whole = http_raw.request("POST", "/login", [HOST, FORM], b"x" * 900)
    client = bodies.client()
    with http_raw.connected(bodies.port) as slow:
        slow.sendall(whole[:-1])
        while client.post("/login", content=b"x" * 900).status_code == 200:
            pass  # until the slow body has arrived
        assert client.post("/login", content=b"x" * 900).status_code == 429
        assert client.post("/small/", content=b"x" * 900).status_code == 200
        assert client.post("/archives/", content=b"x" * 4000).status_code == 200
        slow.sendall(whole[-1:])
        assert http_raw.answer(slow).status == 200
    assert client.post("/login", content=b"x" * 900).status_code == 200


# --- owners, hosts and origins ------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, KEYS])
def test_an_app_with_its_own_login_gets_no_owner(keys):
    mounts = (MountedApp("/mine", owner), MountedApp("/", owner, own_login=True))
    with RunningServer(ServerConfig(keys=keys), mounts=mounts) as server:
        client = server.client()
        assert client.get("/other").text == "owner None"
        answer = client.get("/mine/", headers={"x-api-key": "secret-a"})
        assert answer.text == ("owner ann" if keys else "owner local")


@pytest.mark.parametrize("keys", [{}, KEYS])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_requests_of_other_sites_reach_no_app_with_its_own_login(keys, headers):
    mount = MountedApp("/", owner, own_login=True)
    with RunningServer(ServerConfig(keys=keys), mounts=(mount,)) as server:
        client = server.client()
        assert client.post("/x", headers={"Origin": server.url}).status_code == 200
        refused = client.post("/x", headers={"Cookie": "login=ann", **headers})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "origin"


def test_without_keys_an_app_with_its_own_login_has_the_server_s_hosts():
    mount = MountedApp("/", owner, own_login=True)
    foreign = {"Host": "evil.example"}
    with RunningServer(mounts=(mount,)) as server:
        assert server.client().get("/x", headers=foreign).status_code == 403
    with RunningServer(ServerConfig(keys=KEYS), mounts=(mount,)) as server:
        assert server.client().get("/x", headers=foreign).status_code == 200
        two = http_raw.request("GET", "/x", [HOST, HOST])
        assert http_raw.exchange(server.port, two).status == 400


# --- paths --------------------------------------------------------------------------------------


def test_paths_that_an_app_does_not_claim_are_those_of_the_server():
    mount = MountedApp("/", owner, own_login=True, claims=lambda path: path in ("/", "/page"))
    with RunningServer(ServerConfig(keys=KEYS), mounts=(mount,)) as server:
        client, key = server.client(), {"x-api-key": "secret-a"}
        assert [client.get(path).text for path in ("/", "/page")] == ["owner None"] * 2
        for path in ("/v1/none", "/v1/chat/completions", "/page/x"):
            assert client.get(path).status_code == 401
        assert client.get("/v1/none", headers=key).status_code == 404
        assert (
            client.get("/v1/none", headers=key).json()["error"]["message"]
            == "no such route: GET /v1/none"
        )
        assert client.get("/v1/chat/completions", headers=key).status_code == 405


# --- the end ------------------------------------------------------------------------------------


def test_an_open_stream_of_an_app_is_not_waited_for_but_a_request_without_an_answer_is():
    mounts = (MountedApp("/endless", endless), MountedApp("/size", size))
    with RunningServer(mounts=mounts) as server:
        state = server.app.state
        with server.client().stream("GET", "/endless/") as answer:
            assert next(answer.iter_raw()) == b"begun"
            assert state.in_flight == 0
            with http_raw.connected(server.port) as slow:
                whole = http_raw.request("POST", "/size/", [HOST, FORM], b"x=y")
                slow.sendall(whole[:-1])
                server.call(until(lambda: state.in_flight == 1))
                slow.sendall(whole[-1:])
                assert http_raw.answer(slow).status == 200
            server.call(until(lambda: state.in_flight == 0))
        server.call(until(lambda: not server.uvicorn.server_state.tasks))
        assert state.in_flight == 0


async def until(true):
    while not true():
        await asyncio.sleep(0.01)
