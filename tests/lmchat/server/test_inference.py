"""The Open Inference Protocol and Triton's generate, by Triton's own client and by hand."""

import json
import re

import numpy as np
import pytest
import tritonclient.http as triton
from http_server import RunningServer

from lmchat.server import Limits, ServerConfig

PROMPT = "What is a page table?"
SETTINGS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running


@pytest.fixture(scope="module")
def expected(server):
    return server.call(
        server.engine.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    )


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found


def texts(*values, name="text_input", binary=True):
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([v.encode() for v in values], np.object_), binary)
    return tensor


def flag(name, value=True):
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def infer(client, *inputs, outputs=None, **settings):
    return client.infer("memo", list(inputs), outputs=outputs, parameters=settings or SETTINGS)


def test_health_and_metadata_satisfy_the_client(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("memo")
    assert client.is_model_ready("memo", "1")
    assert client.get_server_metadata()["name"] == "lmchat"
    named = client.get_model_metadata("memo")
    assert next(one["name"] for one in named["inputs"]) == "text_input"
    config = client.get_model_config("memo")
    assert {one["name"] for one in config["output"]} == {one["name"] for one in named["outputs"]}


def test_the_default_length_is_cut_to_the_room(server, client):
    most, token = server.engine.max_context, "word "
    each = len(server.engine.tokenizer.encode(token * 101)) - len(
        server.engine.tokenizer.encode(token * 100)
    )
    count = (most - 8) // each
    prompt = token * count
    while len(server.engine.tokenizer.encode(prompt)) > most - 4:
        prompt = prompt.removesuffix(token)
    room = most - len(server.engine.tokenizer.encode(prompt))
    assert room < 16
    outputs = [
        triton.InferRequestedOutput("num_output_tokens"),
        triton.InferRequestedOutput("finish_reason"),
    ]
    result = infer(
        client,
        texts(prompt),
        outputs=outputs,
        ignore_eos=True,
        temperature=0,
        return_num_output_tokens=True,
        return_finish_reason=True,
    )
    assert result.as_numpy("num_output_tokens").tolist() == [room]


@pytest.mark.parametrize("binary", [True, False])
def test_infer_continues_the_prompt(client, expected, binary):
    outputs = [triton.InferRequestedOutput("text_output", binary_data=binary)]
    result = infer(client, texts(PROMPT, binary=binary), outputs=outputs)
    assert result.as_numpy("text_output").tolist()[0] in (
        PROMPT + expected.text,
        (PROMPT + expected.text).encode(),
    )
    assert ("data" in result.get_output("text_output")) is not binary


def test_infer_takes_several_prompts_and_settings_as_a_tensor(client, expected):
    result = client.infer(
        "memo",
        [
            texts(PROMPT, PROMPT),
            texts(json.dumps({**SETTINGS, "max_tokens": "12"}), name="sampling_parameters"),
            flag("exclude_input_in_output"),
            flag("return_finish_reason"),
            flag("return_num_output_tokens"),
            flag("return_cumulative_logprob"),
        ],
    )
    assert [one.decode() for one in result.as_numpy("text_output")] == [expected.text] * 2
    assert result.as_numpy("finish_reason").tolist() == [b"length", b"length"]
    assert result.as_numpy("num_output_tokens").tolist() == [12, 12]
    sums = result.as_numpy("cumulative_logprob")
    assert sums[0] == sums[1] < 0


def test_requested_outputs_alone_are_sent(client, server):
    outputs = [triton.InferRequestedOutput("num_input_tokens")]
    result = infer(client, texts(PROMPT), outputs=outputs)
    prompt = server.engine.tokenizer.encode(PROMPT)
    assert result.as_numpy("num_input_tokens").tolist() == [len(prompt)]
    assert result.as_numpy("text_output") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -1}, "temperature is -1"),
        ({"priority": 3}, "priority"),
        ({"stop": ["x"] * 17}, "stop strings"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"stream": True}, "generate_stream"),
    ],
)
def test_wrong_settings_are_refused_by_name(server, settings, message):
    answer = server.client().post(
        "/v2/models/memo/infer",
        json={
            "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}],
            "parameters": settings,
        },
    )
    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    ("tensor", "body", "message"),
    [
        ({"shape": [2], "data": ["x"]}, b"", "has 1 values, expected 2"),
        ({"shape": [1], "data": [3]}, b"", "not of type BYTES"),
        ({"shape": [1 << 31], "data": []}, b"", "shape"),
        ({"shape": [1], "parameters": {"binary_data_size": 9}}, b"\1\0\0\0x", "missing"),
        ({"shape": [1], "parameters": {"binary_data_size": 5}}, b"\2\0\0\0x", "cut off"),
        ({"shape": [1], "parameters": {"binary_data_size": 5}}, b"\1\0\0\0\xff", "UTF-8"),
        ({"shape": [1], "parameters": {"binary_data_size": 5}}, b"\1\0\0\0xy", "1 bytes follow"),
        ({"shape": [1], "datatype": "FP64", "data": [1.0]}, b"", "datatype"),
        ({"shape": [1], "name": "prompt", "data": ["x"]}, b"", "unknown input 'prompt'"),
    ],
)
def test_wrong_tensors_are_refused(server, tensor, body, message):
    head = json.dumps({"inputs": [{"name": "text_input", "datatype": "BYTES", **tensor}]}).encode()
    answer = server.client().post(
        "/v2/models/memo/infer",
        content=head + body,
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_an_unknown_model_or_version_is_refused(client, server):
    with pytest.raises(
        triton.InferenceServerException, match="unknown model or version, expected 'memo'"
    ):
        client.get_model_metadata("other")
    answer = server.client().get("/v2/models/memo/versions/2")
    assert answer.status_code == 404
    assert "version" in answer.json()["error"]


@pytest.mark.parametrize("nested", [True, False])
def test_generate_takes_settings_nested_or_beside(server, expected, nested):
    body = {"text_input": PROMPT, "id": "a", **({"parameters": SETTINGS} if nested else SETTINGS)}
    answer = server.client().post("/v2/models/memo/generate", json=body).json()
    assert answer == {
        "model_name": "memo",
        "model_version": "1",
        "id": "a",
        "text_output": PROMPT + expected.text,
    }


def test_generate_stream_sends_the_reply_in_parts(server, expected):
    body = {"text_input": PROMPT, **SETTINGS, "return_num_output_tokens": True}
    parts = []
    with server.client().stream("POST", "/v2/models/memo/generate_stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                parts.append(json.loads(line.removeprefix("data: ")))
    assert "".join(part["text_output"] for part in parts) == expected.text
    assert parts[-1]["num_output_tokens"] == 12
    assert len(parts) > 2


def test_a_refusal_of_generate_stream_has_its_own_status(server):
    body = {"text_input": PROMPT, "max_tokens": 0}
    answer = server.client().post("/v2/models/memo/generate_stream", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("max_tokens is 0, expected ")


def test_texts_of_settings_stay_texts(server):
    found = server.client().post(
        "/v2/models/memo/generate",
        json={
            "text_input": "1 2 3 4",
            "sampling_parameters": {"stop": "5", "max_tokens": "30", "ignore_eos": "true"},
            "exclude_input_in_output": True,
        },
    )
    assert found.status_code == 200
    assert "5" not in found.json()["text_output"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([{"name": "text_input", "shape": [65], "data": ["x"] * 65}], "at most 64"),
        ([{"name": "text_input", "shape": [1], "data": [["x"]] * 3}], "more values"),
        ([{"name": "text_input", "shape": [1], "data": [[]] * 1000}], "more values|has 0 values"),
        ([{"name": str(i), "shape": [1], "data": ["x"]} for i in range(65)], "inputs"),
    ],
)
def test_large_tensors_are_refused(server, tensors, message):
    body = {"inputs": [{"datatype": "BYTES", **one} for one in tensors]}
    answer = server.client().post("/v2/models/memo/infer", json=body)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"])


def test_a_stream_that_is_none_is_refused(server):
    body = {"text_input": PROMPT, "stream": False}
    answer = server.client().post("/v2/models/memo/generate_stream", json=body)
    assert answer.status_code == 400
    assert "stream is false" in answer.json()["error"]


def test_every_error_is_one_that_the_client_reads():
    config = ServerConfig(keys={"a": "ann"}, limits=Limits(body=1000))
    with RunningServer(config, max_batch_size=1, max_queue=0) as server:
        url, key = f"127.0.0.1:{server.port}", {"Authorization": "Bearer a"}
        with triton.InferenceServerClient(url) as client:
            with pytest.raises(triton.InferenceServerException, match="401.*API key"):
                client.get_server_metadata()
            with pytest.raises(triton.InferenceServerException, match="413.*larger"):
                client.infer("memo", [texts("x" * 2000)], headers=key)
            running = server.engine.sync.start_generate("x", owner="ann", ignore_eos=True)
            with pytest.raises(triton.InferenceServerException, match="429.*waiting"):
                client.infer("memo", [texts("x")], headers=key)
            answer = server.client("a").post("/v2/models/memo/generate", json={"text_input": "x"})
            assert int(answer.headers["retry-after-ms"]) > 0
            running.cancel()
        assert isinstance(server.client("a").get("/v2/nothing").json()["error"], str)


def test_the_openapi_page_has_examples(server):
    paths = server.client().get("/openapi.json").json()["paths"]
    for path in ("infer", "generate", "generate_stream"):
        post = paths[f"/v2/models/{{model}}/{path}"]["post"]
        assert post["requestBody"]["content"]["application/json"]["example"]


def test_a_disconnect_ends_the_generation(server):
    body = {"text_input": PROMPT, "max_tokens": 900, "ignore_eos": True}
    client = server.client()
    with client.stream("POST", "/v2/models/memo/generate_stream", json=body) as answer:
        next(answer.iter_lines())
        assert server.engine.sync.stats().slots == 1
    client.close()
    while server.engine.sync.stats().slots:
        pass
    assert server.engine.sync.stats().tokens_decoded < 900
