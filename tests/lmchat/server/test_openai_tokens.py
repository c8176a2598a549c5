"""Models, and vLLM's routes for tokens."""

import shutil

import pytest
from http_server import RunningServer
from openai_bodies import refused

from lmchat.bundled import FOLDER
from lmchat.server import ServerConfig

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server():
    with RunningServer() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def test_the_model_has_its_context(server, client):
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("memo", server.engine.max_context)
    assert client.get("/v1/models/memo").json() == card
    assert client.get("/v1/models/other").status_code == 404


def test_a_path_is_no_name(tmp_path):
    folder = tmp_path / "my-model"
    shutil.copytree(FOLDER, folder)
    with RunningServer(model=str(folder)) as server:
        assert str(tmp_path) not in server.client().get("/v1/models").text
        assert server.client().get("/v1/models").json()["data"][0]["id"] == "my-model"


def test_another_name_is_served():
    with RunningServer(ServerConfig(model_name="gpt-4")) as server:
        client = server.client()
        for name, status in (("gpt-4", 200), ("memo", 200), ("gpt-5", 404)):
            body = {"model": name, "prompt": "Hi", "max_tokens": 1}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == status
        assert client.get("/v1/models").json()["data"][0]["id"] == "gpt-4"


def test_tokens_of_a_text(server, client):
    tokenizer = server.engine.tokenizer
    found = client.post("/tokenize", json={"prompt": "Hello you", "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode("Hello you")
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == server.engine.max_context
    assert "".join(found["token_strs"]).strip() == "Hello you"
    body = {"prompt": "Hello you", "add_special_tokens": False}
    bare = tokenizer.encode("Hello you", add_special_tokens=False)
    assert client.post("/tokenize", json=body).json()["tokens"] == bare


def test_tokens_of_a_conversation(server, client):
    found = client.post("/tokenize", json={"messages": MESSAGES}).json()
    text = server.engine.tokenizer.raw(found["tokens"])
    assert text == "<|begin|><|user|>Hi<|end|><|assistant|>"
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == found["tokens"][:-1]
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == found["count"]


def test_text_of_tokens(client):
    ids = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == "<|begin|><|user|>Hi<|end|><|assistant|>"
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "more": 1}, "more"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_wrong_body_is_refused(client, path, body, param):
    error = refused(client, path, body)
    if param is not None:
        assert error["param"] == param


def test_the_openapi_page_has_examples(client):
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            assert client.post(path, json=example["value"]).status_code == 200
