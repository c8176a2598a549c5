"""`lmchat bench serve` against scripted servers: outcomes, requests, report, picture."""

import json
import os
import signal
import sys

import jsonschema
import pytest
from chat_models import make_tokenizer
from scripted_server import (
    Script,
    ScriptedServer,
    delta,
    failure,
    refusal,
    stream,
)
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.cli.bench.serving import serve_plot

FAST = ("--warmup", "0", "--rates", "80", "--duration", "5", "--null-seconds", "0")
SPREAD = {
    "type": ["object", "null"],
    "required": ["count", "median", "p90", "p99"],
    "additionalProperties": {"type": "number"},
}
NUMBER, COUNT = {"type": "number"}, {"type": "integer"}
MAYBE = {"type": ["number", "null"]}
RATE = {
    "rate": NUMBER, "seconds": NUMBER, "sent": COUNT, "rate_reached": NUMBER, "finished": COUNT,
    "refused": COUNT, "failed": COUNT, "interrupted": COUNT, "finished_share": MAYBE,
    "ttft": SPREAD, "tpot": SPREAD, "itl": SPREAD, "event_gap": MAYBE, "total": SPREAD,
    "refusal": SPREAD, "retry_after": SPREAD, "output_tokens_per_second": NUMBER,
    "input_tokens_per_second": NUMBER, "good": COUNT, "goodput": NUMBER, "prompt_tokens": MAYBE,
    "cached_tokens": MAYBE, "output_tokens": COUNT, "streams": {"type": "object"},
    "errors": {"type": "object"}, "lag": SPREAD, "lagging": {"type": "boolean"},
    "client_cpu": NUMBER,
}  # fmt: skip
TEXT = {"type": "string"}
REPORT = {
    "format": {"const": 1}, "date": TEXT, "url": TEXT, "model": TEXT, "server": TEXT,
    "plan": {"type": "object"}, "lengths": {"type": "object"}, "tokens_per_word": NUMBER,
    "token_source": {"enum": ["tokenize", "usage", "words"]}, "reports": {"type": "object"},
    "fields": {"type": "object"}, "warmup_seconds": NUMBER, "capacity": MAYBE,
    "rates": {"type": "array", "items": {"type": "object"}},
    "overhead": {"type": ["object", "null"]}, "sessions_deleted": {"type": ["integer", "null"]},
    "interrupted": {"type": "boolean"},
}  # fmt: skip


def run(*arguments, code=0, env=None):
    words = [str(each) for each in arguments]
    done = CliRunner().invoke(app, ["bench", "serve", *words], env=env or {})
    if code == 0 and done.exception is not None:
        raise done.exception
    if code:
        assert done.exit_code == code
    return done


def refused(*arguments):
    """Returns the message of the error that a command raises."""
    done = CliRunner().invoke(app, ["bench", "serve", *(str(each) for each in arguments)])
    assert done.exception is not None
    return str(done.exception)


def report_of(answer, *options, requests=6, tokenizer="prompt", env=None, code=0):
    """Returns the report of one rate on a scripted server, and the server."""
    with ScriptedServer(answer, tokenizer) as server:
        bounds = (*FAST, "--requests", str(requests), "--json")
        done = run(server.url, *bounds, *options, env=env, code=code)
        return json.loads(done.stdout), server


def good(*_):
    return stream("a", " b", " c", counted=(9, 3, 4))


def closed(schema, required):
    return {
        "type": "object", "properties": schema, "required": required, "additionalProperties": False,
    }  # fmt: skip


def test_the_report_has_the_documented_fields():
    report, server = report_of(good, "--null-seconds", "0.1")
    jsonschema.validate(report, closed(REPORT, [*REPORT]))
    for rate in report["rates"]:
        jsonschema.validate(rate, closed(RATE, [*RATE]))
    (rate,) = report["rates"]
    assert (rate["sent"], rate["finished"], rate["output_tokens"]) == (6, 6, 18)
    assert (rate["cached_tokens"], rate["prompt_tokens"]) == (24, 54)
    assert (report["model"], report["server"]) == ("scripted", "scripted")
    assert report["capacity"] == 80
    assert report["token_source"] == "tokenize"
    assert report["overhead"]["streams"] >= 1
    sent = server.completions[-1].body
    assert sent["stream_options"] == {"include_usage": True}
    assert (sent["max_tokens"], sent["ignore_eos"], sent["temperature"]) == (128, True, 0)


def test_outcomes_are_counted_and_shown_with_an_example():
    scripts = {
        1: refusal(3),
        2: failure(500, "the engine is gone"),
        3: Script(events=[delta("a"), {"error": {"message": "broken", "code": 500}}]),
        4: stream("a", ends="cut"),
        5: Script(body={"choices": []}),
        6: stream("a", ends="never"),
        7: Script(events=[delta("a"), {"error": {"message": "full", "code": "overloaded"}}]),
        8: Script(events=["data: oops"]),
        9: stream(),
        10: stream("a", ends="early"),
        11: good(),
    }
    report, _ = report_of(
        lambda _, n: scripts.get(n, good()), "--timeout", "1.5", requests=len(scripts)
    )
    (rate,) = report["rates"]
    assert (rate["sent"], rate["finished"], rate["refused"], rate["failed"]) == (11, 1, 2, 8)
    assert {kind: found["count"] for kind, found in rate["errors"].items()} == {
        "status 500": 1, "error in the stream": 1, "disconnected": 2, "not an event stream": 1,
        "timeout": 1, "malformed event": 1, "empty reply": 1,
    }  # fmt: skip
    assert "the engine is gone" in rate["errors"]["status 500"]["example"]
    assert rate["retry_after"]["median"] == 3
    assert rate["refusal"]["count"] == 2
    assert report["capacity"] is None


def test_the_table_shows_counts_errors_and_capacity():
    answers = {3: refusal(), 4: failure(503, "drained")}
    with ScriptedServer(lambda _, n: answers.get(n, good())) as server:
        shown = run(server.url, *FAST, "--requests", "5").stdout
    row = next(line for line in shown.splitlines() if line.strip().startswith("80 "))
    assert row.split()[2:6] == ["5", "3", "1", "1"]
    assert "capacity: below the lowest rate" in shown
    assert "1 x status 503, such as: status 503: drained" in shown
    assert "goodput: output tokens/s of turns with TTFT <= 1 s and TPOT <= 150 ms" in shown


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        (stream("ab", "cd", counted=(5, 8)), 8),
        (stream("ab", "cd", ids=3), 6),
        (stream("ab", "cd"), 2),
    ],
)
def test_tokens_come_from_usage_else_ids_else_events(script, tokens):
    report, _ = report_of(lambda *_: script, requests=2)
    assert report["rates"][0]["output_tokens"] == 2 * tokens
    assert report["reports"]["usage"] == (tokens == 8)


def test_conversations_resend_the_history():
    def answer(request, number):
        return stream(f"r{len(request.body['messages'])}", counted=(1, 1))

    _, server = report_of(answer, "--turns", "3", "--think", "0", "--rates", "50", requests=60)
    sent = [[m["content"] for m in r.body["messages"]] for r in server.completions[1:]]
    longest = [texts for texts in sent if len(texts) == 5]
    assert longest
    for texts in longest:
        assert texts[1::2] == ["r1", "r3"]
        assert texts[:3] in sent
    assert all("x-session-id" not in r.headers for r in server.completions)


def test_sessions_get_new_messages_only_and_are_deleted():
    options = ("--turns", "2", "--think", "0", "--sessions")
    report, server = report_of(good, *options, requests=40)
    measured = server.completions[1:]  # the first has no session: it looks at the server
    names = [r.headers["x-session-id"] for r in measured]
    assert max(names.count(name) for name in names) == 2
    assert all(len(r.body["messages"]) == 1 for r in measured)
    assert sorted(server.deleted) == sorted(server.sessions.values())
    assert report["sessions_deleted"] == len(set(names))


def test_the_completions_route_gets_prompts():
    def answer(request, number):
        return Script(events=[{"choices": [{"text": "x", "finish_reason": "length"}]}])

    report, server = report_of(answer, "--endpoint", "completions")
    assert report["rates"][0]["finished"] == 6
    assert {r.path for r in server.completions} == {"/v1/completions"}
    assert all(isinstance(r.body["prompt"], str) for r in server.completions)


def test_a_refused_optional_field_is_left_out():
    def answer(request, number):
        for name in ("stream_options", "ignore_eos"):
            if name in request.body:
                return failure(400, f"unknown field: {name}")
        return stream("a", counted=(1, 1))

    report, server = report_of(answer)
    assert report["fields"] == {"ignore_eos": False, "stream_options": False}
    assert report["rates"][0]["finished"] == 6
    assert not {"stream_options", "ignore_eos"} & server.completions[-1].body.keys()


@pytest.mark.parametrize(
    ("options", "env", "key"),
    [
        (("--api-key", "one"), {"LMCHAT_API_KEY": "two"}, "bearer one"),
        ((), {"LMCHAT_API_KEY": "two", "OPENAI_API_KEY": "three"}, "bearer two"),
        ((), {"LMCHAT_API_KEY": "", "OPENAI_API_KEY": "three"}, "bearer three"),
    ],
)
def test_the_key_is_that_of_the_option_else_of_the_environment(options, env, key):
    _, server = report_of(good, *options, requests=1, env=env)
    assert {r.headers["authorization"] for r in server.requests} == {key}


def test_a_key_is_not_in_the_report():
    report, _ = report_of(good, "--api-key", "secret-key", requests=1)
    assert "secret-key" not in json.dumps(report)


@pytest.mark.parametrize("tokenizer", ["prompt", "content"])
def test_messages_have_the_tokens_that_the_server_counts(tokenizer):
    options = ("--message-tokens", "17")
    report, server = report_of(good, *options, requests=3, tokenizer=tokenizer)
    assert report["token_source"] == "tokenize"
    for request in server.completions[1:]:
        assert len(request.body["messages"][0]["content"].split()) == 17


def test_without_a_tokenizer_usage_tells_the_tokens_of_a_word():
    def answer(request, number):
        words = len(request.body["messages"][0]["content"].split())
        return stream("a", counted=(7 + 2 * words, 1))

    report, server = report_of(answer, "--message-tokens", "20", requests=2, tokenizer=None)
    assert (report["token_source"], report["tokens_per_word"]) == ("usage", 2)
    assert len(server.completions[-1].body["messages"][0]["content"].split()) == 10


def test_lengths_come_from_questions_and_traces(tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"turns": ["a b c", "d e f"]}\n')
    _, server = report_of(good, "--questions", questions, requests=2)
    assert len(server.completions[-1].body["messages"][0]["content"].split()) == 3
    tokenizer = make_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ["--questions", questions, "--tokenizer", tmp_path / "tokenizer.json"]
    _, server = report_of(good, *options, requests=2)
    expected = {len(tokenizer.encode(text).ids) for text in ("a b c", "d e f")}
    assert len(server.completions[-1].body["messages"][0]["content"].split()) in expected - {3}
    trace = tmp_path / "t.csv"
    rows = "".join(f"2023-11-16 18:15:{s:02}.5,6,44\n" for s in range(3))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    report, server = report_of(good, "--trace", trace, "--arrivals", "trace", requests=2)
    body = server.completions[-1].body
    assert len(body["messages"][0]["content"].split()) == 6
    assert body["max_tokens"] == 44
    assert report["plan"]["arrivals"] == "trace"


def test_ctrl_c_keeps_the_results_so_far():
    def answer(request, number):
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
            return stream("a", ends="never")
        return good()

    report, _ = report_of(answer, "--rates", "80,90", requests=400, code=130)
    assert report["interrupted"]
    (rate,) = report["rates"]
    assert rate["finished"] >= 1
    assert rate["interrupted"] >= 1
    assert rate["failed"] == 0


def test_several_reports_are_plotted_in_one_picture(tmp_path):
    path = tmp_path / "both.png"
    saved = tmp_path / "r.json"
    report, _ = report_of(lambda _, n: good() if n < 3 else refusal(), "--save", saved)
    assert json.loads(saved.read_text()) == report
    report["rates"].append({**report["rates"][0], "rate": 90, "ttft": None, "tpot": None})
    saved.write_text(json.dumps(report))
    run("--compare", f"a={saved}", "--compare", f"b={saved}", "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    with ScriptedServer(good) as server:
        options = ("--requests", "2", "--compare", f"a={saved}", "--plot", path)
        run(server.url, *FAST, *options)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "lmchat[plots]" in refused("http://127.0.0.1:1", "--plot", tmp_path / "x.png")


def test_reports_to_compare_are_checked(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": 0, "rates": []}')
    for pairs, message in (
        (["x"], "expected NAME=FILE"),
        ([f"x={bad}"], "its format is 0, expected 1"),
        ([f"x={tmp_path / 'none'}"], "expected a file that --save or --json wrote"),
    ):
        with pytest.raises(Exception, match=message):
            serve_plot.read_reports(pairs)
    assert "URL is missing" in refused()
    assert "expected --plot with them" in refused("http://x", "--compare", f"x={bad}")
    assert "ends in .png" in refused("http://x", "--plot", "x.pdf")
    assert "--save is" in refused("http://x", "--save", tmp_path / "none" / "r.json")


def test_a_server_that_cannot_be_measured_is_an_error():
    assert "cannot connect" in refused("http://127.0.0.1:1", *FAST)
    with ScriptedServer(lambda *_: failure(401, "no key")) as server:
        assert "does not answer a short request: status 401: no key" in refused(server.url, *FAST)
        assert "the server lists no model" in refused(f"{server.url}/other", *FAST)
    with ScriptedServer(good) as server:
        assert "--rates is '0'" in refused(server.url, "--rates", "0")
