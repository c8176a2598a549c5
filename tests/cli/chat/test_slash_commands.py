"""`lmchat chat` on a real, tiny model in a terminal: every command, and Ctrl-C at any moment."""

import contextlib
import json
import os
import re
import shlex
from types import SimpleNamespace

import pytest
from assets import ROOT, asset
from chat_models import CHATML, chat_model
from chat_terminal import ChatUser
from command import LMCHAT
from http_server import RunningServer
from terminal import Terminal

import lmchat
from lmchat.cli.chat import slash_commands

OPTIONS = ["--cache-memory", "32MiB", "--threads", "1", "--max-new-tokens", "8"]
THINKING = CHATML.replace(
    "assistant\\n' }}{% endif",
    "assistant\\n' }}{% if not enable_thinking | default(true) %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("models") / "tiny")


BOTH = pytest.mark.parametrize("start", ["here", "url"], indirect=True)
"""With an engine in the process of the chat, and over a server."""


@pytest.fixture
def start(request, model, tmp_path):
    """Starts the command in a terminal. With the parameter "url" a server has the engine."""
    over_url = getattr(request, "param", "here") == "url"
    data = tmp_path / "data"

    def one(*options, folder=model, env=None, columns=160):
        source = [str(folder), *OPTIONS]
        if over_url:
            made = RunningServer(model=str(folder), store=data, cache_memory="32MiB", threads=1)
            source = ["--url", servers.enter_context(made).url, *OPTIONS[4:]]
        env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(data)} | (env or {})
        command = [*LMCHAT, "chat", *source, *options]
        return Terminal(command, columns=columns, rows=24, env=env)

    with contextlib.ExitStack() as servers:
        yield one


def engine(model, **options):
    return lmchat.ChatEngine(model, cache_memory="32MiB", threads=1, **options)


@BOTH
def test_a_conversation_and_its_branches(start, model, tmp_path):
    with start("--system", "You are brief.") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "context 35 / 4,096")
        user.type("/show", "system prompt: You are brief.\n1> hello\n", "(cut at its limit)")
        terminal.type("/undo")
        terminal.key("enter")
        terminal.wait("taken back; Enter sends it again")
        terminal.wait(lambda: terminal.text.endswith("\n> hello"))
        user.prompt = "> hello"
        user.type("", "1 new + 26 cached", prompt="> ")
        user.type(
            "/retry",
            "1 new + 26 cached",
            "greedy settings give the same reply; /set temperature 0.8 varies it",
        )
        user.type("/branches", "  1 1  hello → ", "  1 2  hello → ", "* 1 3  hello → ")
        user.type("/branches 1 1", "session chat-1, context 35 / 4,096 (<1%)", "1> hello")
        user.type("/branches 1", "* 1 1  hello → ")
        user.type("/branches 1 4", "error: question 1 has no branch 4, expected 1 to 3")
        user.type("/edit 2 x", "error: there is no question 2, expected 1, the only one")
        user.type("/edit 1 hello world", "new + ")
        user.type("/branches 1", "* 1 4  hello world → ")
        user.type("/continue", "cut at max_new_tokens")
        user.type("and now?", "new + ")
        user.type('"""/not a command"""', "new + ")
        user.type("/undo", "taken back", prompt='> """/not a command"""')
        user.type("", "new + ", prompt="> ")
        user.type("/show 1", "3> /not a command\n")
        file = tmp_path / "talk.json"
        user.type(f"/export {file}", "talk.json: 7 messages written")
        user.leave()
    with engine(model) as reference:
        chat = reference.session(system="You are brief.", settings={"max_new_tokens": 8})
        chat.send("hello world")
        chat.continue_()
        chat.send("and now?")
        chat.send("/not a command")
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["token_ids"] == chat.token_ids
        assert [turn["text"] for turn in found["turns"]] == [turn.text for turn in chat.turns]
        assert found["turns"][-1]["finish_reason"] == chat.turns[-1].finish_reason


def test_branches_of_one_question(start):
    with start() as terminal:
        user = ChatUser(terminal)
        user.type("hello", "new + ")
        user.type("/branches 2", "error: there is no question 2, expected 1, the only one")
        user.type("/branches 1", "question 1 has one version only; /edit and /retry make more")
        user.type("/branches 1 2", "question 1 has no branch 2, expected 1, the only one")
        user.type("/undo", "taken back", prompt="> hello")
        terminal.key("ctrl-c")
        user.prompt = "> "
        user.type("/branches 1", "  1 1  hello → ", "/branches 1 K switches to branch K")
        user.type("/branches 1 1", "session chat-1, context")
        user.leave()


def test_a_sampled_reply_can_be_sampled_again(start):
    with start("--temperature", "1", "--seed", "3") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "new + ")
        assert "greedy" not in user.type("/retry", "new + ")
        user.type("/set do_sample off", "do_sample: off")
        user.type("/retry", "new + ")
        user.type("/retry", "greedy settings give the same reply; /set do_sample on varies it")
        user.type("/system Be kind.", "system prompt: Be kind.")
        assert "greedy" not in user.type("/retry", "new + ")  # to another prompt
        user.leave()


@BOTH
def test_sessions_are_listed_switched_and_renamed_in_the_chat(start):
    with start("--session", "first") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "new + 0 cached")
        user.type("/new", "goes back\nit has the same settings\n", prompt="chat-1> ")
        user.type("other", "new + ")
        user.type(
            "/fork copy", "session copy continues from here; chat-1 is unchanged", prompt="copy> "
        )
        user.type("in the copy", "new + ")
        user.type("/fork copy", "error: ")
        user.type("/fork early 1", "session early continues", prompt="early> ")
        user.type("/show all", "1> other")
        shown = user.type("/sessions", "* early", "  first", "  chat-1", "  copy")
        assert re.search(r"turns  tokens +device  KV +used +TTFT", shown)
        assert re.search(r"first +1 +\d+ +[1-9][\d.]+ KiB  all", shown)
        assert re.search(r"copy +2 +\d+ .* (now|ago) .*other", shown)
        user.type("/switch first", "session first, context", "1> hello", prompt="first> ")
        user.type("/switch nobody", "error: there is no session 'nobody', expected one of ")
        user.type("/new first", "error: session 'first' exists")
        user.type("/system Be kind.", "the next question computes the whole conversation again (")
        same = "it has the same system prompt and settings\n"
        user.type("/new second", "/switch first goes back\n" + same, prompt="second> ")
        user.leave()


@BOTH
def test_settings_change_and_facts_are_shown_in_the_chat(start, tmp_path):
    with start("--temperature", "0.5", "--seed", "3") as terminal:
        user = ChatUser(terminal)
        user.type("/set", "max_new_tokens  8, this session's\n", "temperature     0.5, this")
        user.type("/set temperature 2", "temperature: 2.0, this session's (how evenly")
        user.type("/set temperature default", "temperature: 0.0, the model's (how evenly")
        user.type('/set stop_strings ["a", "b"]', 'stop_strings: ["a", "b"], this session')
        user.type("/set ignore_eos on", "ignore_eos: on, this session's (on: continue after")
        user.type("/set top_k", "top_k: not set (sample from")
        user.type("/set temperature hot", "error: temperature is 'hot', expected a number")
        user.type("/set tempo 1", "error: unknown setting 'tempo', expected one of max_new_tokens,")
        for typed in ("/set temprature", "/set temprature 1"):
            user.type(typed, "error: unknown setting 'temprature'; did you mean 'temperature'?\n")
        assert "again" not in user.type("/system Be kind.", "system prompt: Be kind.")
        user.type("hello", "new + ")
        assert "again" not in user.type("/system", "system prompt: Be kind.")
        shown = user.type(
            "/system off", "no system prompt", "computes the whole conversation again ("
        )
        size = re.search(r"again \((\d+) tokens\)", shown)[1]
        user.type("/stats", f"chat-1: context {size} / ")
        user.type("/tokens", "user: ", "1:'<|im_start|>' ", "2:'<|im_end|>' ")
        user.type("/stats", "session    chat-1: context ", "decoded    ", "pages ")
        user.type("/think", "reasoning: the model's template cannot switch it; shown")
        user.type("/think off", "error: the model's chat template cannot switch reasoning")
        user.type("/undo 2", "error: /undo is followed by '2', expected nothing after it")
        user.type("/show 0", "error: number of rounds is '0', expected 1 or more, or all")
        user.type("/think maybe", "error: /think maybe: expected on, off, show or hide")
        user.type("/show", "1> hello")
        file = tmp_path / "talk.md"
        user.type(f"/export {file}", "talk.md: 2 messages written")
        user.type(f"/export {file}", f"error: {file} exists; ")
        user.type(f"/export {file} --force", "talk.md: 2 messages written")
        user.type("/export talk.txt", "error: file is 'talk.txt', expected a name that ends")
        user.type("/export /nowhere/talk.md", "cannot be written: No such file or directory")
        assert file.read_text().startswith("# hello\n\n## User\n\nhello\n\n## Assistant\n\n")
        user.leave()


@BOTH
def test_the_model_and_its_device_are_shown_in_the_chat(request, start, model):
    over_url = "url" in request.node.name
    with start("--session", "facts") as terminal:
        user = ChatUser(terminal)
        shown = user.type("/info", "session  facts: context 0 / 4,096 (0%)")
        facts = dict(line.split(maxsplit=1) for line in shown.splitlines() if "  " in line)
        assert facts["model"] == (model.name if over_url else str(model))
        assert facts["format"] == "float32, KV float32"
        assert facts["threads"] == "1"
        assert facts["device"] == os.environ.get("TURBOMIND_DEVICE", "cpu")
        assert facts["context"] == "4,096 tokens"
        assert ("server" in facts) is over_url
        again = user.type("/model", "session  facts: ")
        assert again.partition("\n")[2] == shown.partition("\n")[2]
        user.type("/model other", "error: /model is followed by 'other', expected nothing after it")
        user.leave()


def test_quantized_weights_are_shown_in_the_chat(start):
    with start("--quantize", "int8") as terminal:
        user = ChatUser(terminal)
        assert re.search(r"format +int8, KV float32\n", user.type("/model", "KV"))
        user.leave()


def test_a_chat_is_cleared_after_a_question(start):
    with start("--session", "first", "--system", "Be kind.") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "new + ")
        asked = "Start a new chat? This one is session first, which is not deleted. [y/N] "
        user.type("/clear", asked.rstrip(), prompt=asked)
        user.type("", "session first continues\n", prompt="> ")
        user.type("/show", "1> hello\n")
        user.type("/clear", asked.rstrip(), prompt=asked)
        user.type("y", "session chat-1 begins; /switch first goes back\n", prompt="chat-1> ")
        assert "hello" not in user.type("/show all")
        user.type("/system", "system prompt: Be kind.")
        user.type("/switch first", "1> hello\n", prompt="first> ")
        user.leave()


def test_other_names_of_commands_are_completed():
    found = [text for text, _, _ in slash_commands.complete(SimpleNamespace(), "/")]
    assert found == ["/" + name for name in slash_commands.NAMES]
    assert {"/quit", "/bye", "/q", "/?", "/model", "/clear"} < {*found}
    assert [text for text, _, _ in slash_commands.complete(SimpleNamespace(), "/qu")] == ["/quit"]


def test_names_with_spaces_are_completed():
    found = [SimpleNamespace(name=name, title="") for name in ("my trip", "trip")]
    engine = SimpleNamespace(sessions=lambda _owner, limit: found[:limit])
    repl = SimpleNamespace(session=SimpleNamespace(owner="local"), engine=engine)
    for command in ("/switch", "/delete"):
        assert list(slash_commands.complete(repl, f"{command} my t")) == [("my trip", -4, "")]
        assert [text for text, _, _ in slash_commands.complete(repl, f"{command} ")] == [
            "my trip",
            "trip",
        ]
    assert list(slash_commands.complete(repl, "/set temperature t")) == []


@BOTH
def test_tokens_of_sentencepiece_show_their_spaces(start):
    with start(folder=asset("models/stories260K/hf")) as terminal:
        user = ChatUser(terminal)
        user.type("Once upon a time", "new + ")
        user.type("/tokens", "1:'<s>' ", ":'␣upon' ")
        user.leave()


def test_a_chat_without_a_terminal_is_refused(model, tmp_path):
    output = tmp_path / "output"
    command = shlex.join([*LMCHAT, "chat", str(model)])
    with Terminal(
        ["sh", "-c", f"{command} > {output} 2>&1"], env={"PYTHONPATH": str(ROOT)}
    ) as terminal:
        assert terminal.wait_end() == 2
    assert output.read_text().startswith(
        "lmchat: neither stdout nor stderr is a terminal, expected"
    )


def test_help_lists_commands_and_mistakes_name_the_nearest(start):
    with start() as terminal:
        user = ChatUser(terminal)
        shown = user.type("/help", "/export FILE [--force] [--pages]", "Ctrl-D leaves.")
        names = re.findall(r"^/(\w+)", shown, re.MULTILINE)
        assert names == [
            "help", "exit", "new", "clear", "sessions", "search", "switch", "undo", "retry",
            "edit", "edit_reply", "continue", "fork", "title", "tag", "pin", "delete", "branches",
            "system", "set", "show", "copy", "file", "info", "stats", "tokens", "think", "export",
            "import", "save",
        ]  # fmt: skip
        user.type("/help set", "/set [NAME [VALUE]]\n", "top_k ", "min_p ")
        user.type("/help bye", "/exit\n", "Leave; Ctrl-D does the same (also /quit, /bye, /q).")
        again = user.type("/?", "/export FILE [--force] [--pages]", "Ctrl-D leaves.")
        assert again.partition("\n")[2] == shown.partition("\n")[2]
        for name in names:
            user.type(f"/help {name}", f"/{name}")
        user.type("/retri", "error: there is no command /retri; did you mean /retry?")
        for typed in ("delet", "deleet", "tempo", "load"):  # far from all, or a mistake deletes
            user.type(f"/{typed}", f"error: there is no command /{typed}; /help lists all.")
        user.type("/", "error: there is no command /; /help lists all.")
        user.type("/show many", "error: number of rounds is 'many', expected 1 or more, or all")
        user.type("x " * 2500, "error: the conversation would be ", "; send less, or lower")
        user.type("hello", "new + 0 cached")
        user.type("x " * 2500, "error: the turn alone would be ", "; send less, or lower")
        terminal.type("/exit")
        terminal.key("enter")
        assert terminal.wait_end() == 0


def test_a_full_context_with_overflow_refuse_names_the_commands_that_make_room(start):
    with start("--overflow", "refuse", "--max-context-tokens", "64") as terminal:
        user = ChatUser(terminal)
        user.type("x " * 40, "error: the conversation would be ", "; send less, or lower")
        user.type("hello", "new + 0 cached")
        user.type("x " * 20, "error: the conversation would be ", "; /undo or /new makes room")
        user.leave()


@BOTH
def test_dropped_rounds_are_shown_above_the_others(start, request, tmp_path):
    """Of this process and over a server, in a list of all rounds, a resumed chat and files."""
    small = chat_model(tmp_path / "small", context=128)
    with start("--session", "trip", folder=small) as terminal:
        user = ChatUser(terminal)
        for number in range(1, 8):
            user.type(f"{number} said", " cached")
        shown = user.type("/show all", "> 7 said\n")
        assert "1 said" in shown
        numbers = re.findall(r"^(\d*)> (\d) said", shown, re.MULTILINE)
        assert [int(said) for _, said in numbers] == list(range(1, 8))
        dropped = sum(not number for number, _ in numbers)
        assert 0 < dropped < 7
        mark = "── above: no longer in the prompt, because the context was full ──"
        places = [shown.index(part) for part in (f"{dropped} said", mark, f"{dropped + 1} said")]
        assert places == sorted(places)
        file = tmp_path / "trip.md"
        user.type(f"/export {file}", "written")
        text = file.read_text()
        assert text.startswith("# 1 said\n")
        assert text.index(f"{dropped} said") < text.index("*Above: no longer in the prompt")
        user.leave()


def test_names_and_paths_have_spaces_and_quotes(start, tmp_path):
    (tmp_path / "my files").mkdir()
    with start("--session", "trip to Rome") as terminal:
        user = ChatUser(terminal)
        user.type("hello", "new + ")
        user.type("/fork my copy", "session my copy continues", prompt="my copy> ")
        user.type('/fork "copy 2"', "session copy 2 continues", prompt="copy 2> ")
        user.type("/fork an early copy 1", "session an early copy", prompt="an early copy> ")
        user.type("/fork early 2", "error: there is no question 2, expected 1, the only one")
        user.type("/switch 'my copy'", "my copy", prompt="my copy> ")
        user.type(f'/export "{tmp_path}/my files/a talk.MD"', "a talk.MD: 2 messages written")
        user.type(f"/export {tmp_path}/my\\ files/all.Zip", "all.Zip: 2 messages of all branches")
        user.type(f'/import "{tmp_path}/my files/all.Zip" back again', prompt="back again> ")
        user.type('/new "one more"', "session one more begins", prompt="one more> ")
        user.leave()
    assert (tmp_path / "my files/a talk.MD").read_text().startswith("# ")


def test_a_line_end_may_follow_a_command_name(start):
    with start() as terminal:
        user = ChatUser(terminal)
        terminal.wait_prompt()
        terminal.paste("/system\nYou are brief.\nAnd kind.")
        user.prompt = "  And kind."
        user.type("", "system prompt: You are brief.\nAnd kind.\n", prompt="> ")
        terminal.paste("/exit\nat once, please")
        user.prompt = "  at once, please"
        user.type("", "error: /exit is followed by 'at once, please', expected", prompt="> ")
        user.leave()


def test_a_long_name_leaves_room_to_type(start):
    name = "a journey through the mountains " * 6
    with start(columns=40) as terminal:
        user = ChatUser(terminal)
        user.type(f"/new {name.strip()}", "begins; /switch chat-1", prompt="a journey th…> ")
        user.type("hello", "new + ")
        assert "a journey th…> hello" in terminal.display
        user.leave()


@BOTH
def test_a_cut_reply_names_the_command_that_extends_it(start):
    with start() as terminal:
        user = ChatUser(terminal)
        user.type("hello", "cut at max_new_tokens; /continue goes on")
        user.type("/switch chat-1", "(cut at its limit)", "\n/continue goes on\n")
        user.leave()


@pytest.mark.parametrize("options", [[], ["--system", "You are brief."]])
def test_a_chat_without_a_question(start, options):
    with start(*options) as terminal:
        user = ChatUser(terminal)
        user.type("/undo", "There is nothing to undo.")
        user.type("/retry", "There is nothing to retry.")
        user.type("/continue", "There is nothing to continue.")
        user.type("/edit", "There is nothing to edit.")
        user.type("/edit 1 x", "There is nothing to edit.")
        user.type("/branches", "no branches: /retry, /edit and /undo make some")
        user.type("/branches 1", "error: there is no question yet")
        user.type("/branches 1 1", "error: there is no question yet")
        user.type("/switch", "error: /switch needs the name of a session: chat-1")
        user.type("/fork copy 1", "error: there is no question yet")
        user.type("/show", "no question yet")
        user.type("/fork copy", "session copy continues from here", prompt="copy> ")
        user.type("hello", "new + ")
        user.leave()


@BOTH
def test_a_template_that_switches_reasoning(start, tmp_path):
    folder = chat_model(tmp_path / "thinker", template=THINKING)
    with start(folder=folder) as terminal:
        user = ChatUser(terminal)
        user.type("/think", "reasoning: as the model decides; shown")
        user.type("/think off", "reasoning: off; shown")
        user.type("hello", "new + ")
        user.type("/think on", "reasoning: on; shown")
        user.type("/think hide", "reasoning: on; hidden")
        user.type("/undo", "taken back", prompt="> hello")
        user.type("", "new + ", prompt="> ")
        first, second = tmp_path / "first.json", tmp_path / "second.json"
        user.type(f"/export {second}", "messages written")
        user.type("/branches 1 1", "session chat-1")
        user.type(f"/export {first}", "messages written")
        user.leave()
    with engine(folder) as reference:
        text = reference.tokenizer.decode
        off, on = (text(json.loads(file.read_text())["turns"][0]["token_ids"])
                   for file in (first, second))  # fmt: skip
        assert off == on + "<think>\n\n</think>\n\n"


@BOTH
def test_edit_on_the_input_line(start):
    with start() as terminal:
        user = ChatUser(terminal)
        user.type("as it was", "new + 0 cached")
        user.type('"""/a command? """', "new + ")
        user.type(
            "/edit", "edit the question: Enter sends it", prompt='> /edit 2 """/a command? """'
        )
        user.type("", "error: the question is unchanged or empty; /retry", prompt="> ")
        user.type("/edit 1", "edit the question: Enter sends it", prompt="> /edit 1 as it was")
        terminal.key("ctrl-c")
        user.prompt = "> "
        user.type("/edit 1", "edit the question: Enter sends it", prompt="> /edit 1 as it was")
        user.type(" before", "new + ", prompt="> ")
        user.type("/show all", "1> as it was before\n")
        user.type("/branches 1", "  1 1  as it was → ", "* 1 2  as it was before → ")
        user.leave()


@BOTH
def test_edit_reply_replaces_a_reply_without_generating(start):
    with start() as terminal:
        user = ChatUser(terminal)
        user.type("/edit_reply", "There is nothing to edit")
        user.type("first", "new + 0 cached")
        user.type("second", "new + ")
        user.type("/edit_reply 3 x", "error: ")
        user.type("/edit_reply 1 as I want it", "reply 1 is replaced; /branches lists the old one")
        user.type("/show all", "as I want it\n")
        user.type("/branches 1", "first → ", "* 1 2  first → as I want it")
        user.type(
            "/edit_reply", "edit the reply: Enter stores it", prompt="> /edit_reply 1 as I want it"
        )
        user.type(" now", "reply 1 is replaced", prompt="> ")
        user.type("/show", "as I want it now\n")
        user.leave()


@BOTH
def test_a_model_without_a_template(start, tmp_path):
    folder = chat_model(tmp_path / "base", template=None)
    with start(folder=folder) as terminal:
        terminal.wait("The model has no chat template: it continues the text that you type.")
        user = ChatUser(terminal)
        user.type("Once upon a time", "new + 0 cached")
        user.type("/system x", "error: system prompt: the model has no chat template")
        user.leave()


@BOTH
@pytest.mark.parametrize("moment", ["at once", "first event", "text", "command"])
def test_ctrl_c_at_any_moment(start, moment):
    with start("--max-new-tokens", "3000") as terminal:
        user = ChatUser(terminal)
        terminal.wait_prompt()
        terminal.type("/tokens all" if moment == "command" else "word " * 300)
        terminal.wait(lambda: terminal.cursor[0] > 3)
        written = len(terminal.raw)
        terminal.key("enter")
        if moment == "at once":
            terminal.key("ctrl-c")
        elif moment == "first event":
            # A short reply hides the cursor only briefly: wait for the escape sequence.
            terminal.wait(lambda: terminal.raw.count(b"\x1b[?25l", written) > 0)
            terminal.key("ctrl-c")
        elif moment == "text":
            terminal.wait(lambda: terminal.raw.count(b"\x1b[?7l", written) > 3)
            terminal.key("ctrl-c", "ctrl-c", "ctrl-c")
        else:
            terminal.key("ctrl-c")
        # A line that was stopped before the first token of its reply is offered again.
        offered = "stopped before its first token"
        terminal.wait(lambda: offered in terminal.text or terminal.at_prompt())
        if offered in terminal.text:
            terminal.key("ctrl-c")
        terminal.wait_prompt()
        user.type("/set max_new_tokens 5", "max_new_tokens: 5")
        user.type("hello", "TTFT")
        user.leave()


def test_ctrl_c_while_the_model_loads(start):
    with start() as terminal:
        terminal.wait("loading tiny ...")
        terminal.key("ctrl-c")
        assert terminal.wait_end() == 130
        assert terminal.text == "lmchat: interrupted"


def test_an_invalid_model_is_refused(start, tmp_path):
    with start(folder=tmp_path / "nothing") as terminal:
        assert terminal.wait_end() == 2
        assert re.fullmatch(r"lmchat: .*nothing.*", terminal.text.replace("\n", ""))
    with start(folder="") as terminal:
        assert terminal.wait_end() == 2
