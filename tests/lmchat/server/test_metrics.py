"""Each metric changes as it should, and the dashboard names only metrics that exist."""

import asyncio
import json
import re
import threading
from dataclasses import replace

import http_raw
import pytest
from assets import ROOT
from http_server import RunningServer
from prometheus_client.parser import text_string_to_metric_families

from lmchat.errors import InternalError, Overloaded
from lmchat.generation.generation import Reply
from lmchat.server.loop_lag import watched
from lmchat.server.metrics import buckets_of_tokens
from lmchat.store.turns import Timings, Usage
from turbomind import RankStats

DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def server():
    with RunningServer(host_memory="8MiB", max_queue=0, max_batch_size=1) as running:
        yield running


def read(server) -> dict[tuple[str, ...], float]:
    """Returns the samples by name and labels, without the model's."""
    text = server.client().get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "memo"
            name = sample.name.removeprefix("lmchat:")
            assert name != sample.name
            found[(name, *sorted(labels.values()))] = sample.value
    return found


class Changes:
    """How much each sample has changed since it was made."""

    def __init__(self, server):
        self.server, self.before = server, read(server)

    def __getitem__(self, key):
        key = key if isinstance(key, tuple) else (key,)
        return read(self.server)[key] - self.before[key]


def generate(server, text="Once upon a time", **settings):
    body = {"text_input": text, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **settings}
    answer = server.client().post("/v2/models/memo/generate", json=body)
    assert answer.status_code == 200, answer.text


def test_a_request_is_counted_with_its_times_and_tokens(server):
    changes = Changes(server)
    generate(server)
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_time_per_output_token_seconds", "request_prompt_tokens",
        "request_generation_tokens",
    ):  # fmt: skip
        assert changes[f"{name}_count"] == 1, name
    assert changes["request_generation_tokens_sum"] == 8
    assert changes["inter_token_latency_seconds_count"] == 7
    assert changes["request_success_total", "length"] == 1
    assert changes["generation_tokens_total"] == 8
    assert changes["prompt_tokens_total"] == changes["request_prompt_tokens_sum"] > 0
    assert changes["prefix_cache_queries_total"] == changes["prompt_tokens_total"]
    assert (
        0 < changes["time_to_first_token_seconds_sum"] <= changes["e2e_request_latency_seconds_sum"]
    )


def test_a_repeated_prompt_is_a_hit(server):
    generate(server, "word " * 200)
    changes = Changes(server)
    generate(server, "word " * 200)
    assert 0 < changes["prefix_cache_hits_total"] < changes["prefix_cache_queries_total"]


def test_gauges_show_what_runs_and_waits(server):
    async def run():
        session = await server.engine.session()
        stream = session.stream("Hello!", max_new_tokens=1500, ignore_eos=True)
        async with stream:
            await anext(stream)
            running.set()
            await asyncio.to_thread(seen.wait, 60)
        await session.delete()

    running, seen = threading.Event(), threading.Event()
    task = asyncio.run_coroutine_threadsafe(run(), server.loop)
    running.wait(60)
    found = read(server)
    body = {"text_input": "x"}
    refused = server.client().post("/v2/models/memo/generate", json=body)
    changes = read(server)
    seen.set()
    task.result(60)
    assert found["num_requests_running",] == 1
    assert found["num_requests_waiting",] == 0
    assert found["sessions", "decode"] == 1
    assert 0 < found["kv_cache_usage_perc",] < 1
    assert found["kv_bytes", "device"] > 0
    assert found["open_handles",] >= 1
    assert refused.status_code == 429
    assert changes["requests_refused_total",] - found["requests_refused_total",] == 1
    assert changes["http_responses_total", "429"] - found["http_responses_total", "429"] == 1
    assert read(server)["sessions", "decode"] == 0


def test_turns_count_the_tokens_that_they_compute_again(server):
    metrics = server.app.state.metrics
    changes = Changes(server)
    reply = Reply(
        "x", "", [1, 2], "stop", Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=2),
        Timings(ttft=0.5, tpot=0.1, total=0.6),
    )  # fmt: skip
    metrics.ended(reply, 90)
    metrics.ended(reply, 50)
    metrics.ended(replace(reply, usage=replace(reply.usage, loaded_tokens=7)), 61, True)
    metrics.ended(reply)
    assert changes["turn_recomputed_tokens_count"] == 3
    assert changes["turn_recomputed_tokens_sum"] == 29
    assert changes["session_resume_seconds_count"] == 2
    assert changes["session_resume_seconds_sum"] == 1.0
    assert changes["sessions_taken_over_total"] == 1
    assert changes["taken_over_loaded_tokens_total"] == 7
    assert changes["taken_over_recomputed_tokens_total"] == 0


def test_a_session_reports_its_turns(server):
    async def chat():
        session = await server.engine.session()
        for text in ("Hello!", "And then?"):
            await session.send(text, max_new_tokens=4)
        await session.delete()

    changes = Changes(server)
    server.call(chat())
    assert changes["turn_recomputed_tokens_count"] == 2
    assert changes["turn_recomputed_tokens_sum"] == 0
    assert changes["session_resume_seconds_count"] == 0


def test_ends_are_counted_by_their_reason(server):
    metrics = server.app.state.metrics
    changes = Changes(server)
    for reason in ("stop", "cancelled", "error"):
        metrics.ended(Reply("", "", [], reason, Usage(), Timings()))
    metrics.failed(InternalError("x"))
    metrics.failed(Overloaded("x"))
    found = {reason: changes["request_success_total", reason] for reason in ("stop", "abort")}
    assert found == {"stop": 1, "abort": 1}
    assert changes["request_success_total", "error"] == 2
    assert changes["time_to_first_token_seconds_count"] == 0


def test_refused_turns_are_no_errors(server):
    def refuse(_tree):
        raise LookupError("refused")

    async def checked():
        session = await server.engine.session()
        with pytest.raises(LookupError):
            await asyncio.to_thread(session.sync.start_send, "Hello!", check=refuse)
        await session.delete()

    client, changes = server.client(), Changes(server)
    path = f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['id']}"
    assert client.post(f"{path}/turns", json={"text": "word " * 5000}).status_code == 400
    server.call(checked())
    assert client.delete(path).is_success
    assert changes["request_success_total", "error"] == 0


def test_counters_of_the_core_are_shown(server, monkeypatch):
    sync = server.engine.sync
    stats = sync.stats()
    host = replace(stats.tiers["host"], bytes=12345)
    more = replace(
        stats,
        preemptions=stats.preemptions + 2,
        tokens_recomputed=stats.tokens_recomputed + 3,
        tokens_loaded=stats.tokens_loaded + 5,
        tiers={"host": host},
        weight_bytes=100,
        ranks=(RankStats(30, 4), RankStats(31, 5)),
    )
    changes = Changes(server)
    monkeypatch.setattr(sync, "stats", lambda: more)
    assert changes["num_preemptions_total"] == 2
    assert changes["recomputed_tokens_total"] == 3
    assert changes["loaded_tokens_total"] == 5
    found = read(server)
    assert found["kv_bytes", "host"] == 12345
    assert found["rank_memory_bytes", "0"] == 34
    assert found["rank_memory_bytes", "1"] == 36
    assert found["rank_memory_bytes", "shared"] == 39


def test_unknown_statuses_share_a_label(server):
    changes = Changes(server)
    server.app.state.metrics.responded(299)
    assert changes["http_responses_total", "other"] == 1


def test_bytes_that_are_no_request_are_counted(server):
    changes = Changes(server)
    with http_raw.connected(server.port) as connection:
        connection.sendall(b"\x00\r\n\r\n")
        http_raw.rest(connection)
    assert changes["http_responses_total", "400"] == 1


def test_the_lag_of_the_loop_is_measured():
    async def lags():
        found = []
        with watched(found.append):
            while not found:
                await asyncio.sleep(0)
        return found

    assert asyncio.run(lags())[0] >= 0


def test_reading_twice_at_once_reads_once(server, monkeypatch):
    calls = []
    sync = server.engine.sync
    stats = sync.stats
    monkeypatch.setattr(sync, "stats", lambda: calls.append(1) or stats())

    async def twice():
        metrics = server.app.state.metrics
        return await asyncio.gather(metrics.text(), metrics.text())

    one, other = server.call(twice())
    assert one == other
    assert calls == [1]


def test_no_label_has_text_of_a_client(server):
    client = server.client()
    client.post("/v2/models/secret-name/generate", json={"text_input": "secret"})
    client.get("/secret-path")
    assert "secret" not in client.get("/metrics").text


def test_buckets_of_tokens_end_at_the_longest_sequence():
    assert buckets_of_tokens(100) == (1, 2, 5, 10, 20, 50, 100)
    assert buckets_of_tokens(99)[-1] == 50


def test_the_dashboard_names_metrics_that_exist(server):
    dashboard = json.loads(DASHBOARD.read_text())
    wanted = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"lmchat:\w+", target["expr"])
    }
    assert len(wanted) >= 15
    have = {"lmchat:" + key[0] for key in read(server)}
    assert wanted <= have
