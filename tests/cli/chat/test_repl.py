"""The chat in a terminal: exact screens.

The replies come from a script, so that every screen is known to the character.
"""

import re
import shlex
import textwrap

import pytest
from chat_terminal import OK, SCRIPTED, Chat, check_restored, leave, send, wait_replies
from terminal import Terminal

MARKDOWN = """\
# A day in Kyoto 京都

Start **early** at the [shrine](https://example.org) — see <https://x.org>, or `code`
on a new line. 日本語の文章はとても長いのでどこかで折り返さなければなりません。
😀👨‍👩‍👧 end

1. First
   with more

   second paragraph
2. Second item, long enough to be wrapped
   - nested *bullet*
     ```python
     def f(x): return "a line of code that does not fit"
     ```
10. Third

> A quote
> - with a list

| Name | Value | Comment |
|:-----|------:|---------|
| alpha | 1 | first |
| beta 日本 | 22 | `code` **bold** |

***

```
plain	tab
```
<b>no HTML</b>
"""
WIDE = """\
scripted answers · Alt-Enter new line · Ctrl-C stop · Ctrl-D leave · /help
> hello 日本 😀
A day in Kyoto 京都

Start early at the shrine (https://example.org) — see https://x.org, or code
on a new line. 日本語の文章はとても長いのでどこかで折り返さなければなりません。
😀👨👩👧 end

1. First
   with more

   second paragraph
2. Second item, long enough to be wrapped
   • nested bullet
     ```python
     def f(x): return "a line of code that does not fit"
     ```
3. Third

│ A quote
│
│ • with a list

Name        Value   Comment
─────────────────────────────
alpha           1   first
beta 日本      22   code bold

────────────────────────────────────────

```
plain   tab
```

<b>no HTML</b>
12 new + 0 cached · TTFT 90 ms · 31.2 tok/s · context 106 / 4,096 (3%)

>"""
NARROW = """\
scripted answers
Alt-Enter new line
Ctrl-C stop
Ctrl-D leave · /help
> hello 日本 😀
A day in Kyoto 京都

Start early at the
shrine
(https://example.org) —
see https://x.org, or
code
on a new line.
日本語の文章はとても長い
のでどこかで折り返さなけ
ればなりません。
😀👨👩👧 end

1. First
   with more

   second paragraph
2. Second item, long
   enough to be wrapped
   • nested bullet
     ```python
     def f(x): return "a
      line of code that
     does not fit"
     ```
3. Third

│ A quote
│
│ • with a list

Name     Value   Comment
────────────────────────
alpha        1   first
beta        22   code
日本             bold

────────────────────────

```
plain   tab
```

<b>no HTML</b>
12 new + 0 cached
TTFT 90 ms · 31.2 tok/s
context 106 / 4,096 (3%)

>"""


@pytest.fixture
def chat(tmp_path):
    return Chat(tmp_path)


@pytest.mark.parametrize("piece", [1, 13, 10_000])
@pytest.mark.parametrize(("columns", "rows", "golden"), [(80, 24, WIDE), (24, 10, NARROW)])
def test_the_transcript_of_a_reply(chat, columns, rows, golden, piece):
    pieces = [["text", MARKDOWN[i : i + piece]] for i in range(0, len(MARKDOWN), piece)]
    with chat(pieces, columns=columns, rows=rows) as terminal:
        send(terminal, "hello 日本 😀")
        wait_replies(terminal, 1)
        assert terminal.everything == golden
        assert terminal.text == "\n".join(golden.split("\n")[-rows:])
        leave(terminal)


GOES_ON = """\
scripted answers · Alt-Enter new line · Ctrl-C stop · Ctrl-D leave · /help
── chat-1 · 3 rounds ──
2> And on Sunday?
Rest.

3> And then?
1. One
(interrupted: the process ended)

11 tokens, KV: 4 in memory, 2 on disk
/continue goes on
>"""


def test_a_resumed_session_shows_its_end(chat):
    chat.before(
        ["user", "A weekend?", ""], ["assistant", "Walk.", "stop"],
        ["user", "And on Sunday?", ""], ["assistant", "Rest.", "stop"],
        ["user", "And then?", ""], ["assistant", "1. One", "interrupted"],
        residence=[4, 4, 6],
    )  # fmt: skip
    with chat([["text", "\n2. Two"], ["loaded", 2]]) as terminal:
        terminal.wait_prompt()
        assert terminal.text == GOES_ON
        assert b"\x1b[2m" + "── chat-1".encode() in terminal.raw  # dim
        send(terminal, "/continue")
        wait_replies(terminal, 1)
        assert "> /continue\n1. One\n2. Two\n12 new + 11 cached (2 from disk) · " in terminal.text
        leave(terminal)


def test_the_head_of_a_resumed_session_fits_the_screen(chat):
    chat.before(["user", "x", ""], ["assistant", "y", "stop"], residence=[0, 0, 0],
                title="A very long title of a session")  # fmt: skip
    with chat(OK, columns=40) as terminal:
        terminal.wait_prompt()
        assert "── chat-1 · 1 round · A very long ti… ──\n" in terminal.text
        assert "2 tokens, KV not cached: the next turn\ncomputes it\n" in terminal.text
        leave(terminal)


def test_an_unanswered_question_is_on_the_input_line(chat):
    chat.before(["user", "x", ""], ["assistant", "y", "stop"], residence=[2, 2, 2],
                unanswered="and then?", notices=["a reply was dropped"])  # fmt: skip
    with chat(OK) as terminal:
        terminal.wait_prompt("> and then?")
        output = (
            "KV in memory\na reply was dropped\n"
            "your last question was not answered; Enter asks it again\n> and"
        )
        assert output in terminal.text
        terminal.key("enter")
        wait_replies(terminal, 1)
        leave(terminal)
    assert chat.messages() == ["x", "and then?"]


def test_a_private_chat_stores_nothing(chat):
    with chat(OK, options=["--private"]) as terminal:
        terminal.wait("/help\nThis chat is not stored.\n>")
        send(terminal, "x")
        wait_replies(terminal, 1)
        leave(terminal)
    assert not (chat.folder / "data").exists()


def test_an_empty_session_is_deleted(chat):
    with chat(OK) as terminal:
        leave(terminal)
    assert (chat.folder / "deleted").exists()
    (chat.folder / "deleted").unlink()
    with chat(OK) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        leave(terminal)
    assert not (chat.folder / "deleted").exists()


def test_finished_blocks_are_printed_once(chat):
    steps = [["text", "First *block*.\n\nSecond"], ["wait", "a"], ["text", " one\n\nTh"]]
    with chat([*steps, ["wait", "b"], ["text", "ird"]]) as terminal:
        send(terminal, "x")
        terminal.wait("Second")
        assert terminal.cursor_hidden
        written = len(terminal.raw)
        chat.go("a")
        terminal.wait("Th")
        assert b"First" not in terminal.raw[written:]
        assert terminal.text.endswith("> x\nFirst block.\n\nSecond one\n\nTh")
        written = len(terminal.raw)
        chat.go("b")
        wait_replies(terminal, 1)
        assert b"Second" not in terminal.raw[written:]
        assert "First block.\n\nSecond one\n\nThird\n12 new" in terminal.text
        leave(terminal)


def test_the_end_of_a_block_longer_than_the_window_is_shown(chat):
    rows = [f"row {i}" for i in range(30)]
    with chat([["text", "\n".join(rows)], ["wait", "a"], ["text", "\nlast"]], rows=10) as terminal:
        send(terminal, "x")
        terminal.wait("row 29")
        assert terminal.display == ["> x", *rows[-9:]]
        chat.go("a")
        wait_replies(terminal, 1)
        assert "> x\n" + "\n".join([*rows, "last"]) + "\n12 new" in terminal.everything
        leave(terminal)


def test_long_code_is_printed_while_it_is_generated(chat):
    lines = [f"x{i} = {i}" for i in range(40)]
    code = "```python\n" + "\n".join(lines) + "\n"
    with chat([["text", code], ["wait", "a"], ["text", "end\n```\nThat is all."]]) as terminal:
        send(terminal, "x")
        terminal.wait("x39 = 39")
        written = len(terminal.raw)
        chat.go("a")
        wait_replies(terminal, 1)
        assert b"x39" not in terminal.raw[written:]
        assert code + "end\n```\n\nThat is all.\n12 new" in terminal.everything
        leave(terminal)


def test_a_code_line_longer_than_the_screen_is_one_line_of_text(chat):
    line = "y" * 100
    with chat([["text", f"```\n{line}\n```"]], columns=40) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        assert line.encode() in terminal.raw  # the terminal wraps it, and copies it whole
        leave(terminal)


@pytest.mark.parametrize(("columns", "rows"), [(30, 12), (100, 30)])
def test_a_resize_during_a_reply(chat, columns, rows):
    words = " ".join(f"word{i}" for i in range(20))
    steps = [["text", f"# Title\n\n{words}"], ["wait", "a"], ["text", " end"]]
    with chat(steps, columns=60, rows=24) as terminal:
        send(terminal, "x")
        terminal.wait("word19")
        terminal.resize(columns, rows)
        lines = textwrap.wrap(words, columns)
        terminal.wait(lambda: "\n".join(lines) in terminal.text)
        assert terminal.text.count("word0") == 1
        chat.go("a")
        wait_replies(terminal, 1)
        lines = textwrap.wrap(words + " end", columns)
        assert "\n".join(["", *lines, "12 new"]) in terminal.text
        leave(terminal)


def test_a_reply_cannot_control_the_terminal(chat):
    evil = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\re\x08f &#27;[31m `\x1b[5m`"
    with chat([["text", evil]], [["text", evil]], options=["--plain"]) as plain:
        send(plain, "x")
        wait_replies(plain, 1)
        assert "a[2Jb]0;titlec31mdef" in plain.text
        leave(plain)
    with chat([["text", evil]]) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        assert "a[2Jb]0;titlec31mdef" in terminal.text
        leave(terminal)
    for raw in (plain.raw, terminal.raw):
        assert not any(code in raw for code in (b"\x1b[2J", b"\x1b]0", b"\x9b31m", b"\x1b[5m"))


def test_emphasis_is_shown(chat):
    text = "**strong** *slanted* `code`\n\n# Title\n\n[link](https://x.org)"
    with chat([["text", text]]) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        shown = {word: terminal.style(word) for word in ("strong", "slanted", "code", "Title")}
        assert shown == {
            "strong": "bold",
            "slanted": "italics",
            "code": "cyan",
            "Title": "bold underscore",
        }
        assert "link (https://x.org)" in terminal.text
        leave(terminal)


def test_no_color_removes_all_colors(chat):
    text = "`code`\n\n```python\nx = 1\n```\n"
    with chat([["text", text], ["fail", "no"]], env={"NO_COLOR": "1"}) as terminal:
        send(terminal, "x")
        terminal.wait("error: no")
        leave(terminal)
        assert not re.search(rb"\x1b\[[0-9;]*(3[0-79]|9[0-7]|4[0-79])[;m]", terminal.raw)


@pytest.mark.parametrize("how", ["--plain", "dumb"])
def test_plain_text_has_no_escape_sequences(chat, how):
    options = ["--plain"] if how == "--plain" else []
    env = {"TERM": "dumb"} if how == "dumb" else {}
    steps = [["reasoning", "Well"], ["text", "# Title\n**bo"], ["wait", "a"], ["text", "ld**"]]
    with chat(steps, options=options, env=env) as terminal:
        send(terminal, "x")
        terminal.wait("thinking: Well\n\n# Title\n**bo")
        terminal.key("ctrl-c")
        terminal.wait("# Title\n**bo\nstopped; /continue goes on\n12 new")
        leave(terminal)


def test_the_answer_goes_to_a_file(chat):
    answer = chat.folder / "answer"
    steps = [["reasoning", "Hm"], ["text", "The *answer*"]]
    chat.write(steps)
    command = " ".join(shlex.quote(word) for word in [*SCRIPTED, str(chat.script)])
    with Terminal(["sh", "-c", f"{command} > {answer}"], env=chat.env) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        leave(terminal)
        assert "thinking: Hm" in terminal.everything
        assert "answer*" not in terminal.everything
    assert answer.read_text() == "The *answer*\n"


def test_a_closed_pipe_ends_the_chat(chat):
    chat.write([["text", "The answer"]])
    command = shlex.join([*SCRIPTED, str(chat.script)])
    shell = ["bash", "-c", f"set -o pipefail; {command} | true"]
    with Terminal(shell, env=chat.env) as terminal:
        send(terminal, "x")
        assert terminal.wait_end() == 141
        assert "Error" not in terminal.everything
        check_restored(terminal)


def test_reasoning_is_dimmed_or_counted(chat):
    think = [
        ["reasoning", "Let me\n"],
        ["reasoning", "think."],
        ["wait", "a"],
        ["text", "\n\nYes."],
    ]
    with chat(think, [["reasoning", "abc" * 400], ["wait", "b"], ["text", "No."]]) as terminal:
        send(terminal, "x")
        terminal.wait("Let me\nthink.")
        chat.go("a")
        wait_replies(terminal, 1)
        assert "Let me\nthink.\n\nYes.\n12 new" in terminal.text
        assert b"\x1b[2mthink." in terminal.raw
        send(terminal, "/think hide")
        terminal.wait("reasoning: ")
        send(terminal, "y")
        terminal.wait("\nthinking: 1,200 characters")
        chat.go("b")
        wait_replies(terminal, 2)
        assert "y\nthought: 1,200 characters, /think show shows them\n\nNo.\n" in terminal.text
        assert "abc" not in terminal.text
        leave(terminal)


def test_a_long_prefill_shows_a_progress_bar(chat):
    steps = [["progress", 1000, 4000], ["wait", "a"], ["progress", 2000, 4000], ["wait", "b"]]
    with chat([*steps, ["text", "Done."]]) as terminal:
        send(terminal, "x")
        terminal.wait("reading 1,000 of 4,000 tokens ━━━━━━╌╌")
        chat.go("a")
        terminal.wait(
            lambda: re.search(r"2,000 of 4,000 tokens ━+╌+ 50% · \d+ s left", terminal.text)
        )
        assert terminal.text.count("reading") == 1
        chat.go("b")
        wait_replies(terminal, 1)
        assert "> x\nDone.\n12 new" in terminal.text
        leave(terminal)


def test_a_complete_reply_is_not_continued(chat):
    with chat(OK) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        send(terminal, "/continue")
        terminal.wait("The reply was complete; there is nothing to continue.")
        leave(terminal)


def test_a_dumb_terminal_gets_no_text_on_the_input_line(chat):
    with chat(OK, env={"TERM": "dumb"}) as terminal:
        send(terminal, "x")
        wait_replies(terminal, 1)
        send(terminal, "/edit 1")
        terminal.wait("error: this terminal cannot show the old text, expected /edit N TEXT")
        leave(terminal)


def test_notices_and_ends_of_replies(chat):
    with chat(
        [["text", "a"], ["notice", "10 of 20 tokens are read again"], ["end", "length"]],
        [["fail", "the prompt is too long"]],
        [["text", "half"], ["error", "the machine is out of memory"]],
        OK,
    ) as terminal:
        send(terminal, "x")
        terminal.wait(
            "a\n10 of 20 tokens are read again\ncut at max_new_tokens; /continue goes on\n12"
        )
        send(terminal, "y")
        terminal.wait("> y\nerror: the prompt is too long\n>")
        send(terminal, "z")
        terminal.wait("> z\nhalf\nerror: the machine is out of memory\n12 new")
        send(terminal, "z")
        wait_replies(terminal, 3)
        leave(terminal)
