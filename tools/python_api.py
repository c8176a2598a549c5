"""Writes docs/python-api.md: the public names with their signatures and docstrings.

python tools/python_api.py docs/python-api.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from typing_extensions import is_typeddict

from turbomind.config.engine_options import ChatEngineOptions, rows_of

_PACKAGES = ("lmchat", "turbomind")

HEAD = """# Python API

`make docs` writes this page from the docstrings. [examples/](../examples/README.md) has complete
scripts, [sessions.md](sessions.md) explains the verbs.
"""


def document(*modules: ModuleType) -> str:
    """Returns the page for the names in each module's `__all__`."""
    parts = [HEAD]
    for module in modules:
        parts.append(f"## {module.__name__}\n\n{_summary(module)}\n")
        for name in module.__all__:
            if not name.startswith("__"):
                parts.append(_entry(f"{module.__name__}.{name}", getattr(module, name)))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> str:
    lines = [f"### `{name}`\n"]
    if inspect.isclass(value) and issubclass(value, BaseException):
        lines.append(f"Error, subclass of `{value.__bases__[0].__name__}`. {_summary(value)}\n")
        return "\n".join(lines)
    if is_typeddict(value):
        known = {} if value is ChatEngineOptions else rows_of(ChatEngineOptions)
        return "\n".join([*lines, _table(value, known)])
    if callable(value):
        lines.append(f"```python\n{name.rpartition('.')[2]}{_signature(value)}\n```\n")
    lines.append(_text(value) + "\n")
    if inspect.isclass(value):
        if bases := [base.__name__ for base in value.__mro__[1:] if _has_entry(base)]:
            lines.append(f"It has all that `{bases[0]}` has, and what is listed here.\n")
        lines += [_member(key, item) for key, item in _members(value)] + [""]
    return "\n".join(lines)


def _table(options: Any, known: Mapping[str, object]) -> str:
    """Returns a class of options: its summary, and a table of its rows but for those `known`."""
    types = get_type_hints(options)
    lines = ["| option | type | range | default | |", "|---|---|---|---|---|"]
    for name, row in rows_of(options).items():
        if name in known:
            continue
        kind = str(getattr(types[name], "__name__", types[name])).replace("os.", "")
        default = row.default_text or str(row.default)
        cells = (f"`{name}`", f"`{kind}`", row.range_text, default, f"{row.text} {row.more}")
        lines.append(
            f"| {' | '.join(cell.replace('|', chr(92) + '|').strip() for cell in cells)} |"
        )
    return "\n".join([f"{_summary(options)}\n", *lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def _members(kind: type) -> list[tuple[str, Any]]:
    """Returns public methods and properties that the class, or bases of it without an entry of
    their own, define, in source order; without those that a base with an entry describes."""
    kinds = [kind, *(base for base in kind.__mro__[1:] if _is_part(base))]
    known = [base for base in kind.__mro__[1:] if _has_entry(base)]
    kinds = [one for one in kinds if not any(issubclass(base, one) for base in known)]
    found: dict[str, Any] = {}
    for one in reversed(kinds):
        found |= vars(one)
    return [
        (key, item)
        for key, item in found.items()
        if not key.startswith("_")
        and (inspect.isfunction(item) or isinstance(item, property | staticmethod | classmethod))
        and not (_text(item) == "" and any(hasattr(base, key) for base in known))
    ]


def _has_entry(base: type) -> bool:
    """Returns whether a base is one of ours that users see."""
    return _is_ours(base) and not _is_part(base)


def _is_ours(base: type) -> bool:
    return base.__module__.partition(".")[0] in _PACKAGES


def _is_part(base: type) -> bool:
    """Returns whether a base is one of ours that no user sees."""
    hidden = not any(base.__name__ in sys.modules[name].__all__ for name in _PACKAGES)
    return _is_ours(base) and hidden


def _member(name: str, item: Any) -> str:
    if isinstance(item, property):
        return f"- **`{name}`**: {_line(item)}"
    function = item.__func__ if isinstance(item, staticmethod | classmethod) else item
    return f"- **`{name}{_signature(function)}`**: {_line(function)}"


def _signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        p.replace(annotation=_plain(p.annotation))
        for p in found.parameters.values()
        if p.name not in ("self", "cls")
    ]
    returns = _plain(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returns))


class _Annotation:
    """An annotation that is printed without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _plain(annotation: Any) -> Any:
    annotation = getattr(annotation, "__forward_arg__", annotation)  # of a NamedTuple
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _text(value: Any) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def _summary(value: Any) -> str:
    return _text(value).partition("\n\n")[0].replace("\n", " ")


def _line(value: Any) -> str:
    """Returns the first paragraph of a docstring as one line of Markdown."""
    return _summary(value).replace("|", "\\|") or "(not documented)"


def main() -> None:
    """Writes the page to the path given on the command line."""
    import lmchat
    import turbomind

    Path(sys.argv[1]).write_text(document(lmchat, turbomind), encoding="utf-8")


if __name__ == "__main__":
    main()
