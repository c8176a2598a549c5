"""The `lmchat` command, mostly as a process of its own: stdin in, stdout and stderr out."""

import json
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest
from assets import ROOT, asset
from command import ENVIRONMENT, LMCHAT, lmchat

import lmchat.cli.chat as chat_module
from lmchat.cli import facts, support_table
from lmchat.cli.chat import Completion, Conversation
from lmchat.sampling import sampling_defaults
from lmchat.template import ChatTemplate
from lmchat.tokenizer import Tokenizer
from turbomind import Engine
from turbomind.errors import InvalidRequest, ModelError
from turbomind.loader import describe

GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
APPENDING = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
# Shows only the last message of the user: every round rewrites the ones before it.
REWRITING = "{{ '<s>' + messages[-1]['content'] }}"


@pytest.fixture(scope="module")
def stories():
    return str(asset("models/stories260K/hf"))


@pytest.fixture(scope="module")
def goldens():
    return json.loads(asset("models/stories260K/golden.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def engine(stories):
    with Engine(stories) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(stories):
    return Tokenizer.from_folder(stories)


@pytest.mark.parametrize("which", range(4))
def test_the_tiny_model_tells_its_recorded_stories(stories, goldens, which):
    golden = goldens[which]
    done = lmchat("chat", stories, "--max-new-tokens", "200", text=golden["prompt"] + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert golden["prompt"] + done.stdout == golden["text"] + "\n"


def test_each_line_continues_the_text_before_it(stories, engine, tokenizer):
    lines = ["Once upon a time", "But then", "The end of"]
    done = lmchat(
        "chat", stories, "--max-new-tokens", "24", "--temperature", "0", text="\n".join(lines)
    )
    assert (done.returncode, done.stderr) == (0, "")
    ids, texts = [], []
    for line in lines:
        suffix = tokenizer.encode(line, add_special_tokens=not ids)
        reply = engine.generate([*ids, *suffix], **GREEDY).token_ids
        ids += suffix + reply
        stream = tokenizer.stream(context=suffix)
        texts.append(stream.push(reply) + stream.flush())
    assert done.stdout == "\n".join(texts) + "\n"


def test_a_seed_repeats_a_sampled_reply(stories):
    options = ["--temperature", "1", "--seed", "7", "--max-new-tokens", "40"]
    one, two = (lmchat("chat", stories, *options, text="The cat\n").stdout for _ in range(2))
    other = lmchat("chat", stories, *options, "--seed", "8", text="The cat\n").stdout
    assert one == two != other


def chat_of(engine, tokenizer, source, system=None):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return Conversation(engine, tokenizer, ChatTemplate(source, tokens), system)


def test_rounds_of_a_chat_compute_only_what_the_template_adds(engine, tokenizer, capfd):
    chat = chat_of(engine, tokenizer, APPENDING, "Tell stories.")
    messages = [{"role": "system", "content": "Tell stories."}]
    for line in ("Once", "Lily saw a dog", "The end"):
        engine.evict()
        past = chat.handle.length
        before = engine.stats().tokens_prefilled
        reply = "".join(chat.reply(line, GREEDY))
        computed = engine.stats().tokens_prefilled - before
        messages.append({"role": "user", "content": line})
        assert chat.messages[:-1] == messages
        messages.append({"role": "assistant", "content": reply})
        assert chat.messages == messages
        # What the handle held is reused, but for its last token, whose KV is written with the next.
        held = chat.handle.token_ids
        assert computed <= len(held) - GREEDY["max_new_tokens"] - past + 1
        produced = held[-GREEDY["max_new_tokens"] :]
        assert engine.generate(held[: -len(produced)], **GREEDY).token_ids == produced
    assert capfd.readouterr() == ("", "")


def test_a_template_that_rewrites_the_past_says_so(engine, tokenizer, capfd):
    chat = chat_of(engine, tokenizer, REWRITING)
    "".join(chat.reply("Once upon a time", GREEDY))
    assert capfd.readouterr().err == ""
    reply = "".join(chat.reply("Once there was", GREEDY))
    assert "rewrites earlier rounds" in capfd.readouterr().err
    ids = tokenizer.encode("<s>Once there was", add_special_tokens=False)
    expected = engine.generate(ids, **GREEDY).token_ids
    assert chat.handle.token_ids == ids + expected
    assert reply == tokenizer.decode(expected)


@pytest.mark.parametrize("kind", ["completion", "conversation"])
def test_a_round_that_fails_is_taken_back(engine, tokenizer, kind):
    chat = (
        Completion(engine, tokenizer)
        if kind == "completion"
        else chat_of(engine, tokenizer, APPENDING)
    )
    "".join(chat.reply("Once", GREEDY))
    held = chat.handle.token_ids
    with pytest.raises(InvalidRequest):
        "".join(chat.reply("a long story " * 400, GREEDY))
    assert chat.handle.token_ids == held
    with pytest.raises(InvalidRequest, match="top_p"):
        "".join(chat.reply("Lily", {"top_p": -1.0}))
    assert chat.handle.token_ids == held
    assert "".join(chat.reply("Lily", GREEDY))


def test_a_line_that_cannot_be_served_does_not_end_the_chat(stories):
    text = "a long story " * 400 + "\nOnce upon a time\n"
    done = lmchat("chat", stories, "--max-new-tokens", "5", text=text)
    assert done.returncode == 0
    assert done.stderr.startswith("lmchat: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout.startswith(", there was")


@pytest.fixture(scope="module")
def endless(tmp_path_factory, stories):
    """A folder for dummy weights that never ends a reply by itself."""
    folder = tmp_path_factory.mktemp("endless")
    config = json.loads(asset("models/stories260K/hf/config.json").read_text())
    config |= {"eos_token_id": None, "max_position_embeddings": 200_000, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(asset("models/stories260K/hf/tokenizer.json"), folder)
    return str(folder)


def test_ctrl_c_stops_the_reply_and_not_the_chat(endless):
    options = ["--load-format", "dummy", "--temperature", "1", "--seed", "1"]
    process = subprocess.Popen(
        [*LMCHAT, "chat", endless, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    try:
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        assert process.stdout.read(64)
        process.send_signal(signal.SIGINT)
        # The rest of the reply is its last line end; then the input is at its end.
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, b"")
    assert output.endswith(b"\n")


def test_input_that_is_no_utf8_and_output_that_the_locale_lacks(stories):
    greedy = ["--max-new-tokens", "8", "--temperature", "0"]
    texts = []
    for line in (b"caf\xe9 \xff\n", "caf\ufffd \ufffd\n".encode()):
        done = subprocess.run(
            [*LMCHAT, "chat", stories, *greedy], input=line, capture_output=True, env=ENVIRONMENT
        )
        assert (done.returncode, done.stderr) == (0, b"")
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    # A temperature that makes all tokens alike, raw bytes among them, on an ASCII terminal.
    done = subprocess.run(
        [*LMCHAT, "chat", stories, "--temperature", "1000", "--seed", "3", "--top-k", "0"],
        input=b"Once\n", capture_output=True, env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0
    assert b"?" in done.stdout


def test_a_full_context_is_said(stories):
    done = lmchat("chat", stories, "--max-context-tokens", "100", text="Once\nmore\n")
    assert done.returncode == 0
    full, refused = done.stderr.splitlines()
    assert full == "lmchat: the context of 100 tokens is full"
    assert refused.startswith("lmchat: ")
    assert done.stdout.count("\n") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "/no/such/folder"], "/no/such/folder"),
        (["chat", "STORIES", "--dtype", "int3"], "int3"),
        (["chat", "STORIES", "--system", "x"], "no chat template"),
        (["chat", "STORIES", "--cache-memory", "lots"], "lots"),
        (["chat", "STORIES", "--isa", "vax"], "vax"),
        (["chat", "STORIES", "--threads", "0"], "threads"),
        (["chat", ""], "model is ''"),
        (["info", "/no/such/folder"], "/no/such/folder"),
        (["bench", "engine", "--config", "STORIES/config.json"], "add --load-format dummy"),
        (["bench", "engine"], "MODEL or --config"),
        (["bench", "engine", "STORIES", "--batch", "1,x"], "1,x"),
        (["bench", "engine", "STORIES", "--context", "4096", "--prefill", "16"], "fewer than 512"),
        (["bench", "ceilings", "--isa", "vax"], "vax"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(stories, arguments, message):
    done = lmchat(*[a.replace("STORIES", stories) for a in arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lmchat: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["chat"], ["info"], ["bench", "ceilings"], ["bench", "engine"]]
)
def test_every_command_has_help_with_examples(command):
    done = lmchat(*command, "--help")
    assert done.returncode == 0
    assert f"Examples:\n    lmchat {' '.join(command)}" in done.stdout


def test_help_and_version():
    assert lmchat("--version").stdout.startswith("lmchat ")
    assert {"chat", "info", "bench"} <= set(lmchat("--help").stdout.split())


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("qwen2.5_0.5b", 494_032_768, 12 << 10),
        ("llama3_2_1b", 1_235_814_400, 32 << 10),
        ("llama3_1_8b", 8_030_261_248, 128 << 10),
    ],
)
def test_info_knows_published_sizes(name, parameters, kv_bytes):
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
        assert row["weight_bytes"] == 4 * (info.parameters - 11 * 64)  # all but the norms
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
        assert row["kv_bytes"] == row["batch"] * (70 + 3 + 1) * 5 * 2 * 4 * 8 * 4
    products = {row["name"] for row in one["products"]}
    assert products == {"qkv", "attn_out", "gate_up", "down", "head"}
    ops = {row["op"] for row in one["ops"]["decode"]}
    assert {"qkv", "attention", "gate_up", "down", "head"} <= ops


def test_bench_engine_takes_a_config_alone(endless):
    config = f"{endless}/config.json"
    options = ["--batch", "2", "--context", "8", "--prefill", "8", "--repeat", "1"]
    done = lmchat("bench", "engine", "--config", config, "--load-format", "dummy", *options)
    assert done.returncode == 0, done.stderr
    for word in ("prefill", "decode", "of tiles", "of read", "logits"):
        assert word in done.stdout
    done = lmchat("bench", "engine", "--config", config, *options)
    assert done.returncode == 2


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


def test_models_that_do_not_sample_are_greedy():
    assert sampling_defaults({}) == {"temperature": 0.0}
    assert sampling_defaults({"do_sample": False, "temperature": 0.6, "top_k": 5}) == {
        "temperature": 0.0
    }
    sampled = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1}
    expected = {"temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1}
    assert sampling_defaults(sampled) == expected
    with pytest.raises(ModelError, match="temperature"):
        sampling_defaults({"do_sample": True, "temperature": "hot"})


def test_the_support_table_of_the_readme_is_the_current_one():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert support_table.rewrite(text) == text


def test_signal_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with chat_module._on_interrupt(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
