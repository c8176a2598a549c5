"""Writes the parts of `docs/cli.md` that follow from the code.

`python -m lmchat.cli.docs docs/cli.md` rewrites the text between the marker lines: the help of
every command, the slash commands of the chat and the settings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from lmchat.generation.settings import ROWS, SETTINGS

WIDTH = 88
"""Columns of the help texts."""


def help_texts() -> str:
    """Returns the `--help` output of every command as Markdown, one section per command."""
    from .app import app

    return "\n\n".join(
        f"### `{path}`\n\n```text\n{text}\n```"
        for path, text in _helps(typer.main.get_command(app), ["lmchat"])
    )


def _helps(command: Any, words: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the words of a command and its help, then those of its subcommands."""
    from typer.testing import CliRunner

    from .app import app

    done = CliRunner().invoke(
        app,
        [*words[1:], "--help"],
        prog_name=words[0],
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )
    yield " ".join(words), "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    for name, child in getattr(command, "commands", {}).items():
        yield from _helps(child, [*words, name])


def slash_commands() -> str:
    """Returns the table of the chat's slash commands as Markdown."""
    from .chat.slash_commands import COMMANDS

    lines = ["| command | meaning |", "|---|---|"]
    for command in COMMANDS.values():
        meaning = f"{command.summary[0].upper()}{command.summary[1:]}. {command.details}".strip()
        lines.append(f"| `{_cell(command.usage)}` | {_cell(meaning)} |")
    return "\n".join(lines)


def settings() -> str:
    """Returns the table of the generation settings as Markdown."""
    lines = ["| setting | meaning | what it may be | default |", "|---|---|---|---|"]
    for name in SETTINGS:
        row = ROWS[name]
        cells = (row.whole_text, row.expected, row.session_default)
        lines.append(f"| `{name}` | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


SECTIONS: dict[str, Callable[[], str]] = {
    "slash commands": slash_commands,
    "settings": settings,
    "commands": help_texts,
}
"""Name of a section -> its text. The markers are `<!-- NAME: make docs -->` and `<!-- end -->`."""


def rewrite(text: str) -> str:
    """Returns `text` with all sections replaced by the current ones.

    Raises:
        SystemExit: The markers of a section are missing.
    """
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}: make docs -->", f"<!-- end of {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"markers not found: {begin} and {end}")
        text = f"{head}{begin}\n\n{make()}\n\n{end}{tail}"
    return text


def main(path: Path) -> None:
    """Rewrites the sections of a file.

    Args:
        path: The Markdown file.
    """
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
