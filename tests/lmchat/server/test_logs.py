"""Lines of the log."""

import logging
import re

from lmchat.cli.errors import note
from lmchat.server.logs import NAME, LineFormatter

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def line(message):
    return LineFormatter().format(logging.makeLogRecord({"levelname": "INFO", "msg": message}))


def test_a_line_has_time_level_and_the_name_of_the_process(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    assert re.fullmatch(f"{STAMP} INFO    all 100%", line("all 100%"))
    monkeypatch.setenv(NAME, "replica 2 of 100%")
    assert re.fullmatch(f"{STAMP} INFO    replica 2 of 100%: all 100%", line("all 100%"))


def test_no_control_character_gets_into_the_log():
    assert "\x1b" not in line("a\x1b[2Jb\x9bc")
    assert "\x9b" not in line("a\x1b[2Jb\x9bc")
    assert line("a\nb").endswith("a\nb")


def test_the_last_words_of_a_replica_are_a_line_of_its_log(monkeypatch, capsys):
    monkeypatch.setenv(NAME, "replica 2")
    note("no model 'x'")
    assert re.fullmatch(f"{STAMP} ERROR   replica 2: no model 'x'\n", capsys.readouterr().err)
    monkeypatch.delenv(NAME)
    note("no model 'x'")
    assert capsys.readouterr().err == "lmchat: no model 'x'\n"
