"""Background responses of a server that ends or is killed, as the next server has them."""

import signal

import httpx
import pytest
from serving_process import poll_ready, serving

LONG = {"input": "Tell me more.", "background": True, "stream": True, "ignore_eos": True}


def begun(url):
    """Returns the id and the first text of a long response that goes on in the background."""
    text, made = "", ""
    first = {"input": "Hello.", "max_output_tokens": 4}
    previous = httpx.post(f"{url}/v1/responses", json=first, timeout=60).json()["id"]
    body = {**LONG, "previous_response_id": previous, "instructions": "Be brief."}
    with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                event = httpx.Response(200, content=line.removeprefix("data: ")).json()
                made = made or event["response"]["id"]
                text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            if len(text) > 20:
                break
    return made, text


@pytest.mark.parametrize(
    ("end", "status"), [(signal.SIGKILL, "failed"), (signal.SIGTERM, "cancelled")]
)
def test_the_next_server_has_what_was_generated(end, status):
    with serving("--drain-seconds", "0") as (process, url):
        made, text = begun(url)
        process.send_signal(end)
        process.wait(60)
    with serving() as (_, url):
        found = httpx.get(f"{url}/v1/responses/{made}").json()
        assert found["status"] == status
        assert found["background"] is True
        assert found["instructions"] == "Be brief."
        items = httpx.get(f"{url}/v1/responses/{made}/input_items").json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user", "system"]
        assert found["output"][-1]["content"][0]["text"].startswith(text)
        body = {"input": "Go on.", "previous_response_id": made, "max_output_tokens": 4}
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
        assert answer.status_code == 200


def test_a_response_in_the_background_is_waited_for():
    with serving() as (process, url):
        body = {**LONG, "max_output_tokens": 300, "stream": False}
        made = httpx.post(f"{url}/v1/responses", json=body, timeout=60).json()["id"]
        process.send_signal(signal.SIGTERM)
        poll_ready(url)
        assert httpx.get(f"{url}/v1/responses/{made}").status_code == 200
        assert process.wait(60) == 0
    with serving() as (_, url):
        found = httpx.get(f"{url}/v1/responses/{made}").json()
        assert found["usage"]["output_tokens"] == 300
