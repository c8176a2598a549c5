"""Parameters of paths, queries and headers: declared for the OpenAPI page, refused by name."""

import re

import pytest
from http_server import RunningServer

from lmchat.server import ServerConfig


@pytest.fixture(scope="module")
def server():
    with RunningServer(ServerConfig(keys={"a": "ann"})) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client("a")


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def declared(document, path, method="get"):
    """Returns the places of a route's parameters, by name."""
    return {one["name"]: one["in"] for one in document["paths"][path][method].get("parameters", ())}


def test_every_route_declares_the_parameters_of_its_path(document):
    for path, methods in document["paths"].items():
        names = set(re.findall(r"\{(\w+)\}", path))
        for method in methods:
            found = declared(document, path, method)
            assert {name for name, place in found.items() if place == "path"} == names, path


@pytest.mark.parametrize(
    ("path", "method", "query", "headers"),
    [
        ("", "get", "limit after search tag name residence hidden", ""),
        ("", "post", "details", ""),
        (
            "/{session_id}",
            "get",
            "residence token_ids details refresh state new_tokens known dropped",
            "if-none-match",
        ),
        ("/{session_id}", "patch", "details", "if-match"),
        ("/{session_id}/turns", "post", "", "Idempotency-Key"),
        ("/{session_id}/events", "get", "token_ids turn", "last-event-id"),
        ("/{session_id}/branches", "get", "turn details", ""),
        ("/{session_id}/conversation", "get", "reply details", ""),
        ("/{session_id}/export", "get", "pages", ""),
        ("/import", "post", "name pages details", ""),
    ],
)
def test_routes_of_sessions_declare_queries_and_headers(document, path, method, query, headers):
    found = declared(document, f"/v1/sessions{path}", method)
    expected = dict.fromkeys(query.split(), "query") | dict.fromkeys(headers.split(), "header")
    assert {name: place for name, place in found.items() if place != "path"} == expected


def test_routes_of_responses_declare_their_queries(document):
    page = {"limit": "query", "order": "query", "after": "query"}
    of_response = {"response_id": "path"}
    response = "/v1/responses/{response_id}"
    assert declared(document, f"{response}/input_items") == of_response | page
    assert declared(document, response) == of_response | {
        "stream": "query",
        "starting_after": "query",
    }


def test_the_document_says_where_a_key_goes(document):
    assert document["components"]["securitySchemes"].keys() == {"Bearer", "x-api-key"}
    assert document["security"] == [{"Bearer": []}, {"x-api-key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]
    with RunningServer() as keyless:
        found = keyless.client().get("/openapi.json").json()["security"]
    assert found[-1] == {}


@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        ("/v1/sessions", "limit", ("0", "101", "x", "", "1.5", "9" * 40)),
        ("/v1/sessions", "residence", ("maybe", "", "2")),
        ("/v1/sessions/ID", "known", ("-1", "x", "1" * 10)),
        ("/v1/sessions/ID", "new_tokens", ("0", "-1", "x")),
        ("/v1/sessions/ID/branches", "turn", ("-1", "x", "")),
        ("/v1/sessions/ID/conversation", "reply", ("-1", "x", "")),
        ("/v1/sessions/ID/events", "turn", ("-1", "x")),
        ("/v1/sessions/ID/export", "pages", ("x",)),
        ("/v1/conversations/conv_ID/items", "limit", ("0", "101", "x")),
        ("/v1/conversations/conv_ID/items", "order", ("up", "")),
        ("/v1/conversations/conv_ID/items", "after", ("x",)),
    ],
)
def test_wrong_values_are_refused_by_name(client, path, name, values):
    made = client.post("/v1/sessions", json={}).json()["id"]
    for value in values:
        answer = client.get(path.replace("ID", made), params={name: value})
        assert answer.status_code == 400, value
        error = answer.json()["error"]
        assert error["param"] == name
        assert name in error["message"]
        assert value[:20] in error["message"]
    client.delete(f"/v1/sessions/{made}")


def test_a_missing_parameter_is_refused_by_name(client):
    made = client.post("/v1/sessions", json={}).json()["id"]
    for path, name in (("branches", "turn"), ("conversation", "reply")):
        error = client.get(f"/v1/sessions/{made}/{path}").json()["error"]
        assert (error["code"], error["param"]) == ("missing_field", name)


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_a_wrong_idempotency_key_is_refused(client, key):
    made = client.post("/v1/sessions", json={}).json()["id"]
    answer = client.post(
        f"/v1/sessions/{made}/turns", json={"text": "x"}, headers={"Idempotency-Key": key}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].lower() == "idempotency-key"


@pytest.mark.parametrize("name", ["memo", "other"])
@pytest.mark.parametrize("version", ["", "/versions/1", "/versions/2"])
def test_a_model_is_served_under_its_name_and_version_alone(client, name, version):
    expected = 200 if name == "memo" and not version.endswith("2") else 404
    for ending in ("", "/ready", "/config"):
        answer = client.get(f"/v2/models/{name}{version}{ending}", params={"version": "2"})
        assert answer.status_code == expected
