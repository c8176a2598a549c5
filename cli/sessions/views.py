"""Prints session lists, the facts of one session, and search results."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from lmchat.figures import latency
from lmchat.public_text import public_model
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn
from lmchat.store.words import marks

from ..terminal.layout import lines_of, short, wrap
from ..terminal.screen import ENDLESS, Screen
from ..terminal.tables import GAP, columns
from ..terminal.texts import clean, counted, excerpt, human_bytes
from .conversation import branch_list
from .list_row import Row, ago
from .unfinished_turn import Unfinished

LEAST_NAME = 18  # columns of a name beside its figures, at least
MOST_MODEL = 24  # columns of a model's name beside a session's figures
WIDE = 100  # columns of a terminal from which titles get their own column
_HEAD, _FAINT, _FOUND = "bold", "dim", "bold reverse"


def table(
    screen: Screen, rows: Sequence[Row], *, current: str = "", now: datetime | None = None
) -> None:
    """Prints sessions as a table, or as a list on a narrow terminal. Files get full lines.

    Args:
        screen: Where to print.
        rows: The sessions. Columns that are empty in all rows are left out.
        current: Name of the session to mark with *.
        now: Current time; None: the clock's.
    """
    now = now or datetime.now(timezone.utc)
    figures = _figures(rows, now)
    width = sum(max(map(cell_len, column)) + GAP for column in figures)
    names = [_name(row, current) for row in rows]
    titles = [clean(row.summary.title) for row in rows]
    heads = ["session", *names]
    models = ["model", *(_model(row) for row in rows)]
    beside = max(map(cell_len, models)) + GAP
    if screen.plain:
        whole = ["model", *(_model(row, ENDLESS) for row in rows)]  # a pipe's lines are not cut
        parts = [*figures, whole, ["title", *titles]]
        screen.print(*lines_of(_table(heads, parts, None), ENDLESS))
    elif screen.width >= WIDE and screen.width - width - beside >= 3 * LEAST_NAME:
        figures, width = [*figures, models], width + beside
        room = screen.width - width - GAP
        size = min(max(map(cell_len, heads)), room // 2)
        shown = ["title", *(short(title, room - size) for title in titles)]
        screen.print(*lines_of(_table(heads, [*figures, shown], size), screen.width))
    elif screen.width - width >= LEAST_NAME:
        head, *lines = lines_of(_table(heads, figures, screen.width - width), screen.width)
        screen.print(head)
        for line, row in zip(lines, rows, strict=True):
            screen.print(line, *_title(row, screen.width))
    else:
        _listed(screen, rows, names, now)


def _title(row: Row, width: int) -> list[Text]:
    """Returns the line with model and title that follows a session; none without both."""
    parts = [part for part in (_model(row), clean(row.summary.title)) if part]
    return [Text(short("  " + " · ".join(parts), width), style=_FAINT)] if parts else []


def _model(row: Row, width: int = MOST_MODEL) -> str:
    """Returns the name of a session's last model: of a path, the last part."""
    name = clean(public_model(row.summary.model))
    return short(name, width) if name else ""


def _name(row: Row, current: str) -> str:
    mark = ("* " if row.summary.name == current else "  ") if current else ""
    return mark + clean(row.summary.name)


def _figures(rows: Sequence[Row], now: datetime) -> list[list[str]]:
    """Returns the columns with the figures, each with its head."""
    made = [
        ["turns", *(f"{row.summary.turns:,}" for row in rows)],
        ["tokens", *(f"{row.summary.tokens:,}" for row in rows)],
        ["device", *(_bytes(row.device_bytes) for row in rows)],
        ["host", *(_bytes(row.host_bytes) for row in rows)],
        ["disk", *(_bytes(row.disk_bytes) for row in rows)],
        ["KV", *(row.residence or "" for row in rows)],
        ["used", *(ago(row.summary.last_used, now) for row in rows)],
        ["TTFT", *(_ttft(row) for row in rows)],
        ["", *(_state(row) for row in rows)],
    ]
    always = ("turns", "tokens", "used", "TTFT")
    return [column for column in made if column[0] in always or any(column[1:])]


def _bytes(count: int | None) -> str:
    return "" if count is None else human_bytes(count)


def _ttft(row: Row) -> str:
    return "-" if row.predicted_ttft is None else latency(row.predicted_ttft)


def _about(time: str) -> str:
    return time if time.startswith("<") else f"about {time}"


def _state(row: Row) -> str:
    states = ["pinned"] if row.summary.pinned else []
    states += [f"busy: {clean(row.summary.busy)}"] if row.summary.busy else []
    return ", ".join(states)


def _table(names: Sequence[str], figures: Sequence[Sequence[str]], name_width: int | None) -> Table:
    """Returns the names and figures as a table; the first entry of each is its head."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=_FAINT)
    table.add_column(names[0], width=name_width, no_wrap=True, style=_HEAD)
    for head, *_ in figures:
        justify: JustifyMethod = "left" if head in ("KV", "", "model", "title") else "right"
        table.add_column(head, no_wrap=True, justify=justify)
    for i, name in enumerate(names[1:], 1):
        cells = [Text(column[i], style=_style(column[0], column[i])) for column in figures]
        table.add_row(Text(name if name_width is None else short(name, name_width)), *cells)
    return table


def _listed(screen: Screen, rows: Sequence[Row], names: list[str], now: datetime) -> None:
    """Prints each session as its name and a paragraph with its facts."""
    for row, name in zip(rows, names, strict=True):
        screen.print(*wrap(Text(name, style=_HEAD), screen.width))
        screen.print(*_title(row, screen.width))
        parts = [counted(row.summary.turns, "turn"), counted(row.summary.tokens, "token")]
        if row.disk_bytes:
            of_all = f" ({row.residence})" if row.residence else ""
            parts.append(f"{human_bytes(row.disk_bytes)} on disk{of_all}")
        parts.append(ago(row.summary.last_used, now))
        parts += [f"TTFT {_ttft(row)}"] if row.predicted_ttft is not None else []
        parts += [state] if (state := _state(row)) else []
        for line in wrap(Text(", ".join(parts)), max(1, screen.width - 2)):
            screen.print(Text("  ") + line)


def _style(head: str, cell: str) -> str:
    if head == "KV":
        return {"all": "green", "part": "yellow"}.get(cell, "")
    return "yellow" if cell.startswith("busy") else ""


# --- one session ------------------------------------------------------------------------------


def facts(screen: Screen, record: SessionRecord, row: Row) -> None:
    """Prints the facts of a session, a line each."""
    found = row.summary
    on_disk = ""
    if row.disk_bytes is not None:
        on_disk = f"{human_bytes(row.disk_bytes)} on disk"
        on_disk += f"; of the conversation {row.residence}" if row.residence else ""
    values = {
        "session": clean(found.name),
        "title": clean(found.title),
        "tags": ", ".join(map(clean, found.tags)),
        "state": _state(row),
        "length": f"{counted(found.turns, 'turn')}, {counted(found.tokens, 'token')}",
        "KV cache": on_disk,
        "next turn": "" if row.predicted_ttft is None else f"first token in {_about(_ttft(row))}",
        "created": _local(found.created),
        "last used": _local(found.last_used),
        "model": clean(found.model) + (" (named by its archive)" if record.imported else ""),
        "loaded with": ", ".join(f"{k} {v}" for k, v in record.loading.items()),
        "settings": ", ".join(f"{k} {v!r}" for k, v in record.settings.items()),
        "id": found.id,
    }
    columns(screen, [(k, clean(v)) for k, v in values.items() if v], (_HEAD,))


def _local(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


def branches(screen: Screen, record: SessionRecord) -> None:
    """Prints the branches of a conversation; * marks the active ones."""
    found = all_branches(record)
    if not found:
        screen.note("no branches: every question has one version and one reply")
    branch_list(
        screen,
        [(b["active"], b["question"], b["branch"], b["text"], excerpt(b["reply"])) for b in found],
    )


def all_branches(record: SessionRecord) -> list[dict[str, Any]]:
    """Returns the branches of all questions that have several, or that were taken back.

    Questions and branches are numbered from 1.
    """
    tree, path = record.tree, record.tree.path(record.leaf)
    on_path = {turn.id for turn in path}
    parents = [turn.parent for turn in path if turn.role == "user"]
    found = []
    for number, parent in enumerate([*parents, record.leaf], 1):
        ways = [
            (user, reply) for user in _questions(record, parent) for reply in tree.children(user.id)
        ]
        if len(ways) > (0 if number > len(parents) else 1):
            found += [
                {"question": number, "branch": i, "text": user.text, "reply": reply.text,
                 "active": reply.id in on_path}
                for i, (user, reply) in enumerate(ways, 1)
            ]  # fmt: skip
    return found


def loose_end(screen: Screen, record: SessionRecord, row: Row, cut_off: Unfinished | None) -> None:
    """Prints what is missing at the end of the conversation, and the command that recovers it."""
    opened = f"lmchat chat --session {shlex.quote(clean(record.name))}"
    if row.summary.busy:
        screen.note(
            f"{clean(row.summary.busy)} is generating in this session now: that turn is not shown"
        )
    elif cut_off is None and record.unanswered:
        screen.note(f"the last question was not answered: {clean(record.unanswered)}")
    elif cut_off is not None and cut_off.token_ids:
        count = counted(len(cut_off.token_ids), "token")
        screen.note(f"the last {count} of the reply have no text yet: {opened} recovers it")
    elif cut_off is not None:
        why = "the last question was not answered because its process ended"
        screen.note(f"{why}; {opened} asks it again")


def _questions(record: SessionRecord, parent: int | None) -> list[Turn]:
    """Returns the questions after a turn; for the first question, after any system prompt."""
    tree = record.tree
    systems = [turn.id for turn in tree.children(None) if turn.role == "system"]
    parents = [None, *systems] if parent is None or parent in systems else [parent]
    return [turn for p in parents for turn in tree.children(p) if turn.role == "user"]


# --- a search ---------------------------------------------------------------------------------


def found(screen: Screen, rows: Iterable[Row], words: str, *, now: datetime | None = None) -> None:
    """Prints the sessions that a search found, with the words highlighted."""
    now = now or datetime.now(timezone.utc)
    for row in rows:
        summary = row.summary
        head = highlighted(clean(summary.name), words, _HEAD)
        title = f"  {clean(summary.title)}" if summary.title not in ("", summary.name) else ""
        head.append_text(highlighted(title, words))
        head.append(f"  {counted(summary.turns, 'turn')}, {ago(summary.last_used, now)}", _FAINT)
        screen.print(*(wrap(head, screen.width)))
        if summary.snippet:
            lines = wrap(highlighted(clean(summary.snippet), words), max(1, screen.width - 2))
            screen.print(*(Text("  ") + line for line in lines))


def highlighted(text: str, search: str, style: str = "") -> Text:
    """Returns `text` with the words of a search highlighted, as the store matches them."""
    made = Text(text, style=style)
    for start, end in marks(text, search):
        made.stylize(_FOUND, start, end)
    return made
