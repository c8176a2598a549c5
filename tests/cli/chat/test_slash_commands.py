"""`lmchat chat` on a real, tiny model in a terminal: every command, and Ctrl-C at any moment."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
from assets import ROOT, asset
from chat_models import CHATML, chat_model
from chat_user import Person
from command import LMCHAT
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


@pytest.fixture
def start(model, tmp_path):
    """Starts the command in a terminal."""

    def one(*options, folder=model, env=None, columns=160):
        command = [*LMCHAT, "chat", str(folder), *OPTIONS, *options]
        env = {"PYTHONPATH": str(ROOT), "LMCHAT_HOME": str(tmp_path / "home")} | (env or {})
        return Terminal(command, columns=columns, rows=24, env=env)

    return one


def engine(model, **options):
    return lmchat.ChatEngine(model, cache_memory="32MiB", threads=1, **options)


def test_a_conversation_and_its_branches(start, model, tmp_path):
    with start("--system", "You are brief.") as terminal:
        person = Person(terminal)
        person.type("hello", "context 35 / 4,096")
        person.type("/show", "system prompt: You are brief.\n1> hello\n", "(cut at its limit)")
        terminal.type("/undo")
        terminal.key("enter")
        terminal.wait("taken back; Enter sends it again")
        terminal.wait(lambda: terminal.text.endswith("\n> hello"))
        person.prompt = "> hello"
        person.type("", "1 new + 26 cached", prompt="> ")
        person.type(
            "/retry",
            "1 new + 26 cached",
            "greedy settings give the same reply; /set temperature 0.8 varies it",
        )
        person.type("/branches", "  1 1  hello → ", "  1 2  hello → ", "* 1 3  hello → ")
        person.type("/branches 1 1", "session chat-1, context 35 / 4,096 (<1%)", "1> hello")
        person.type("/branches 1", "* 1 1  hello → ")
        person.type("/branches 1 4", "error: question 1 has no branch 4, expected 1 to 3")
        person.type("/edit 2 x", "error: there is no question 2, expected 1, the only one")
        person.type("/edit 1 hello world", "new + ")
        person.type("/branches 1", "* 1 4  hello world → ")
        person.type("/continue", "cut at max_new_tokens")
        person.type("and now?", "new + ")
        person.type('"""/not a command"""', "new + ")
        person.type("/undo", "taken back", prompt='> """/not a command"""')
        person.type("", "new + ", prompt="> ")
        person.type("/show 1", "3> /not a command\n")
        file = tmp_path / "talk.json"
        person.type(f"/export {file}", "talk.json: 7 messages written")
        person.leave()
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
        person = Person(terminal)
        person.type("hello", "new + ")
        person.type("/branches 2", "error: there is no question 2, expected 1, the only one")
        person.type("/branches 1", "question 1 has one version only; /edit and /retry make more")
        person.type("/branches 1 2", "question 1 has no branch 2, expected 1, the only one")
        person.type("/undo", "taken back", prompt="> hello")
        terminal.key("ctrl-c")
        person.prompt = "> "
        person.type("/branches 1", "  1 1  hello → ", "/branches 1 K switches to branch K")
        person.type("/branches 1 1", "session chat-1, context")
        person.leave()


def test_a_reply_that_is_drawn_may_be_drawn_again(start):
    with start("--temperature", "1", "--seed", "3") as terminal:
        person = Person(terminal)
        person.type("hello", "new + ")
        assert "greedy" not in person.type("/retry", "new + ")
        person.type("/set do_sample off", "do_sample: off")
        person.type("/retry", "new + ")
        person.type("/retry", "greedy settings give the same reply; /set do_sample on varies it")
        person.type("/system Be kind.", "system prompt: Be kind.")
        assert "greedy" not in person.type("/retry", "new + ")  # to another prompt
        person.leave()


def test_sessions(start):
    with start("--session", "first") as terminal:
        person = Person(terminal)
        person.type("hello", "new + 0 cached")
        person.type("/new", "goes back\nit has the same settings\n", prompt="chat-1> ")
        person.type("other", "new + ")
        person.type(
            "/fork copy", "session copy continues from here; chat-1 is unchanged", prompt="copy> "
        )
        person.type("in the copy", "new + ")
        person.type("/fork copy", "error: ")
        person.type("/fork early 1", "session early continues", prompt="early> ")
        person.type("/show all", "1> other")
        shown = person.type("/sessions", "* early", "  first", "  chat-1", "  copy")
        assert re.search(r"turns  tokens +device  KV +used +TTFT", shown)
        assert re.search(r"first +1 +\d+ +[1-9][\d.]+ KiB  all", shown)
        assert re.search(r"copy +2 +\d+ .* (now|ago) .*other", shown)
        person.type("/switch first", "session first, context", "1> hello", prompt="first> ")
        person.type("/switch nobody", "error: there is no session 'nobody', expected one of ")
        person.type("/new first", "error: session 'first' exists")
        person.type("/system Be kind.", "the next question computes the whole conversation again (")
        same = "it has the same system prompt and settings\n"
        person.type("/new second", "/switch first goes back\n" + same, prompt="second> ")
        person.leave()


def test_settings_and_facts(start, tmp_path):
    with start("--temperature", "0.5", "--seed", "3") as terminal:
        person = Person(terminal)
        person.type("/set", "max_new_tokens  8, this session's\n", "temperature     0.5, this")
        person.type("/set temperature 2", "temperature: 2.0, this session's (how evenly")
        person.type("/set temperature default", "temperature: 0.0, the model's (how evenly")
        person.type('/set stop_strings ["a", "b"]', 'stop_strings: ["a", "b"], this session')
        person.type("/set ignore_eos on", "ignore_eos: on, this session's (on: go on after")
        person.type("/set top_k", "top_k: not set (draw from")
        person.type("/set temperature hot", "error: temperature is 'hot', expected a number")
        person.type("/set tempo 1", "error: unknown setting 'tempo'")
        assert "again" not in person.type("/system Be kind.", "system prompt: Be kind.")
        person.type("hello", "new + ")
        assert "again" not in person.type("/system", "system prompt: Be kind.")
        shown = person.type(
            "/system off", "no system prompt", "computes the whole conversation again ("
        )
        size = re.search(r"again \((\d+) tokens\)", shown)[1]
        person.type("/stats", f"chat-1: context {size} / ")
        person.type("/tokens", "user: ", "1:'<|im_start|>' ", "2:'<|im_end|>' ")
        person.type("/stats", "session    chat-1: context ", "decoded    ", "pages ")
        person.type("/think", "reasoning: the model's template cannot switch it; shown")
        person.type("/think off", "error: the model's chat template cannot switch reasoning")
        person.type("/undo 2", "error: /undo is followed by '2', expected nothing after it")
        person.type("/show 0", "error: number of rounds is '0', expected 1 or more, or all")
        person.type("/think maybe", "error: /think maybe: expected on, off, show or hide")
        person.type("/show", "1> hello")
        file = tmp_path / "talk.md"
        person.type(f"/export {file}", "talk.md: 2 messages written")
        person.type(f"/export {file}", f"error: {file} exists; ")
        person.type(f"/export {file} --force", "talk.md: 2 messages written")
        person.type("/export talk.txt", "error: file is 'talk.txt', expected a name that ends")
        person.type("/export /nowhere/talk.md", "cannot be written: No such file or directory")
        assert file.read_text().startswith("# hello\n\n## User\n\nhello\n\n## Assistant\n\n")
        person.leave()


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


def test_tokens_of_sentencepiece_show_their_spaces(start):
    with start(folder=asset("models/stories260K/hf")) as terminal:
        person = Person(terminal)
        person.type("Once upon a time", "new + ")
        person.type("/tokens", "1:'<s>' ", ":'␣upon' ")
        person.leave()


def test_a_chat_that_nobody_would_see_is_refused(model, tmp_path):
    said = tmp_path / "said"
    command = shlex.join([*LMCHAT, "chat", str(model)])
    with Terminal(
        ["sh", "-c", f"{command} > {said} 2>&1"], env={"PYTHONPATH": str(ROOT)}
    ) as terminal:
        assert terminal.wait_end() == 2
    assert said.read_text().startswith("lmchat: neither stdout nor stderr is a terminal, expected")


def test_help_and_mistakes(start):
    with start() as terminal:
        person = Person(terminal)
        shown = person.type("/help", "/export FILE [--force] [--pages]", "Ctrl-D leaves.")
        names = re.findall(r"^/(\w+)", shown, re.MULTILINE)
        assert names == [
            "help", "exit", "new", "sessions", "search", "switch", "undo", "retry", "edit",
            "continue", "fork", "title", "tag", "pin", "delete", "branches", "system", "set",
            "show", "stats", "tokens", "think", "export", "import", "save",
        ]  # fmt: skip
        person.type("/help set", "/set [NAME [VALUE]]\n", "top_k ", "min_p ")
        for name in names:
            person.type(f"/help {name}", f"/{name}")
        person.type("/retri", "error: there is no command /retri; did you mean /retry?")
        person.type("/", "error: there is no command /; /help lists them.")
        person.type("/show many", "error: number of rounds is 'many', expected 1 or more, or all")
        person.type("x " * 2500, "error: the conversation would be ", "; send less, or lower max_")
        person.type("hello", "new + 0 cached")
        person.type("x " * 2500, "error: the turn alone would be ", "; send less, or lower max_")
        terminal.type("/exit")
        terminal.key("enter")
        assert terminal.wait_end() == 0


def test_a_context_that_refuses_is_told_how_to_make_room(start):
    with start("--overflow", "refuse", "--max-context-tokens", "64") as terminal:
        person = Person(terminal)
        person.type("x " * 40, "error: the conversation would be ", "; send less, or lower max_")
        person.type("hello", "new + 0 cached")
        person.type("x " * 20, "error: the conversation would be ", "; /undo or /new makes room")
        person.leave()


def test_a_command_may_be_followed_by_a_line_end(start):
    with start() as terminal:
        person = Person(terminal)
        terminal.wait_prompt()
        terminal.paste("/system\nYou are brief.\nAnd kind.")
        person.prompt = "  And kind."
        person.type("", "system prompt: You are brief.\nAnd kind.\n", prompt="> ")
        terminal.paste("/exit\nat once, please")
        person.prompt = "  at once, please"
        person.type("", "error: /exit is followed by 'at once, please', expected", prompt="> ")
        person.leave()


def test_a_long_name_leaves_room_to_type(start):
    name = "a journey through the mountains " * 6
    with start(columns=40) as terminal:
        person = Person(terminal)
        person.type(f"/new {name.strip()}", "begins; /switch chat-1", prompt="a journey th…> ")
        person.type("hello", "new + ")
        assert "a journey th…> hello" in terminal.display
        person.leave()


def test_a_stopped_reply_says_how_it_goes_on(start):
    with start() as terminal:
        person = Person(terminal)
        person.type("hello", "cut at max_new_tokens; /continue goes on")
        person.type("/switch chat-1", "(cut at its limit)", "\n/continue goes on\n")
        person.leave()


@pytest.mark.parametrize("options", [[], ["--system", "You are brief."]])
def test_a_chat_without_a_question(start, options):
    with start(*options) as terminal:
        person = Person(terminal)
        person.type("/undo", "There is nothing to undo.")
        person.type("/retry", "There is nothing to retry.")
        person.type("/continue", "There is nothing to continue.")
        person.type("/edit", "There is nothing to edit.")
        person.type("/edit 1 x", "There is nothing to edit.")
        person.type("/branches", "no branches: /retry, /edit and /undo make some")
        person.type("/branches 1", "error: there is no question yet")
        person.type("/branches 1 1", "error: there is no question yet")
        person.type("/switch", "error: /switch needs the name of a session: chat-1")
        person.type("/fork copy 1", "error: there is no question yet")
        person.type("/show", "no question yet")
        person.type("/fork copy", "session copy continues from here", prompt="copy> ")
        person.type("hello", "new + ")
        person.leave()


def test_a_template_that_switches_reasoning(start, tmp_path):
    folder = chat_model(tmp_path / "thinker", template=THINKING)
    with start(folder=folder) as terminal:
        person = Person(terminal)
        person.type("/think", "reasoning: as the model decides; shown")
        person.type("/think off", "reasoning: off; shown")
        person.type("hello", "new + ")
        person.type("/think on", "reasoning: on; shown")
        person.type("/think hide", "reasoning: on; hidden")
        person.type("/undo", "taken back", prompt="> hello")
        person.type("", "new + ", prompt="> ")
        first, second = tmp_path / "first.json", tmp_path / "second.json"
        person.type(f"/export {second}", "messages written")
        person.type("/branches 1 1", "session chat-1")
        person.type(f"/export {first}", "messages written")
        person.leave()
    with engine(folder) as reference:
        text = reference.tokenizer.decode
        off, on = (text(json.loads(file.read_text())["turns"][0]["token_ids"])
                   for file in (first, second))  # fmt: skip
        assert off == on + "<think>\n\n</think>\n\n"


def test_edit_on_the_input_line(start):
    with start() as terminal:
        person = Person(terminal)
        person.type("as it was", "new + 0 cached")
        person.type('"""/a command? """', "new + ")
        person.type(
            "/edit", "edit the question: Enter sends it", prompt='> /edit 2 """/a command? """'
        )
        person.type("", "error: the question is unchanged or empty; /retry", prompt="> ")
        person.type("/edit 1", "edit the question: Enter sends it", prompt="> /edit 1 as it was")
        terminal.key("ctrl-c")
        person.prompt = "> "
        person.type("/edit 1", "edit the question: Enter sends it", prompt="> /edit 1 as it was")
        person.type(" before", "new + ", prompt="> ")
        person.type("/show all", "1> as it was before\n")
        person.type("/branches 1", "  1 1  as it was → ", "* 1 2  as it was before → ")
        person.leave()


def test_a_model_without_a_template(start, tmp_path):
    folder = chat_model(tmp_path / "base", template=None)
    with start(folder=folder) as terminal:
        terminal.wait("The model has no chat template: it continues the text that you type.")
        person = Person(terminal)
        person.type("Once upon a time", "new + 0 cached")
        person.type("/system x", "error: system prompt: the model has no chat template")
        person.leave()


@pytest.mark.parametrize("moment", ["at once", "first news", "text", "command"])
def test_ctrl_c_at_any_moment(start, moment):
    with start("--max-new-tokens", "3000") as terminal:
        person = Person(terminal)
        terminal.wait_prompt()
        terminal.type("/tokens all" if moment == "command" else "word " * 300)
        terminal.wait(lambda: terminal.cursor[0] > 3)
        written = len(terminal.raw)
        terminal.key("enter")
        if moment == "at once":
            terminal.key("ctrl-c")
        elif moment == "first news":
            # Its hiding: a short reply may be over before anybody sees it hidden.
            terminal.wait(lambda: terminal.raw.count(b"\x1b[?25l", written) > 0)
            terminal.key("ctrl-c")
        elif moment == "text":
            terminal.wait(lambda: terminal.raw.count(b"\x1b[?7l", written) > 3)
            terminal.key("ctrl-c", "ctrl-c", "ctrl-c")
        else:
            terminal.key("ctrl-c")
        terminal.wait_prompt()
        person.type("/set max_new_tokens 5", "max_new_tokens: 5")
        person.type("hello", "TTFT")
        person.leave()


def test_ctrl_c_while_the_model_loads(start):
    with start() as terminal:
        terminal.wait("loading tiny ...")
        terminal.key("ctrl-c")
        assert terminal.wait_end() == 130
        assert terminal.text == "lmchat: interrupted"


def test_what_cannot_start(start, tmp_path):
    with start(folder=tmp_path / "nothing") as terminal:
        assert terminal.wait_end() == 2
        assert re.fullmatch(r"lmchat: .*nothing.*", terminal.text.replace("\n", ""))
    with start(folder="") as terminal:
        assert terminal.wait_end() == 2
