"""Tables: aligned columns on screens of any width, and plain reports outside a terminal."""

import io

import pytest

from lmchat.cli.terminal.screen import Screen
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
