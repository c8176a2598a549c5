"""Growing Markdown: cutting into blocks, rendering as lines, repainting."""

import itertools
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

from lmchat.cli.chat import reply_view as render_module
from lmchat.cli.chat.reply_status import ending, progress_line, usage_line
from lmchat.cli.chat.reply_view import PAINT_EVERY, MarkdownView
from lmchat.cli.terminal.blocks import CODE_PART, BlockStream
from lmchat.cli.terminal.markdown import render
from lmchat.cli.terminal.tables import columns
from lmchat.figures import duration, latency
from lmchat.generation.generation import Reply
from lmchat.store.turns import Timings, Usage

PARTS = [
    "# Heading\n", "Some *text* with `code`\nin two lines.\n\n", "\n", "plain\n",
    "Setext\n===\n", "- a\n- b\n", "- a\n\n- b\n\n", "1. one\n2. two\n   more\n", "7) seven\n",
    "   indented\n", "```python\nx = 1\n\ny = 2\n```\n", "```\nnever closed\n", "~~~\n",
    "    code\n\n", "> quote\nlazy\n", "| a | b |\n|---|--:|\n| 1 | 2 |\n", "| 3 | 4 |\n",
    "---\n", "<div>\n", "[x]: http://y\n\n", "日本語のテキスト 😀👨‍👩‍👧 **bold**\n\n",
    "- x\n  - y\n    1. z\n\n      text\n", "1", ". end\n", "\ttab\n", "![image](http://i)\n",
    "a  \nb\\\nc\n", "```py\n" + "z = 3\n" * 40, "&amp; <b>x</b>\n",
]  # fmt: skip


def shown(blocks, width=40):
    """Returns the final contents of the screen."""
    return [line.plain for block in blocks for line in render(block, width, fold_code=False)]


ANYTHING = st.text(alphabet="-*_`#>|~ 1.\n\t[]()!\\&;<a日b:=+", max_size=30)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PARTS) | ANYTHING, max_size=12), st.data())
def test_the_output_does_not_depend_on_the_chunks_of_the_text(parts, data):
    text = "".join(parts)
    whole = BlockStream()
    whole.feed(text)
    expected = shown(whole.finish())
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20).map(sorted))
    stream, blocks = BlockStream(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        stream.feed(text[start:end])
        blocks += stream.finished()
        live = stream.rest()
        assert shown(live) == shown(stream.rest())  # looking changes nothing
    blocks += stream.finish()
    assert shown(blocks) == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.integers(20, 100))
def test_lines_fit_and_no_word_is_lost(parts, width):
    text = "".join(parts)
    stream = BlockStream()
    stream.feed(text)
    lines = [line.plain for block in stream.finish() for line in render(block, width)]
    assert all(cell_len(line) <= width for line in lines)
    assert all(line == line.rstrip() for line in lines) or re.search("```|~~~|    |\t", text)
    words = set(re.findall(r"[A-Za-z]{2,}|\d", re.sub(r"(?m)^\s*\d+[.)]", "", text)))
    together = "".join("".join(lines).split())
    assert {word for word in words if word not in together} <= {"amp", "py", "python"}


def test_a_long_text_costs_no_more_per_block(monkeypatch):
    parsed, parse = [], MarkdownIt.parse

    def counting(self, text, env=None):
        parsed.append(len(text))
        return parse(self, text, env)

    monkeypatch.setattr(MarkdownIt, "parse", counting)
    stream = BlockStream()
    for i in range(500):
        stream.feed(f"Paragraph {i} with some words.\n\n- item\n- item\n\n")
        stream.finished()
        stream.rest()
    assert max(parsed) < 200


def test_lists_keep_their_numbers_when_they_are_printed_item_by_item():
    stream, lines = BlockStream(), []
    for text in ("3. a\n", "3. b\n", "\n", "3. c\n", "end of c\n\n", "- d\n", "- e\n\n", "f\n"):
        stream.feed(text)
        lines += shown(stream.finished())
    lines += shown(stream.finish())
    assert lines == ["3. a", "4. b", "", "5. c", "   end of c", "", "• d", "• e", "", "f"]


def test_long_code_is_emitted_in_parts_with_one_pair_of_fences():
    stream, blocks = BlockStream(), []
    stream.feed("```python\n")
    for i in range(3 * CODE_PART):
        stream.feed(f"line_{i} = '''\n")
        found = stream.finished()
        assert len(found) == ((i + 1) % CODE_PART == 0)
        blocks += found
    stream.feed("```\nend\n")
    blocks += stream.finished()
    lines = shown(blocks)
    assert lines == ["```python", *(f"line_{i} = '''" for i in range(3 * CODE_PART)), "```"]


@pytest.mark.parametrize("width", [12, 30])
def test_a_table_that_does_not_fit_becomes_a_list_of_its_rows(width):
    stream = BlockStream()
    stream.feed("| Name | Meaning | Remark |\n|---|---|---|\n| a | first | one |\n| b | | two |\n")
    lines = shown(stream.finish(), width)
    if width == 30:
        assert lines[0].split() == ["Name", "Meaning", "Remark"]
    else:
        assert lines == ["Name: a", "Meaning:", "first", "Remark: one", "", "Name: b", "Meaning:",
                         "Remark: two"]  # fmt: skip


class Recorder:
    """A screen that only records when it is painted."""

    width = 80

    def __init__(self, clock):
        self.clock = clock
        self.paints = []

    def paint(self, live, above=()):
        self.paints.append((self.clock.now, [t.plain for t in live], [t.plain for t in above]))


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(render_module.time, "monotonic", lambda: found.now)
    return found


def test_the_live_part_is_painted_at_most_ten_times_a_second(clock):
    screen = Recorder(clock)
    view = MarkdownView(screen, show_reasoning=True)
    for i in range(1000):
        clock.now += 0.003
        view.delta("text", f"word{i} ")
        wait = view.refresh()
        assert wait is None or 0 < wait <= PAINT_EVERY
    times = [when for when, _, _ in screen.paints]
    assert 25 <= len(times) <= 31
    assert all(b - a >= PAINT_EVERY for a, b in itertools.pairwise(times))
    view.finish()
    assert screen.paints[-1][1] == []
    assert " ".join(screen.paints[-1][2]).split()[-1] == "word999"


def test_slow_paints_are_made_less_often(clock):
    screen = Recorder(clock)
    view = MarkdownView(screen, show_reasoning=True)
    paint = screen.paint

    def slow(live, above=()):
        clock.now += 0.2
        paint(live, above)

    screen.paint = slow
    view.delta("text", "a")
    assert view.refresh() is None
    view.delta("text", "b")
    assert view.refresh() == pytest.approx(1.0)


def test_the_progress_bar_appears_after_half_a_second(clock):
    screen = Recorder(clock)
    view = MarkdownView(screen, show_reasoning=True)
    view.progress(100, 1000)
    assert view.refresh() == pytest.approx(0.5)
    clock.now += 1.0
    view.progress(200, 1000)
    assert view.refresh() is None
    assert re.search(r"reading 200 of 1,000 tokens ━+╌+ 20% · 8 s left", screen.paints[0][1][0])
    view.delta("text", "x")
    assert view.refresh() is None
    assert screen.paints[1][1] == ["x"]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "reading 1,000 of 4,000 tokens ━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25% · 1 min 5 s left"),
        (60, "━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 25% · 1 min 5 s left"),
        (30, "━━╌╌╌╌╌╌ 25% · 1 min 5 s left"),
        (10, "25% · 1 m"),
    ],
)
def test_the_progress_bar_fits_the_width(width, line):
    assert progress_line(1000, 4000, 65.2, width) == line
    assert len(line) < width


def test_durations_are_shown_in_the_largest_fitting_unit():
    assert [duration(s) for s in (0.2, 59.6, 61, 3700)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 h 1 min",
    ]


def reply(reason, ids=(1,)):
    usage = Usage(prompt_tokens=1510, cached_tokens=1498, completion_tokens=24)
    return Reply("x", "", list(ids), reason, usage, Timings(ttft=0.094, tpot=1 / 31.4))


def test_the_line_after_a_reply():
    line = "12 new + 1,498 cached · TTFT 94 ms · 31.4 tok/s · context 1,534 / 32,768 (5%)"
    assert usage_line(reply("stop"), 1534, 32768) == line
    assert len(line) <= 80
    assert ending(reply("stop"), 10, 20, "drop") is None
    assert ending(reply("cancelled"), 10, 20, "drop") == "stopped; /continue goes on"
    assert "before its first token" in ending(reply("cancelled", ()), 10, 20, "drop")
    assert ending(reply("length"), 10, 20, "drop") == "cut at max_new_tokens; /continue goes on"
    full = "the context of 20 tokens is full; "
    assert ending(reply("length"), 20, 20, "refuse") == full + "/undo or /new makes room"
    assert "the oldest rounds drop" in ending(reply("length"), 20, 20, "drop").removeprefix(full)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0001, "<1 ms"),
        (0.0873, "87 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (12.346, "12.35 s"),
    ],
)
def test_a_latency_is_in_milliseconds_below_a_second(seconds, shown):
    assert latency(seconds) == shown


def test_columns_on_a_narrow_screen():
    printed = []
    screen = SimpleNamespace(width=20, print=lambda *lines: printed.extend(t.plain for t in lines))
    columns(screen, [("a long name here", "its meaning in words"), ("b", "")])
    assert printed == ["a long name here", "  its meaning in", "  words", "b"]
