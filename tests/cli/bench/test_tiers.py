"""`lmchat bench` on restored sessions: counted tokens and reports, without timings."""

import json
import statistics
import sys
from pathlib import Path

import devices
import pytest
from chat_models import chat_model
from typer.testing import CliRunner

from lmchat.cli.app import app
from lmchat.cli.bench import memory_pressure_view
from turbomind.errors import InvalidRequest


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config.json of a model whose KV is loaded faster than computed: wide layers
    with one narrow KV head."""
    path = tmp_path_factory.mktemp("wide") / "config.json"
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 4,
    }
    path.write_text(json.dumps(values))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--json"], obj={})


def bench(*arguments):
    done = run(*arguments)
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


def test_bench_turns_restores_the_context_from_every_tier(config, tmp_path):
    sizes = ["--turns", 2, "--new-tokens", 20, "--reply-tokens", 2, "--repeat", 2]
    more = ["--context", 700, "--resumes", 3, "--folder", tmp_path, "--threads", 2]
    report = bench("turns", "--config", config, "--load-format", "dummy", *sizes, *more)["restored"]
    rows = {row["from"]: row for row in report["rows"]}
    assert list(rows) == [
        "device",
        "host",
        "disk_warm",
        "disk_dropped",
        "restart",
        "process",
        "again",
    ]
    for name, row in rows.items():
        assert len(row["samples"]) == 2
        assert row["seconds"] == statistics.median(row["samples"])
        if name == "again":
            assert (row["computed_tokens"], row["loaded_tokens"]) == (720, 0)
            continue
        assert row["computed_tokens"] <= 21  # the new tokens, and the last one of a reply
        if name != "device":
            # In later rounds the last token is cached too, by the previous turns.
            assert row["loaded_tokens"] in (699, 700)
            assert report["again_over"][name]["min"] <= report["again_over"][name]["max"]
    kv_bytes = 699 * 4 * 2 * 32 * (2 if devices.ON_GPU else 4)  # layers, K and V, head, bytes
    assert report["kv_bytes"] == kv_bytes
    bounds = [
        kv_bytes / (0.8 * rate) + resident
        for rate, resident in zip(report["read_samples"], rows["device"]["samples"], strict=True)
    ]
    assert report["bound_seconds"] == pytest.approx(statistics.median(bounds))
    ratios = [s / b for s, b in zip(rows["restart"]["samples"], bounds, strict=True)]
    assert report["over_bound"]["restart"]["median"] == pytest.approx(statistics.median(ratios))
    tried = report["predictions"]
    assert (tried["resumes"], len(tried["samples"])) == (3, 3)
    errors = [abs(e["predicted_seconds"] / e["seconds"] - 1) for e in tried["samples"]]
    assert tried["median_error"] == statistics.median(errors)
    assert list(tmp_path.iterdir()) == []


def test_bench_turns_without_a_context_restores_nothing(config):
    sizes = ["--turns", 2, "--new-tokens", 8, "--reply-tokens", 2, "--repeat", 1, "--context", 0]
    assert "restored" not in bench("turns", "--config", config, "--load-format", "dummy", *sizes)


def pressured(config, *options):
    small = ["--seconds", 3, "--sessions", 12, "--history", 300, "--reply-tokens", 2]
    return bench("pressure", "--config", config, "--load-format", "dummy", *small, *options)


def check_mode(mode, tiers):
    assert mode["past_tokens"] > 0
    assert set(mode["hit_rates"]) == {"device", *tiers}
    hits = sum(mode["hit_rates"].values())
    assert hits == pytest.approx(1 - mode["again_tokens"] / mode["past_tokens"], abs=0.01)
    assert (mode["loaded_tokens"] > 0) == bool(tiers)
    assert mode["new_tokens"] == sum(sample["new"] for sample in mode["samples"])
    assert mode["ttft"]["max"] == max(sample["seconds"] for sample in mode["samples"])


def test_bench_pressure_runs_the_same_turns_in_each_mode(config, tmp_path):
    report = pressured(config, "--rate", 8, "--modes", "lru,tiers", "--folder", tmp_path)
    assert report["sessions"] == 12
    assert report["oversubscribed"] == pytest.approx(4, rel=0.1)
    tiers, lru = report["modes"]["tiers"], report["modes"]["lru"]
    assert tiers["turns"] == lru["turns"] == 12  # 8 a second, half of 3 seconds
    assert [s["new"] for s in tiers["samples"]] == [s["new"] for s in lru["samples"]]
    check_mode(tiers, ["disk"])
    check_mode(lru, [])
    assert tiers["again_tokens"] < lru["again_tokens"]
    assert set(report["against"]) == {"mean_below_lru", "p90_below_lru"}
    assert list(tmp_path.iterdir()) == []


def test_bench_pressure_cuts_contexts_that_do_not_fit_on_the_device(config):
    few = ["--sessions", 9, "--history", 2000, "--modes", "tiers", "--rate", 8, "--seconds", 1]
    report = bench("pressure", "--config", config, "--load-format", "dummy", *few)
    assert report["sessions"] == 9
    assert report["oversubscribed"] == pytest.approx(4, rel=0.1)
    assert 256 < report["longest_history"] < report["device_tokens"] < 2000


def test_bench_pressure_takes_a_trace_and_chooses_its_rate(config, tmp_path):
    lines = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{100 + i},{i}\n" for i in range(99)]
    trace = str(tmp_path / "t.csv")
    Path(trace).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    options = ["--modes", "tiers,none", "--tiers", "host,disk"]
    report = pressured(config, "--trace", trace, *options)
    assert report["source"] == trace
    assert report["history_tokens"] == sum(range(100, 112))
    assert report["rate"] > 0
    check_mode(report["modes"]["tiers"], ["host", "disk"])
    check_mode(report["modes"]["none"], [])


def test_the_plot_is_a_png(config, tmp_path):
    path = tmp_path / "ttft.png"
    sample = {"seconds": 0.1}
    mode = {"samples": [sample, sample], "ttft": {"p90": 0.1}}
    report = {"modes": {"tiers": mode}, "sessions": 3, "oversubscribed": 4.0, "rate": 1.0}
    memory_pressure_view.plot(report, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refusal = run("pressure", "memo", "--plot", tmp_path / "ttft.png").exception
    assert "lmchat[plots]" in str(refusal)


def test_bench_verbs_counts_pages_and_times_commits(tmp_path):
    model = chat_model(tmp_path / "model")
    pages = tmp_path / "pages"
    pages.mkdir()
    report = bench("verbs", model, "--context", 600, "--samples", 6, "--folder", pages)
    assert report["tokens"] >= 600
    assert report["turns"] >= 2
    assert [row["verb"] for row in report["verbs"]] == ["fork", "undo", "edit"]
    for row in report["verbs"]:
        assert len(row["samples"]) == 6
        assert row["seconds"] == statistics.median(row["samples"])
        allowed = 0.005 + report["fsync_seconds"]
        assert row["within"] == (row["seconds"] <= allowed)
        assert row["beside_fsync_seconds"] == row["seconds"] - report["fsync_seconds"]
    assert len(report["fsync_samples"]) == 6
    assert report["pages"]["copied_pages"] == 1
    assert report["pages"]["again_tokens"] == 0
    assert list(pages.iterdir()) == []


def test_bench_verbs_of_a_config_uses_the_bundled_tokenizer(config):
    options = ["--load-format", "dummy", "--context", 300, "--samples", 2]
    assert bench("verbs", "--config", config, *options)["tokens"] >= 300


def test_bench_verbs_makes_two_turns_of_the_shortest_context(config):
    options = ["--load-format", "dummy", "--context", 64, "--samples", 2]
    assert bench("verbs", "--config", config, *options)["turns"] >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["turns", "--context", "1"], "--context is 1"),
        (["turns", "--context", "99999"], "lower it"),
        (["turns", "--folder", "/no/such"], "/no/such"),
        (["verbs", "--context", "99999"], "lower it"),
        (["verbs", "--folder", "/no/such"], "/no/such"),
        (["pressure", "--modes", "tiers,fifo"], "--modes is 'tiers,fifo'"),
        (["pressure", "--modes", "lru,lru"], "--modes is 'lru,lru'"),
        (["pressure", "--modes", ""], "--modes is ''"),
        (["pressure", "--tiers", "tape"], "--tiers is 'tape'"),
        (["pressure", "--modes", "lru"], "--rate is not given"),
        (["pressure", "--trace", "/no/such.csv"], "/no/such.csv"),
        (["pressure", "--plot", "x.svg"], "x.svg"),
        (["pressure", "--plot", "/no/such/x.png"], "/no/such/x.png"),
        (["pressure", "--cache-memory", "1GiB"], "--cache-memory"),
        (["pressure", "--folder", "/no/such"], "/no/such"),
        (["pressure", "--seconds", "0"], "--seconds"),
        (["pressure", "--oversubscribe", "0.5"], "--oversubscribe"),
    ],
)
def test_bad_options_are_refused(config, arguments, message):
    done = run(arguments[0], "--config", config, "--load-format", "dummy", *arguments[1:])
    assert isinstance(done.exception, InvalidRequest) or done.exit_code == 2
    assert message in f"{done.exception} {done.output}"
