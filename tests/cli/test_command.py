"""The `lmchat` command, mostly in a new process: stdin in, stdout and stderr out."""

import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace

import gguf_files
import pytest
import typer
from assets import ROOT, asset
from chat_models import CHATML, chat_model
from checkpoints import tiny_tensors, write_tiny
from command import ENVIRONMENT, lmchat
from typer.testing import CliRunner

from lmchat import __version__ as lmchat_version
from lmchat.cli import support_table
from lmchat.cli.app import app
from lmchat.cli.bench import turns_bench
from lmchat.cli.command_group import HINTS, SESSION_HINTS
from lmchat.cli.errors import note
from turbomind import Engine, ModelError
from turbomind.config import facts
from turbomind.loading.loader import describe


@pytest.fixture(scope="module")
def stories():
    return str(asset("models/stories260K/hf"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory, stories):
    """A folder for dummy weights that never ends a reply by itself."""
    folder = tmp_path_factory.mktemp("endless")
    config = json.loads(asset("models/stories260K/hf/config.json").read_text())
    config |= {"eos_token_id": None, "max_position_embeddings": 200_000, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(asset("models/stories260K/hf/tokenizer.json"), folder)
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "/no/such/folder", "-p", "x"], "/no/such/folder"),
        (["chat", "STORIES", "-p", "x", "--dtype", "int3"], "int3"),
        (["chat", "STORIES", "-p", "x", "--system", "x"], "no chat template"),
        (["chat", "STORIES", "-p", "x", "--cache-memory", "lots"], "lots"),
        (["chat", "STORIES", "-p", "x", "--isa", "vax"], "vax"),
        (["chat", "STORIES", "-p", "x", "--threads", "0"], "threads"),
        (["chat", "", "-p", "x"], "model is ''"),
        (["chat"], "stdin is empty, expected a question"),
        (["chat", "-p", ""], "-p is '', expected a question"),
        (["chat", "/no/such", "-p", "x", "--temperature", "-1"], "temperature is -1.0, expected"),
        (["chat", "/no/such", "-p", "x", "--set", "seed"], "--set is 'seed', expected NAME=VALUE"),
        (["chat", "/no/such", "-p", "x", "--set", "sede=1"], "did you mean 'seed'?"),
        (["chat", "/no/such", "-p", "x", "--set", "nil=1"], "setting 'nil', expected one of"),
        (["chat", "/no/such", "-p", "x", "--set", "top_p=2"], "top_p is 2, expected"),
        (["chat", "/no/such", "-p", "x", "--set", "seed=1", "--set", "seed=2"], "seed is given tw"),
        (
            ["chat", "/no/such", "-p", "x", "--seed", "1", "--set", "seed=1"],
            "--seed and --set seed",
        ),
        (["chat", "STORIES", "-p", "x", "--no-think"], "cannot switch reasoning"),
        (["chat", "STORIES", "-p", "x", "--history", "drop"], "'drop'"),
        (["info", "/no/such/folder"], "/no/such/folder"),
        (["bench", "engine", "--config", "STORIES/config.json"], "add --load-format dummy"),
        (["bench", "engine"], "MODEL or --config"),
        (["bench", "engine", "STORIES", "--batch", "1,x"], "1,x"),
        (["bench", "engine", "STORIES", "--context", "4096", "--prefill", "16"], "fewer than 512"),
        (["bench", "ceilings", "--isa", "vax"], "vax"),
        (["bench", "turns"], "MODEL or --config"),
        (["bench", "turns", "STORIES", "--turns", "999"], "lower --turns"),
    ],
)
def test_an_invalid_request_is_one_line_and_exit_code_2(stories, arguments, message):
    done = lmchat(*[a.replace("STORIES", stories) for a in arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lmchat: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def commands(command=None, path=()):
    """Every command and group, with the words that call it."""
    command = typer.main.get_command(app) if command is None else command
    yield command, path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def parse(words):
    """Parses a command line without running anything; returns the path of its command."""
    command, path = typer.main.get_command(app), ()
    context = command.make_context("lmchat", list(words), obj={})
    while getattr(command, "commands", None):
        name, child, rest = command.resolve_command(context, context._protected_args + context.args)
        context = child.make_context(name, rest, parent=context)
        command, path = child, (*path, name)
    return path


@pytest.mark.parametrize("path", [path for _, path in commands()], ids=" ".join)
def test_every_help_has_examples_and_they_parse(path):
    done = lmchat(*path, "--help")
    assert done.returncode == 0
    lines = done.stdout.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line.strip())
        words = words[len(words) - words[::-1].index("|") :] if "|" in words else words
        words = words[: words.index(">")] if ">" in words else words
        assert words[0] == "lmchat"
        assert parse(words[1:])[: len(path)] == path


def test_an_example_that_does_not_parse_is_found():
    with pytest.raises(Exception, match="no-such-option"):
        parse(["chat", "--no-such-option"])
    with pytest.raises(Exception, match="[Uu]sage|no-such|No such"):
        parse(["bench", "no-such"])


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["run", "qwen2.5"], "'run'; lmchat chat MODEL chats with a model, lmchat serve MODEL se"),
        (["pull", "qwen2.5"], "'pull'; lmchat chat MODEL downloads the model of a hub name when"),
        (["list"], "'list'; lmchat sessions list lists the sessions; there is no list of models: "),
        (["ls"], "'ls'; lmchat sessions list lists the sessions; there is no list of models: "),
        (["models"], "'models'; there is no list of models: a model is a folder, a GGUF file or"),
        (["rm", "trip", "--yes"], "'rm'; lmchat sessions rm NAME deletes a session; the files of"),
        (["chatt"], "'chatt'; did you mean 'chat'?\n"),
        (["sesions", "list"], "'sesions'; did you mean 'sessions'?\n"),
        (["quantize"], "'quantize'; lmchat --help lists all.\n"),
        (["sessions", "ls"], "'ls'; lmchat sessions list lists the sessions.\n"),
        (["sessions", "delete", "trip"], "'delete'; lmchat sessions rm NAME deletes a session.\n"),
        (["sessions", "exprot"], "'exprot'; did you mean 'export'?\n"),
        (["bench", "engin"], "'engin'; did you mean 'engine'?\n"),
        (["bench", "all"], "'all'; lmchat bench --help lists all.\n"),
    ],
)
def test_an_unknown_command_is_answered_with_what_to_type(typed, hint):
    done = CliRunner().invoke(app, typed, prog_name="lmchat")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert f"No such command {hint}" in done.stderr


def test_commands_of_hints_exist_and_are_not_shadowed():
    assert not HINTS.keys() & typer.main.get_command(app).commands.keys()
    for hint in {*HINTS.values(), *SESSION_HINTS.values()}:
        for words in re.findall(r"lmchat ((?:[a-z-]+ ?)+)", hint):
            known, given = typer.main.get_command(app), words.split()
            while given and getattr(known, "commands", None) and given[0] in known.commands:
                known = known.commands[given.pop(0)]
            assert known.name != "lmchat" or given[0] in ("--help", "--version"), hint
            assert not getattr(known, "commands", None) or given[:1] in (["--help"], ["--version"])


def test_the_help_of_chat_explains_exit_codes_and_json():
    text = lmchat("chat", "--help").stdout
    codes = [line.split()[0] for line in text.split("Exit codes:")[1].strip().splitlines()]
    assert codes == ["0", "1", "2", "130", "141"]
    for name in ("token_ids", "finish_reason", "usage", "timings", "error"):
        assert name in text


def test_a_message_reaches_the_terminal_without_escape_sequences(capsys):
    note("no \x1b[2J\x1b]0;title\x07 name and\n\u4f60\u597d \u202e")
    printed = capsys.readouterr().err
    assert printed == "lmchat: no \\x1b[2J\\x1b]0;title\\x07 name and\n\u4f60\u597d \\u202e\n"


def test_info_refuses_what_loading_refuses_in_the_same_words(tmp_path):
    """A tensor that is missing, one too many, a wrong shape."""
    whole = tiny_tensors()
    norm = "model.norm.weight"
    damaged = (
        ({n: t for n, t in whole.items() if n != norm}, f"tensor {norm} is missing"),
        (whole | {"model.extra": whole[norm]}, "no use for: model.extra"),
        (whole | {norm: whole[norm][:-1]}, f"tensor {norm} has shape (31,), expected (32,)"),
    )
    for i, (tensors, words) in enumerate(damaged):
        folder = write_tiny(tmp_path / str(i), tensors=tensors)
        done = lmchat("info", str(folder))
        told = done.stderr
        assert (done.returncode, words in told) == (2, True)
        with pytest.raises(ModelError) as refusal:
            Engine(folder)
        assert told == f"lmchat: {refusal.value}\n"


def test_help_and_version_are_printed():
    assert lmchat("--version").stdout == f"lmchat {lmchat_version}\n"
    assert {"chat", "info", "bench"} <= set(lmchat("--help").stdout.split())
    assert lmchat("chat", "-h").stdout == lmchat("chat", "--help").stdout != ""


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("qwen2.5_0.5b", 494_032_768, 12 << 10),
        ("llama3_2_1b", 1_235_814_400, 32 << 10),
        ("llama3_1_8b", 8_030_261_248, 128 << 10),
    ],
)
def test_info_computes_published_sizes(name, parameters, kv_bytes):
    path = next(iter(sorted(asset("configs/hf").glob(f"{name}*.json"))), None)
    if path is None:
        pytest.skip(f"no config of {name}")
    done = lmchat("info", str(path), "--dtype", "bfloat16", "--json")
    model = json.loads(done.stdout)["model"]
    assert model["parameters"] == parameters
    assert model["weight_bytes"] == pytest.approx(2 * parameters, rel=1e-3)
    assert model["kv"]["bfloat16"] == {
        "bytes_per_token": kv_bytes,
        "tokens_that_fit": (2 << 30) // (kv_bytes * 64) * 64,
    }


def test_info_describes_the_machine_and_reads_no_weights(tmp_path, stories):
    machine = json.loads(lmchat("info", "--json").stdout)["machine"]
    assert machine["isa"] in [*machine["available_isas"], "amx_emulated"]
    shutil.copy(f"{stories}/config.json", tmp_path)
    done = lmchat("info", str(tmp_path), "--cache-memory", "1GiB")
    assert done.returncode == 0
    assert "260,032" in done.stdout
    assert "tokens in 1 GiB" in done.stdout


def test_info_names_the_data_directory_and_cuts_no_path(tmp_path, stories):
    folder = tmp_path / "a [bold]name[x] of many words that are longer than each of the lines of it"
    folder.mkdir()
    shutil.copy(f"{stories}/config.json", folder)
    home = tmp_path / "stored here"
    env = ENVIRONMENT | {"LMCHAT_HOME": str(home), "COLUMNS": "40"}
    lines = lmchat("info", str(folder), env=env).stdout.splitlines()
    assert str(folder) in lines
    assert f"data directory   {home}" in lines
    assert json.loads(lmchat("info", "--json", env=env).stdout)["data_directory"] == str(home)
    assert not home.exists()  # it is named, not made


@pytest.mark.parametrize("content", [b"# Notes\n", b"\x7fELF\xc0", b"[1, 2]"])
def test_a_file_that_is_not_a_model_is_named_with_what_is_expected(tmp_path, content):
    path = tmp_path / "notes.md"
    path.write_bytes(content)
    expected = "a folder with a config.json, a GGUF file or a config.json"
    with pytest.raises(ModelError, match=f"notes.md is not a model, expected {expected}$"):
        describe(path)
    path.rename(tmp_path / "config.json")
    with pytest.raises(
        ModelError, match=r"config.json (is not valid JSON: |holds a list, expected)"
    ):
        describe(tmp_path / "config.json")


def test_a_gguf_file_is_named_like_a_folder(tmp_path):
    folder = chat_model(tmp_path / "folder")
    path = tmp_path / "model.gguf"
    gguf_files.write_gguf(folder, path, tokenizer=gguf_files.byte_level(folder, "gpt-2"))
    model, of_folder = (
        json.loads(lmchat("info", str(each), "--json").stdout)["model"] for each in (path, folder)
    )
    assert model.pop("path") == str(path)
    assert model == {name: value for name, value in of_folder.items() if name != "path"}
    assert model["chat"]["template"] == "append"
    replies = [
        lmchat("chat", str(each), "-p", "Hi", "--no-store", "--set", "max_new_tokens=8").stdout
        for each in (path, folder)
    ]
    assert replies[0] == replies[1] != ""
    path.write_bytes(path.read_bytes()[:999])
    done = lmchat("chat", str(path), "-p", "Hi")
    assert done.returncode != 0
    assert done.stderr.startswith(f"lmchat: {path}: ")


REWRITING = CHATML.replace(
    "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
)


def test_info_lists_fields_of_the_config_that_are_ignored(tmp_path):
    config = json.loads(asset("configs/hf/llama3_2_1b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "my_trainer_note": 1}))
    arguments = ("info", str(tmp_path / "config.json"))
    assert json.loads(lmchat(*arguments, "--json").stdout)["model"]["unknown_fields"] == [
        "my_trainer_note"
    ]
    assert re.search(r"ignored fields +my_trainer_note", lmchat(*arguments).stdout)


def test_info_says_that_the_encoder_of_images_is_not_loaded(tmp_path):
    text = json.loads(asset("configs/hf/qwen2.5_7b.json").read_text())
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    (tmp_path / "config.json").write_text(json.dumps(text | names | rope | {"vision_config": {}}))
    done = lmchat("info", str(tmp_path))
    assert re.search(r"not loaded +vision: only text is understood", done.stdout)
    assert "rope mrope" in done.stdout


def test_info_shows_how_the_chat_template_behaves(tmp_path):
    known = {}
    for name, template in (("append", CHATML), ("rewrite", REWRITING), ("none", None)):
        folder = chat_model(tmp_path / name, template=template)
        chat = known[name] = json.loads(lmchat("info", str(folder), "--json").stdout)["model"][
            "chat"
        ]
        assert chat["template"] == name
        table = lmchat("info", str(folder)).stdout
        assert f"chat template    {name}" in table
        assert f"history          {chat['history']}:" in table
    assert [known[name]["history"] for name in known] == ["append", "template", "append"]
    assert [known[name]["system_prompt"] for name in known] == ["yes", "yes", "refused"]
    assert known["append"]["reasoning"] is None
    assert known["rewrite"]["reasoning"] == ["<think>", "</think>"]
    assert known["rewrite"]["notes"] == ["drops the reasoning of earlier replies"]


def test_info_reports_why_a_tokenizer_cannot_be_read(tmp_path):
    folder = chat_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    done = lmchat("info", str(folder), "--json")
    assert done.returncode == 0
    assert "tokenizer.json" in json.loads(done.stdout)["model"]["chat"]["error"]
    (folder / "tokenizer.json").unlink()
    assert json.loads(lmchat("info", str(folder), "--json").stdout)["model"]["chat"] is None


@pytest.mark.cpu_only("its ceilings are the CPU's")
def test_bench_engine_reports_every_figure_with_its_work(stories):
    options = ["--batch", "1,3", "--context", "70", "--prefill", "65", "--repeat", "2", "--json"]
    runs = []
    for threads in (["1", "--products"], ["2"]):
        done = lmchat("bench", "engine", stories, "--steps", "6", "--threads", *threads, *options)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    one, two = runs
    assert one["logits_hash"] == two["logits_hash"]
    info = describe(stories)
    (prefill,) = one["prefill"]
    assert prefill["flops"] == facts.prefill_flops(info.description, 65)
    assert prefill["of_tiles"] == pytest.approx(
        prefill["flops"] / prefill["seconds"] / one["ceilings"]["tiles"]
    )
    assert [row["batch"] for row in one["decode"]] == [1, 3]
    for row in one["decode"]:
        used = 4 * (info.parameters - 11 * 64)  # all but the norms
        assert (
            used <= row["weight_bytes"] == info.step_weight_bytes() <= 1.05 * used
        )  # K of 172: 192
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
        assert row["kv_bytes"] == row["batch"] * (70 + 3 + 1) * 5 * 2 * 4 * 8 * 4
    products = {row["name"] for row in one["products"]}
    assert products == {"qkv", "attn_out", "gate_up", "down", "head"}
    ops = {row["op"] for row in one["ops"]["decode"]}
    assert {"qkv", "attention", "gate_up", "down", "head"} <= ops


@pytest.mark.cpu_only("its ceilings are the CPU's")
def test_bench_engine_takes_a_config_alone(endless):
    config = f"{endless}/config.json"
    options = ["--batch", "2", "--context", "8", "--prefill", "8", "--repeat", "1"]
    done = lmchat("bench", "engine", "--config", config, "--load-format", "dummy", *options)
    assert done.returncode == 0, done.stderr
    for word in ("prefill", "decode", "of tiles", "of read", "logits"):
        assert word in done.stdout
    done = lmchat("bench", "engine", "--config", config, *options)
    assert done.returncode == 2


def turns_report(*options):
    done = lmchat("bench", "turns", *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SHORT = ["--turns", "4", "--new-tokens", "70", "--reply-tokens", "9", "--repeat", "2"]


def test_bench_turns_of_a_handle_computes_only_new_tokens(endless):
    report = turns_report("--config", f"{endless}/config.json", "--load-format", "dummy", *SHORT)
    rows = report["turns"]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4]
    # The KV of a reply's last token is computed with the next turn.
    assert [row["new_tokens"] for row in rows] == [70, 71, 71, 71]
    assert [row["history_tokens"] for row in rows] == [0, 78, 157, 236]
    for row in rows:
        assert len(row["samples"]["cached"]) == len(row["samples"]["recomputed"]) == 2
        assert 0 < row["attention_seconds"] < row["cached_seconds"]
        assert row["recomputed_over_cached"] == row["recomputed_seconds"] / row["cached_seconds"]
    growth = report["growth"]
    early, late = (rows[i]["cached_seconds"] - rows[i]["attention_seconds"] for i in (1, 3))
    assert growth["turns"] == [2, 4]
    assert growth["ratio"] == pytest.approx(late / early)
    assert report["python"] == {}


@pytest.mark.parametrize("template", [CHATML, None])
def test_bench_turns_of_a_session_computes_only_new_tokens(tmp_path, template):
    model = str(chat_model(tmp_path, template=template))
    report = turns_report(model, *SHORT)
    assert set(report["python"]["seconds_by_history_rule"]) == {"append", "template"}
    rows = report["turns"]
    assert rows[0]["history_tokens"] == 0
    assert rows[0]["new_tokens"] >= 70
    assert len({row["new_tokens"] for row in rows[1:]}) == 1
    for before, row in itertools.pairwise(rows):
        prompt = before["history_tokens"] + before["new_tokens"]
        assert row["history_tokens"] == prompt + 9 - 1
        assert row["python_seconds"] > 0


def test_the_recomputed_turn_computes_the_whole_prompt(endless):
    plan = turns_bench.Plan(turns=3, new_tokens=200, reply_tokens=5, repeat=1)
    with Engine(f"{endless}/config.json", load_format="dummy") as engine:
        conversation = turns_bench.TokenConversation(engine, plan)
        for _ in range(3):
            first = conversation.first()
            for _ in range(2):
                before = engine.stats().tokens_prefilled
                turns_bench.again(engine, first.prompt)
                assert engine.stats().tokens_prefilled - before == len(first.prompt)
            conversation.rest()
        conversation.close()


def test_bench_turns_prints_a_table(tmp_path):
    done = lmchat("bench", "turns", str(chat_model(tmp_path)), "--turns", "2", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    for word in (
        "history",
        "TTFT cached",
        "attention",
        "python",
        "TTFT recomputed",
        "turn 2 over turn 2",
    ):
        assert word in done.stdout


def test_bench_ceilings_measures_both():
    done = lmchat("bench", "ceilings", "--threads", "1", "--buffer", "64", "--json")
    found = json.loads(done.stdout)
    assert found["threads"] == 1
    assert found["read"] > 1e8
    assert found["tiles"] > 1e8


def test_flops_of_a_prompt_are_those_of_its_tokens_one_by_one(stories):
    model = describe(stories).description
    head = 2 * model.vocab * model.hidden
    one_by_one = sum(facts.decode_flops(model, context) for context in range(40))
    assert facts.prefill_flops(model, 40) == one_by_one - 39 * head


def test_a_window_bounds_what_attention_reads_and_multiplies(stories):
    full = describe(stories).description
    windowed = replace(full, layers=tuple(replace(layer, window=16) for layer in full.layers))
    for work in (facts.decode_flops, lambda m, c: facts.kv_read_bytes(m, "float32", c)):
        assert work(windowed, 15) == work(full, 15)
        assert work(windowed, 100) == work(full, 15) < work(full, 16)


def test_the_support_table_of_the_docs_is_the_current_one():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert support_table.rewrite(text) == text
