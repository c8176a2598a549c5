"""The settings that type checkers and help() list are those that the code checks, and names near
to them are suggested."""

import typing

import pytest

from turbomind.near import nearest, suggestion
from turbomind.settings import (
    REQUEST,
    SAMPLING,
    HandleSettings,
    RequestSettings,
    SamplingSettings,
    ScheduleSettings,
    StreamSettings,
)


def keys(settings: type) -> set[str]:
    return set(settings.__annotations__)


def test_typed_settings_have_the_keys_that_the_code_checks():
    assert keys(SamplingSettings) == set(SAMPLING)
    assert keys(RequestSettings) == set(REQUEST)
    assert keys(StreamSettings) == {*SAMPLING, *REQUEST}
    assert keys(HandleSettings) == {*SAMPLING, "priority", "exact"}


@pytest.mark.parametrize("settings", [SamplingSettings, RequestSettings, ScheduleSettings])
def test_every_setting_is_documented_with_its_default(settings: type):
    text = typing.cast(str, settings.__doc__)
    inherited = keys(ScheduleSettings) if settings is RequestSettings else set()
    for name in keys(settings) - inherited:
        _, found, rest = text.partition(f"        {name}: ")
        assert found, name
        lines = [rest.split("\n")[0]]
        for line in rest.split("\n")[1:]:
            if not line.startswith("            "):
                break
            lines.append(line.strip())
        assert "Default" in " ".join(lines), name


# --- suggestions of near names --------------------------------------------------------------------

NAMES = ["help", "exit", "sessions", "retry", "edit", "edit_reply", "search", "copy"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("retri", "retry"),  # one letter is another
        ("serch", "search"),  # one is missing
        ("exitt", "exit"),  # one is too many
        ("hlep", "help"),  # two are swapped
        ("SESSION", "sessions"),
        ("editreply", "edit_reply"),
        ("sesions_", "sessions"),  # two edits in eight letters
        ("se", "sessions"),  # a beginning: the first such name
        ("edit_r", "edit_reply"),
        ("s", None),
        ("", None),
        ("q", None),
        ("model", None),
        ("run", None),
        ("cpy_", None),  # two edits in four letters
        ("hplease", None),
        ("copy" * 1000, None),
    ],
)
def test_only_a_near_name_is_suggested(typed, meant):
    assert nearest(typed, NAMES) == meant


def test_distances_are_those_of_a_plain_recursion():
    words = ["", "a", "ab", "ba", "abc", "acb", "bca", "abcd", "badc", "abdce", "edcba", "aabbcc"]

    def edits(one, other):
        if not one or not other:
            return len(one) + len(other)
        swap = len(one) > 1 and len(other) > 1 and one[-2:] == other[-1] + other[-2]
        return min(
            edits(one[:-1], other) + 1,
            edits(one, other[:-1]) + 1,
            edits(one[:-1], other[:-1]) + (one[-1] != other[-1]),
            *([edits(one[:-2], other[:-2]) + 1] if swap else []),
        )

    for typed in words:
        for name in words:
            near = edits(typed, name) <= len(typed) // 3
            starts = len(typed) > 1 and name.startswith(typed)
            assert (nearest(typed, [name]) == name) is (near or starts), (typed, name)


def test_all_names_are_listed_where_none_is_near():
    assert suggestion("modle", NAMES) == f", expected one of {', '.join(NAMES)}"
    assert suggestion("retri", NAMES) == "; did you mean 'retry'?"
    assert suggestion("x", []) == ", expected one of "
