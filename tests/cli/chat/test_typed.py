"""Paths and names as users type them, against what a shell reads."""

import shlex

import pytest

from lmchat.cli.chat.typed import name_of, path_and_name, path_of

NAMES = ["plain.md", "my chat.md", "it's.md", 'say "hi".md', "back\\slash.md", "a  b.md", "$x;y.md"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_read_as_a_shell_does(tmp_path, name):
    path = str(tmp_path / name)
    assert path_of(shlex.quote(path)) == path
    escaped = "".join(c if c.isalnum() or c in "/._-" else f"\\{c}" for c in path)
    assert path_of(escaped) == path
    open(path, "w").close()
    assert path_of(path) == path  # as it is, where it exists


def test_a_path_with_spaces_needs_no_quotes(tmp_path):
    assert path_of(f"{tmp_path}/my new chat.md") == f"{tmp_path}/my new chat.md"


def test_a_quoted_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of('"~/a b.md"') == path_of("~/a b.md") == f"{tmp_path}/a b.md"


@pytest.mark.parametrize("folder", ["plain", "work dir"])
@pytest.mark.parametrize("name", [None, "back", "back again", "back 2"])
def test_a_path_and_a_name_both_with_spaces(tmp_path, folder, name):
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "chat.zip"
    file.touch()
    for spelled in (str(file), f'"{file}"', shlex.quote(str(file))):
        assert path_and_name(f"{spelled} {name}" if name else spelled) == (str(file), name)
    assert path_and_name(f'{file} "{name}"')[1] == str(name)


def test_without_a_file_the_last_word_is_the_name(tmp_path):
    assert path_and_name(f"{tmp_path}/none.zip") == (f"{tmp_path}/none.zip", None)
    assert path_and_name(f"{tmp_path}/none.zip back") == (f"{tmp_path}/none.zip", "back")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("trip to Rome", "trip to Rome"),
        ('"trip to Rome"', "trip to Rome"),
        ("'trip 2'", "trip 2"),
        ("it's", "it's"),
        ('say "hi"', 'say "hi"'),
        ('"a" and "b"', '"a" and "b"'),
        ("back\\slash", "back\\slash"),
        ('"', '"'),
        ("", ""),
    ],
)
def test_a_name_in_quotes_is_what_is_between_them(typed, name):
    assert name_of(typed) == name
