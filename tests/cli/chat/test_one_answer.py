"""One question, one answer: `lmchat chat` with -p or a pipe."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from assets import asset
from chat_models import CHATML, chat_model, endless_chat_model
from command import ENVIRONMENT, LMCHAT, lmchat

import lmchat as lmchat_api
import turbomind
from lmchat.cli.chat import one_answer
from lmchat.errors import InternalError, InvalidRequest
from lmchat.generation.generation import Delta, Progress, Reply
from lmchat.generation.state import State
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Timings, Usage
from lmchat.text.tokenizer import Tokenizer

GREEDY = ["--temperature", "0", "--max-new-tokens", "12"]
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(chat_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never ends a reply by itself, and has a long context."""
    path = tmp_path_factory.mktemp("models") / "endless"
    return str(endless_chat_model(path, context=200_000))


@pytest.fixture(scope="module")
def expected(model):
    """Returns what the engine alone generates after the rendering of one question."""
    tokenizer = Tokenizer.from_folder(model)
    with turbomind.Engine(model) as engine:

        def generate(question, tokens=12):
            ids = tokenizer.encode(PROMPT.format(question), add_special_tokens=False)
            found = engine.generate(ids, temperature=0, max_new_tokens=tokens).token_ids
            return found, tokenizer.decode(found), len(ids)

        yield generate


def raw(*arguments, **options):
    """Runs `lmchat()` in bytes, because the output is not always valid text."""
    done = subprocess.run(
        [*LMCHAT, *arguments], capture_output=True, env=ENVIRONMENT, timeout=300, **options
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("which", range(1, 4))  # the first story has an empty prompt
def test_a_tiny_model_gives_the_recorded_answers(which):
    stories = str(asset("models/stories260K/hf"))
    golden = json.loads(asset("models/stories260K/golden.json").read_text())["prompts"][which]
    done = lmchat("chat", stories, "--max-new-tokens", "200", text=golden["prompt"] + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert golden["prompt"] + done.stdout == golden["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "piped", "question"),
    [
        (["-p", "Hello"], "", "Hello"),
        (["--prompt", " Hello\n"], "", " Hello\n"),
        ([], "What is 345?\n", "What is 345?"),
        ([], "two\n\nlines of one question\n\n", "two\n\nlines of one question"),
        (["-p", "Which line is odd?"], "one\ntwo\n", "Which line is odd?\n\none\ntwo"),
    ],
)
def test_the_question_is_the_option_and_the_piped_input(
    model, expected, arguments, piped, question
):
    done = lmchat("chat", model, *arguments, *GREEDY, "--json", text=piped)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["token_ids"] == expected(question)[0]


def test_the_text_goes_to_stdout_and_nothing_else(model, expected):
    _, text, _ = expected("Plan a day in Kyoto.")
    code, output, errors = raw(
        "chat", model, "-p", "Plan a day in Kyoto.", *GREEDY, stdin=subprocess.DEVNULL
    )
    assert (code, errors) == (0, b"")
    assert output.decode() == text + "\n" * (not text.endswith("\n"))


def test_json_is_one_object_with_the_names_of_the_api(model, expected):
    ids, text, prompt_tokens = expected("Hello")
    done = lmchat("chat", model, "-p", "Hello", *GREEDY, "--session", "trip", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    timings = found.pop("timings")
    assert found == {
        "model": model,
        "session": "trip",
        "text": text,
        "reasoning": "",
        "token_ids": ids,
        "finish_reason": "length",
        "usage": {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": 0,
            "completion_tokens": 12,
            "reasoning_tokens": 0,
            "rewritten_tokens": 0,
            "loaded_tokens": 0,
            "foreign_tokens": 0,
        },
    }
    assert {"ttft", "tpot", "total", "queued"} <= timings.keys()
    assert 0 < timings["ttft"] <= timings["total"]


def test_settings_apply_to_one_answer_only(model, data_dir):
    """The session's settings do not change; the answer is stored with its own."""
    lmchat("chat", model, "-p", "Hello", *GREEDY, "--session", "trip")
    store = SqliteStore(data_dir)
    record = store.find("local", "trip")
    assert record.settings == {}
    assert record.tree.get(record.leaf).settings["temperature"] == 0
    store.change(record.changed(settings={"top_p": 0.5, "temperature": 1.5}))
    options = [*GREEDY, "--seed", "7", "--set", "top_k=5"]
    lmchat("chat", model, "-p", "And now?", *options, "--session", "trip")
    record = store.find("local", "trip")
    assert record.settings == {"top_p": 0.5, "temperature": 1.5}
    had = record.tree.get(record.leaf).settings
    assert [had[name] for name in ("top_p", "temperature", "seed", "top_k")] == [0.5, 0, 7, 5]
    store.close()


def test_a_seed_repeats_a_sampled_answer(model):
    options = ["-p", "The cat", "--temperature", "1", "--max-new-tokens", "40"]
    one, two, other = (
        lmchat("chat", model, *options, "--seed", seed).stdout for seed in ("7", "7", "8")
    )
    assert one == two != other


def test_any_setting_can_be_given_by_name(model, expected):
    _, text, _ = expected("Hello")
    stop = text[3:5]
    options = ["--set", "max_new_tokens=12", "--set", f"stop_strings={json.dumps([stop])}"]
    done = lmchat("chat", model, "-p", "Hello", "--temperature", "0", *options, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["text"] == text[: text.index(stop)]


def test_the_object_has_log_probabilities(model, expected):
    ids, _, _ = expected("Hello")
    done = lmchat("chat", model, "-p", "Hello", *GREEDY, "--set", "logprobs=2", "--json")
    found = json.loads(done.stdout)["logprobs"]
    assert [entry["top"][0] for entry in found] == [
        [token, entry["logprob"]] for token, entry in zip(ids, found, strict=True)
    ]
    assert {len(entry["top"]) for entry in found} == {2}


@pytest.mark.parametrize(
    ("option", "added"), [("--no-think", "<think>\n\n</think>\n\n"), ("--think", "")]
)
def test_thinking_and_the_history_rule_are_options(tmp_path, expected, option, added):
    switch = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    template = CHATML.removesuffix("{% endif %}") + switch + "{% endif %}"
    folder = chat_model(tmp_path / "thinker", template=template)
    options = ["-p", "Hello", *GREEDY, option, "--history", "append", "--json"]
    done = lmchat("chat", str(folder), *options)
    assert (done.returncode, done.stderr) == (0, "")
    ids = Tokenizer.from_folder(str(folder)).encode(PROMPT.format("Hello") + added)
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == len(ids)


def asked(endless, *options):
    return subprocess.Popen(
        [*LMCHAT, "chat", endless, "-p", "Hello", "--temperature", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )


def test_the_answer_streams_and_ctrl_c_stores_the_text_so_far(endless):
    with asked(endless) as process:
        begin = process.stdout.read(64)
        assert len(begin) == 64
        assert process.poll() is None  # shown before the end was generated
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
    assert (begin + rest).endswith(b"\n")


@pytest.fixture(scope="module")
def endless_engine(endless):
    with lmchat_api.ChatEngine(endless, prefill_chunk=16) as engine:
        yield engine


@pytest.mark.parametrize("state", [State.QUEUED, State.PREFILL, State.DECODE])
def test_ctrl_c_at_any_moment_prints_an_object(endless_engine, capsys, state):
    session = endless_engine.session()

    def interrupt():
        while session.state not in (state, State.DECODE):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    code = one_answer.run(endless_engine, session, "Hello " * 500, as_json=True)
    waiting.join()
    output, errors = capsys.readouterr()
    assert (code, errors) == (130, "")
    found = json.loads(output)
    assert found["finish_reason"] == "cancelled"
    assert found["usage"]["completion_tokens"] == len(found["token_ids"])
    assert found["token_ids"] or state is not State.DECODE
    assert session.send("And now?", max_new_tokens=3).finish_reason == "length"


def test_a_closed_pipe_ends_the_command_silently(endless):
    with asked(endless) as process:
        assert process.stdout.read(16)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("redirection", "code", "printed"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&-", 0, ""),
        (">/dev/full", 1, "lmchat: [Errno 28] No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(model, redirection, code, printed):
    command = shlex.join([*LMCHAT, "chat", model, "-p", "Hello", *GREEDY])
    done = subprocess.run(
        ["sh", "-c", f"{command} {redirection}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, printed)


@pytest.mark.parametrize(
    ("arguments", "text", "kind", "words"),
    [
        (["MODEL"], "", "InvalidRequest", "stdin is empty"),
        (["MODEL"], "\n \n", "InvalidRequest", "stdin is empty"),
        (["MODEL", "-p", "  "], "", "InvalidRequest", "-p is '  '"),
        (["/no/such/folder", "-p", "x"], "", "NotFound", "/no/such/folder"),
        (["MODEL", "-p", "x " * 3000], "", "ContextFull", "; shorten the question"),
        (["MODEL", "-p", "x", "--max-new-tokens", "5000"], "", "ContextFull", "or lower --max-new"),
        (["MODEL", "-p", "x", "--top-k", "99999999999"], "", "InvalidRequest", "top_k"),
        (["MODEL", "-p", "x", "--session", ""], "", "InvalidRequest", "name is ''"),
        (["MODEL", "-p", "x", "--dtype", "int3"], "", "InvalidRequest", "int3"),
    ],
)
def test_a_rejected_question_prints_one_line_and_one_object(model, arguments, text, kind, words):
    arguments = [argument.replace("MODEL", model) for argument in arguments]
    plain = lmchat("chat", *arguments, text=text)
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr.startswith("lmchat: ")
    assert plain.stderr.count("\n") == 1
    assert words in plain.stderr
    done = lmchat("chat", *arguments, "--json", text=text)
    assert (done.returncode, done.stderr) == (2, plain.stderr)
    message = plain.stderr.removeprefix("lmchat: ").rstrip("\n")
    assert json.loads(done.stdout) == {"error": {"type": kind, "message": message}}


def test_a_full_context_is_reported(endless):
    done = lmchat("chat", endless, "-p", "Hello", "--max-context-tokens", "100", "--json")
    assert done.returncode == 0
    printed = (
        "lmchat: the context of 100 tokens is full; a shorter question leaves the answer more room"
    )
    assert done.stderr == printed + "\n"
    assert json.loads(done.stdout)["finish_reason"] == "length"


def test_characters_that_the_locale_lacks_are_replaced(model):
    # A temperature at which all tokens are as likely, also raw bytes, on an ASCII terminal.
    done = subprocess.run(
        [*LMCHAT, "chat", model, "-p", "Once", "--temperature", "1000", "--seed", "3",
         "--max-new-tokens", "60"],
        stdin=subprocess.DEVNULL, capture_output=True,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0
    assert b"?" in done.stdout


def test_a_terminal_on_stderr_gets_the_usage_line_and_a_pipe_the_text(model, expected):
    ids, text, prompt_tokens = expected("Hello")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*LMCHAT, "chat", model, "-p", "Hello", *GREEDY],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(theirs)
    printed = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.returncode == 0
    assert done.stdout.decode() == text + "\n" * (not text.endswith("\n"))
    printed = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", printed)
    assert f"{prompt_tokens} new + 0 cached" in printed
    assert f"context {prompt_tokens + len(ids)} " in printed


class FakeStream:
    """Yields parts of a reply, then the reply or an error."""

    def __init__(self, parts, end):
        self.parts, self.end = parts, end

    def close(self):
        pass

    def events(self):
        yield from self.parts

    def result(self):
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


class FakeSession:
    name, length = "trip", 10

    def __init__(self, parts, end):
        self.stream = lambda prompt, **settings: FakeStream(parts, end)

    def stop(self):
        return None


class FakeEngine:
    max_context = 100
    model = "./model"


def reply(text, reason, error=None, **more):
    usage, timings = Usage(4, 1, 2), Timings(0.5, 0.1, 0.7)
    return Reply(text, "", [5, 6], reason, usage, timings, error, **more)


def run(parts, end, as_json=False):
    session = FakeSession(parts, end)
    return one_answer.run(FakeEngine(), session, "x", as_json=as_json)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_generation_that_fails_midway(capsys, as_json):
    parts = [Progress(1, 2), Delta("reasoning", "hm"), Delta("text", "So")]
    end = reply("So", "error", InternalError("out of memory"))
    before = signal.getsignal(signal.SIGINT)
    assert run(parts, end, as_json) == 1
    assert signal.getsignal(signal.SIGINT) is before
    output, errors = capsys.readouterr()
    assert errors == "lmchat: out of memory\n"
    if as_json:
        found = json.loads(output)
        assert (found["text"], found["finish_reason"]) == ("So", "error")
        assert found["error"] == {"type": "InternalError", "message": "out of memory"}
    else:
        assert output == "So\n"


def test_an_error_before_the_first_token_raises_and_prints_nothing(capsys):
    with pytest.raises(InvalidRequest):
        run([], InvalidRequest("top_k is -1"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("texts", "written"), [(["So"], "So\n"), (["So\n"], "So\n"), (["So\n", "", "it"], "So\nit\n")]
)
def test_an_error_midway_starts_a_new_line(capsys, texts, written):
    with pytest.raises(InternalError):
        run([Delta("text", text) for text in texts], InternalError("out of memory"))
    assert capsys.readouterr() == (written, "")


def test_every_delta_is_flushed(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw, 8192)))
    seen = []

    def parts():
        for text in ("So", " it", " goes"):
            yield Delta("text", text)
            seen.append(raw.getvalue())

    assert run(parts(), reply("So it goes", "stop")) == 0
    assert seen == [b"So", b"So it", b"So it goes"]


def test_notices_go_to_stderr(capsys):
    assert run([Delta("text", "a\n")], reply("a\n", "stop", notices=("rewritten",))) == 0
    assert capsys.readouterr() == ("a\n", "lmchat: rewritten\n")


def test_reasoning_is_shown_on_a_terminal_only(capsys, monkeypatch):
    parts = [Progress(5, 9), Delta("reasoning", "hm"), Delta("text", "So")]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(parts, reply("So", "stop")) == 0
    output, errors = capsys.readouterr()
    assert output == "So\n"
    assert "5 of 9" in errors
    assert errors.index("hm") > errors.index(one_answer.CLEAR_LINE, errors.index("5 of 9"))


def test_a_terminal_gets_no_control_characters(capsys, monkeypatch):
    parts = [Delta("text", "\x1b[2Jred\n")]
    assert run(parts, reply("\x1b[2Jred\n", "stop")) == 0
    assert capsys.readouterr().out == "\x1b[2Jred\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(parts, reply("\x1b[2Jred\n", "stop")) == 0
    assert capsys.readouterr().out == "[2Jred\n"


def interrupt_and_wait():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def test_ctrl_c_before_the_generation_starts_stops_it():
    tries = []

    def stop():
        tries.append(None)
        return "committed" if len(tries) == 3 else None

    with one_answer._stopping_on_interrupt(stop, one_answer.Patience()):
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 60
        while len(tries) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):  # the second one raises at once
            interrupt_and_wait()
    assert len(tries) == 3


CHILD = """
import json, sys
import conftest
from lmchat.cli.main import main
try:
    main()
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""


def test_one_answer_imports_no_chat_modules(model):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "chat", model, "-p", "Hello", *GREEDY],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    code, modules = json.loads(done.stderr)
    assert code == 0
    unwanted = {
        "torch", "transformers", "gradio", "matplotlib", "prompt_toolkit", "huggingface_hub",
        "markdown_it", "rich",
    }  # fmt: skip
    assert not unwanted & set(modules)
