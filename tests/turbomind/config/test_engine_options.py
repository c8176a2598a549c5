"""One row for each engine option: what checks it, what commands take and what pages say of it."""

import inspect
import typing

import pytest
from typer.main import get_command

from lmchat import AsyncChatEngine, ChatEngine
from lmchat.cli.app import app
from lmchat.cli.options import ENGINE_OPTIONS
from turbomind import ChatEngineOptions, Engine, EngineOptions, InvalidRequest
from turbomind.config.engine_options import OPTIONS, rows_of

RANGED = [name for name, row in OPTIONS.items() if row.low is not None]


def test_every_option_has_a_row_and_help_shows_it():
    assert set(OPTIONS) == set(EngineOptions.__annotations__)
    for options in (EngineOptions, ChatEngineOptions):
        for name, row in rows_of(options).items():
            assert row.text.endswith("."), name
            assert f"\n        {name}: " in typing.cast(str, options.__doc__)


def test_a_row_whose_default_is_none_says_what_that_stands_for():
    silent = {"head", "cache_pages", "rope_length", "revision"}  # None is that there is none
    assert {n for n, row in OPTIONS.items() if row.default is None and not row.absent} == silent


@pytest.mark.parametrize("name", RANGED)
def test_values_outside_of_a_rows_range_are_refused(name, tmp_path):
    row = OPTIONS[name]
    for value in (row.low - 1, row.high + 1, "7", 1.5, True):
        with pytest.raises(InvalidRequest, match=f"^{name} is .*, expected an integer from"):
            Engine(tmp_path, device="cpu", **{name: value})


@pytest.mark.parametrize("kind", [ChatEngine, AsyncChatEngine])
def test_options_of_a_chat_engine_are_no_arguments_of_its_own(kind):
    own = inspect.signature(kind).parameters.keys()
    assert not own & ChatEngineOptions.__annotations__.keys()
    assert own & EngineOptions.__annotations__.keys() == {"disk_quota"}


@pytest.mark.parametrize("name", ["page_folder", "cache_memry"])
def test_a_chat_engine_refuses_other_options_before_it_opens_a_store(name, tmp_path):
    with pytest.raises(InvalidRequest, match=f"unknown engine option '{name}'"):
        ChatEngine(store=tmp_path / "store", **{name: "1"})
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("words", [["chat"], ["serve"], ["bench", "engine"]])
def test_commands_take_the_options_with_the_words_of_the_rows(words):
    command = get_command(app)
    for word in words:
        command = command.commands[word]
    found = {option.name: option for option in command.params}
    for name in ENGINE_OPTIONS:
        assert found[name].help.startswith(OPTIONS[name].text), name
        assert found[name].default is None
