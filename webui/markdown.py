"""Markdown of messages, in which nothing but Markdown has an effect.

Gradio renders HTML in messages, loads pictures of other sites, and takes every `$` for a formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from markdown_it import MarkdownIt

LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
"""Delimiters of formulas for Gradio's Chatbot."""

_PARSER = MarkdownIt("commonmark").disable("html_block")
_TICKS = re.compile(r"(?<!`)(`+)(?!`)")
# Pandoc: no space after the first dollar and before the last one, and no digit after that.
_MATH = re.compile(r"(?<![\\$\w])\$(?![\s$])([^$\n]*?[^\s\\$])\$(?![\d$])")
_PICTURE = re.compile(r"!\[([^\[\]\n]*)\]")


def markdown(text: str) -> str:
    """Returns Markdown that shows a text: without HTML and pictures, and with its formulas.

    Outside code `<` is escaped, pictures become links, and `$x$` becomes `\\(x\\)`.
    """
    lines = text.split("\n")
    is_code = [False] * len(lines)
    for token in _PARSER.parse(text):
        if token.type in ("fence", "code_block") and token.map is not None:
            is_code[token.map[0] : token.map[1]] = [True] * (token.map[1] - token.map[0])
    shown: list[str] = []
    prose: list[str] = []
    for line, code in zip(lines, is_code, strict=True):
        if code and prose:
            shown.append(_outside_spans("\n".join(prose), _prose))
            prose = []
        (shown if code else prose).append(line)
    if prose:
        shown.append(_outside_spans("\n".join(prose), _prose))
    return "\n".join(shown)


def _outside_spans(text: str, change: Callable[[str], str]) -> str:
    """Changes what is outside code spans: runs of backticks that a run of the same length ends.
    A code span ends with its paragraph."""
    done: list[str] = []
    place = 0
    while (start := _TICKS.search(text, place)) is not None:
        border = text.find("\n\n", start.end())
        last = len(text) if border < 0 else border
        ends = (m for m in _TICKS.finditer(text, start.end(), last) if m[1] == start[1])
        end = next(ends, None)
        done.append(change(text[place : start.start()]))
        stop = start.end() if end is None else end.end()
        done.append(text[start.start() : stop])
        place = stop
    return "".join([*done, change(text[place:])])


def _prose(text: str) -> str:
    text = _PICTURE.sub(lambda found: f"[{found[1].strip() or 'picture'}]", text)
    return _MATH.sub(r"\\(\1\\)", text).replace("<", "&lt;")
