"""Tables: aligned columns on screens of any width, and plain reports outside a terminal."""

import io
import re

import pytest
from rich.text import Text

from lmchat.cli.output import say
from lmchat.cli.terminal.layout import clean_text, lines_of
from lmchat.cli.terminal.screen import CLEAR_REST, Screen
from lmchat.cli.terminal.tables import ReportPrinter, columns, figures


def test_columns_are_aligned_by_display_width():
    file = io.StringIO()
    columns(Screen(file), [("京都", "a"), ("x", "b\nc"), ("name", "")])
    assert file.getvalue() == "京都  a\nx     b\n      c\nname\n"


def test_columns_without_rows_print_nothing():
    file = io.StringIO()
    columns(Screen(file), [])
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", ["20", "200"])
def test_a_report_outside_a_terminal_is_plain_and_not_wrapped(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    table = figures("times in ms of [a] long name", "turn", "a long head", "TTFT")
    table.columns[0].justify = "left"
    table.add_row("京都", "1.5", "10")
    table.add_row("x", "12.25", "")
    printer = ReportPrinter()
    printer.print("a line that is longer than twenty columns")
    printer.print(table)
    assert capsys.readouterr().out == (
        "a line that is longer than twenty columns\n"
        "times in ms of [a] long name\n"
        "turn  a long head  TTFT\n"
        "京都          1.5    10\n"
        "x           12.25\n"
    )


HOSTILE = "a\x1b]0;title\x07\x9d0;title\x9c\x9b31m\b\r\x7fb"
CLEAN = "a]0;title0;title31mb"


def test_no_control_character_leaves_the_screen():
    """Whatever prints it: messages, columns, tables, painted lines; of C0 and of C1."""
    file = io.StringIO()
    screen = Screen(file)
    screen.note(HOSTILE)
    screen.facts((HOSTILE, HOSTILE))
    columns(screen, [(HOSTILE, HOSTILE)])
    screen.print(Text.assemble("x", (HOSTILE, "bold"), "y"))
    screen.paint([], above=[Text(HOSTILE)])
    table = figures(HOSTILE, HOSTILE)
    table.add_row(HOSTILE)
    screen.print(*lines_of(table, 80))
    say(HOSTILE, file)
    written = file.getvalue().replace(f"\r{CLEAR_REST}", "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", written), repr(written)
    assert written.count(CLEAN) == 11


def test_styles_stay_where_control_characters_are_removed():
    text = clean_text(Text.assemble("x\x1b", ("bo\x9bld", "bold"), "\x07y"))
    assert text.plain == "xboldy"
    styled = {text.plain[span.start : span.end] for span in text.spans if span.style == "bold"}
    assert "".join(sorted(styled)) == "bold"


def test_forced_colours_do_not_wrap_what_is_piped(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    printer = ReportPrinter()
    table = figures("title", "head")
    table.add_row("word " * 60)
    printer.print(table)
    file = io.StringIO()
    Screen(file).note("word " * 60)
    columns(Screen(file), [("name", "word " * 60)], ("bold",))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "\x1b[" in lines[0]
    assert len(file.getvalue().splitlines()) == 2
