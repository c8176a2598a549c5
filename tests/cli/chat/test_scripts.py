"""Scripts that continue sessions: `lmchat chat -p` with --session and --continue."""

import json

import pytest
from chat_models import chat_model
from persistent_chat import made_data_dir, made_model, made_script  # noqa: F401 - fixtures
from stores import stored_session

import lmchat
from lmchat.store.sqlite.sqlite_store import SqliteStore


def test_scripts_continue_a_session(script, model, data_dir):
    short = ["--max-new-tokens", "5", "--json"]
    first = json.loads(script(model, "-p", "one", "--session", "trip", *short).stdout)
    second = json.loads(script("-p", "two", "--session", "trip", *short).stdout)
    third = json.loads(script("-p", "three", "--continue", *short).stdout)
    assert {found["session"] for found in (first, second, third)} == {"trip"}
    for before, after in ((first, second), (second, third)):
        cached_tokens = (
            before["usage"]["prompt_tokens"] + 5 - 1
        )  # the KV of the last one is computed later
        assert after["usage"]["cached_tokens"] == after["usage"]["loaded_tokens"] == cached_tokens
    assert {found["model"] for found in (first, second, third)} == {model}
    with lmchat.ChatEngine(model, store="memory", cache_memory="32MiB", threads=1) as reference:
        chat = reference.session()
        for question, found in (("one", first), ("two", second), ("three", third)):
            reply = chat.send(question, max_new_tokens=5)
            assert found["token_ids"] == reply.token_ids
            assert found["usage"]["prompt_tokens"] == reply.usage.prompt_tokens
    plain = script("-p", "four", "-c", "--max-new-tokens", "5")
    assert (plain.returncode, plain.stderr) == (0, "")
    record = stored_session(data_dir, "trip")
    assert sum(turn.role == "user" for turn in record.tree.path(record.leaf)) == 4
    assert record.overflow == "drop"


def test_a_script_reports_the_session_that_continue_chose(script, model):
    done = script(model, "-p", "x", "--continue", "--max-new-tokens", "4")
    assert done.stderr == "lmchat: there is no session to continue: a new one starts\n"
    done = script("memo", "-p", "x", "--continue", "--max-new-tokens", "4")
    assert done.returncode == 0
    assert done.stderr.startswith("lmchat: no session used memo; chat-1, the most recent one, ")


def test_an_answer_is_stored_only_in_a_session_that_is_named(script, model, data_dir):
    short = ["--max-new-tokens", "4", "--json"]
    done = script(model, "-p", "x", "--system", "Be kind.", *short)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["session"] is None
    assert not data_dir.exists()
    done = script(model, "-p", "x", "--disk-quota", "1GiB", *short)
    assert done.returncode == 2
    assert "--disk-quota is given, but this answer is not stored, expected --session" in done.stderr
    named = json.loads(script(model, "-p", "x", "--session", "trip", *short).stdout)
    before = sorted(data_dir.rglob("*"))
    alone = json.loads(script(model, "-p", "x", *short).stdout)
    assert alone["token_ids"] == named["token_ids"]
    assert named["session"] == "trip"
    assert sorted(data_dir.rglob("*")) == before
    assert stored_session(data_dir, "trip")
    again = json.loads(script(model, "-p", "y", "--continue", *short).stdout)
    assert again["session"] == "trip"
    store = SqliteStore(data_dir)
    assert [one.name for one in store.summaries()] == ["trip"]
    store.close()


def test_the_bundled_model_is_stored_by_its_name(script, data_dir):
    short = ["--session", "trip", "--max-new-tokens", "4"]
    assert script("-p", "x", *short).returncode == 0
    assert stored_session(data_dir, "trip").model == "memo"  # not the path of the package
    done = script("-p", "y", *short)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_model_is_reported_with_its_session(script, data_dir, tmp_path):
    gone = chat_model(tmp_path / "gone")
    short = ["--session", "trip", "--max-new-tokens", "4"]
    assert script(str(gone), "-p", "x", *short).returncode == 0
    gone.rename(tmp_path / "moved")
    done = script("-p", "y", *short)
    assert done.returncode == 2
    assert done.stderr.endswith("lmchat chat MODEL --session trip uses another one)\n")
    done = script(str(tmp_path / "moved"), "-p", "y", *short)
    assert (done.returncode, stored_session(data_dir, "trip").model) == (0, str(tmp_path / "moved"))


def test_a_question_that_is_refused_leaves_no_session(script, model, data_dir):
    assert script(model, "-p", "x", "--max-new-tokens", "50000").returncode == 2
    store = SqliteStore(data_dir)
    assert store.summaries() == []
    store.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--session", "a", "--continue"], "--session and --continue are given, expected one"),
        (["--no-store", "-c"], "--continue and --no-store are given"),
        (["--no-store", "--disk-quota", "1GiB"], "--disk-quota is given with --no-store"),
        (["--disk-quota", "much"], "--disk-quota is 'much', expected bytes as an int or a text"),
        (["--overflow", "grow"], "--overflow is 'grow', expected refuse or drop"),
        (["--session", " a"], "name is ' a'"),
    ],
)
def test_contradicting_options_are_refused(script, data_dir, options, words):
    done = script("/no/such/model", "-p", "x", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lmchat: {words}")
    assert not data_dir.exists()


def test_another_system_prompt_is_refused_with_the_way_to_change_it(script, model):
    short = ["-p", "x", "--session", "trip", "--max-new-tokens", "4"]
    assert script(model, *short, "--system", "Be brief.").returncode == 0
    assert script(*short, "--system", "Be brief.").returncode == 0
    done = script(*short, "--system", "Be kind.")
    assert (done.returncode, done.stderr) == (
        2,
        "lmchat: --system is 'Be kind.', but session 'trip' has 'Be brief.'; /system in its chat "
        "changes it\n",
    )


def test_overflow_is_a_rule_of_the_session(script, model, data_dir):
    short = ["--max-new-tokens", "4"]
    for name, options, expected in [
        ("a", [], "drop"),
        ("b", ["--overflow", "refuse"], "refuse"),
        ("b", [], "refuse"),
    ]:
        done = script(model, "-p", "x", "--session", name, *options, *short)
        assert (done.returncode, stored_session(data_dir, name).overflow) == (0, expected)


def test_a_session_loads_its_model_as_before_unless_told_otherwise(script, model, data_dir):
    short = ["--max-new-tokens", "5", "--json"]
    loaded = ["--quantize", "int4", "--group-size", "32", "--kv-dtype", "float32"]
    first = script(model, *loaded, "-p", "one", "--session", "trip", *short)
    assert (first.returncode, first.stderr) == (0, "")
    again = {"quantize": "int4", "group_size": 32, "kv_dtype": "float32"}
    assert stored_session(data_dir, "trip").loading == again
    as_before = "the model is loaded as before: --quantize int4 --group-size 32 --kv-dtype float32"
    before = json.loads(first.stdout)
    for options in (["--session", "trip"], ["--continue"], [model, "-c"]):
        done = script(*options, "-p", "two", *short)
        assert (done.returncode, as_before in done.stderr) == (0, True), done.stderr
        assert "have changed" not in done.stderr
        now = json.loads(done.stdout)
        # The KV that the other process has computed is used: the weights are the same.
        assert now["usage"]["cached_tokens"] == before["usage"]["prompt_tokens"] + 4
        before = now
    done = script("--session", "trip", "--quantize", "int8", "-p", "three", *short)
    assert (done.returncode, done.stderr.split(";")[0]) == (
        0, "lmchat: the model is loaded as before: --kv-dtype float32",
    )  # fmt: skip
    assert "have changed" in done.stderr
    assert stored_session(data_dir, "trip").loading == {"quantize": "int8", "kv_dtype": "float32"}
    plain = ["--quantize", "none", "--kv-dtype", "auto"]
    done = script("--session", "trip", *plain, "-p", "four", *short)
    assert (done.returncode, "as before" in done.stderr) == (0, False)
    assert stored_session(data_dir, "trip").loading == {}


def test_another_model_is_not_loaded_as_the_last_one(script, model, data_dir, tmp_path):
    short = ["--session", "trip", "--max-new-tokens", "4"]
    assert script(model, "--quantize", "int8", "-p", "one", *short).returncode == 0
    other = chat_model(tmp_path / "other", seed=1)
    done = script(str(other), "-p", "two", *short)
    assert "as before" not in done.stderr
    assert stored_session(data_dir, "trip").loading == {}
