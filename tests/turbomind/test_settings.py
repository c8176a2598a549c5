"""The settings that type checkers and help() list are those that the code checks."""

import typing

import pytest

from turbomind import params
from turbomind.params import (
    REQUEST,
    SAMPLING,
    HandleSettings,
    RequestSettings,
    SamplingSettings,
    StreamSettings,
)


def keys(settings: type) -> set[str]:
    return set(settings.__annotations__)


def test_typed_settings_have_the_keys_that_the_code_checks():
    assert keys(SamplingSettings) == set(SAMPLING)
    assert keys(RequestSettings) == set(REQUEST)
    assert keys(StreamSettings) == {*SAMPLING, *REQUEST}
    assert keys(HandleSettings) == {*SAMPLING, "priority", "exact"}


@pytest.mark.parametrize("settings", [SamplingSettings, RequestSettings, params.ScheduleSettings])
def test_every_setting_is_documented_with_its_default(settings: type):
    text = typing.cast(str, settings.__doc__)
    inherited = keys(params.ScheduleSettings) if settings is RequestSettings else set()
    for name in keys(settings) - inherited:
        _, found, rest = text.partition(f"        {name}: ")
        assert found, name
        lines = [rest.split("\n")[0]]
        for line in rest.split("\n")[1:]:
            if not line.startswith("            "):
                break
            lines.append(line.strip())
        assert "Default" in " ".join(lines), name
