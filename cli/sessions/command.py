"""`lmchat sessions`: the sessions that are kept, without opening a model."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lmchat.errors import Error, InvalidRequest, StoreError

from ..errors import CLOSED_PIPE, FAILED, drop_output, note, replace_undecodable
from ..options import Json
from ..terminal.texts import clean, counted, human_bytes
from .lookup import OWNER, find, load, opened_store

if TYPE_CHECKING:
    from lmchat.archive import Exported
    from lmchat.store.base import SessionRecord, Store, Summary

    from ..terminal.screen import Screen
    from .disk_pages import DiskPages
    from .list_row import Row

SPEEDS = "speeds"
"""The store's note with what engines have measured, by fingerprint; see `predicted_ttft`."""

LEFT_OUT = "a reply that did not end is left out; opening the session keeps it"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Command = TypeVar("Command", bound=Callable[..., None])

Name = Annotated[str, typer.Argument(metavar="NAME", help="A session's name or id.")]
Owner = Annotated[str, typer.Option(help="Whose sessions.")]
NoPages = Annotated[
    bool, typer.Option("--no-pages", help="Do not look at keys and values on disk.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many. [default: all]")]
Tag = Annotated[str | None, typer.Option(help="Only those with this tag.")]


@app.callback()
def _root() -> None:
    """List, search, copy and delete the sessions of this person. No model is opened.

    They are in $LMCHAT_HOME, or else the platform's folder for data. A session is meant by its name
    or by the first characters of its id.

    \b
    Examples:
      lmchat sessions list
      lmchat sessions show trip --turns 2
      lmchat sessions search kyoto
      lmchat sessions export trip trip.zip --pages
    """


def _quiet(command: Command) -> Command:
    """A reader of stdout that goes away ends the command without a word."""

    @functools.wraps(command)
    def wrapper(*args: Any, **arguments: Any) -> None:
        replace_undecodable()
        try:
            command(*args, **arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            drop_output()
            raise typer.Exit(CLOSED_PIPE) from None

    return wrapper  # type: ignore[return-value]


@app.command("list", short_help="The sessions, the last used first.")
@_quiet
def list_(
    owner: Owner = OWNER,
    tag: Tag = None,
    limit: Limit = None,
    sort: Annotated[
        str, typer.Option(help="used, created, name, turns, tokens or bytes.")
    ] = "used",
    no_pages: NoPages = False,
    as_json: Json = False,
) -> None:
    """List the sessions: how long they are, where their keys and values are, what a turn will cost.

    "disk" is what the pages of all branches of a session take; sessions may share some. "KV" says
    whether all, part or none of the conversation is there, and "TTFT" when the first token of the
    next turn is expected, with the speeds that were measured on this machine; "-" is not known.

    \b
    Examples:
      lmchat sessions list
      lmchat sessions list --sort bytes --limit 10
      lmchat sessions list --tag work --no-pages --json
    """
    from . import views as session_views
    from .list_row import ordered

    ordered((), sort)  # refuses an order that is none, before anything takes its time
    with opened_store() as (store, home), _pages(home, not no_pages) as pages:
        first = limit if sort == "used" else None
        rows = _rows(store, pages, store.summaries(owner, tag=tag, limit=first))
        rows = ordered(rows, sort)[:limit]
    if as_json:
        _print_json({"sessions": [row.as_json() for row in rows]})
    elif rows:
        session_views.table(_screen(), rows)
    else:
        note("there are no such sessions" if tag else "there are no sessions yet")


@app.command(short_help="One session and its conversation.")
@_quiet
def show(
    name: Name,
    owner: Owner = OWNER,
    turns: Annotated[
        int | None, typer.Option(min=0, help="Only the last so many questions. [default: all]")
    ] = None,
    branches: Annotated[
        bool, typer.Option("--branches", help="The ways it went, in place of one of them.")
    ] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Token ids in place of texts.")] = False,
    no_pages: NoPages = False,
    as_json: Json = False,
) -> None:
    """Show what a session is set to, and its conversation.

    \b
    Examples:
      lmchat sessions show trip
      lmchat sessions show trip --turns 1 --tokens
      lmchat sessions show 3f9a21 --branches
    """
    from . import conversation
    from . import views as session_views
    from .unfinished_turn import unfinished

    with opened_store() as (store, home), _pages(home, not no_pages) as pages:
        record = load(store, owner, name)
        row = _row(pages, find(store, owner, record.name), record, store.noted(SPEEDS))
        cut_off = unfinished(store, record)
    if as_json:
        found = _session_json(record, row, turns, branches)
        _print_json({**found, "unfinished": cut_off and cut_off.as_json()})
        return
    path = cut_off.path if cut_off else record.tree.path(record.leaf)
    screen = _screen()
    session_views.facts(screen, record, row)
    screen.note("")
    if branches:
        session_views.branches(screen, record)
    elif tokens:
        conversation.tokens(screen, path, turns)
    else:
        conversation.conversation(screen, path, turns)
    session_views.loose_end(screen, record, row, cut_off)


@app.command(short_help="Sessions with these words in them.")
@_quiet
def search(
    words: Annotated[
        list[str], typer.Argument(metavar="WORD", help="A * at its end: all words that begin so.")
    ],
    owner: Owner = OWNER,
    tag: Tag = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Find sessions that have all the words in one message, or in name and title, the best first.

    \b
    Examples:
      lmchat sessions search kyoto
      lmchat sessions search 'plan*' kyoto --limit 3
    """
    from . import views as session_views
    from .list_row import Row

    text = " ".join(words)
    with opened_store() as (store, _home):
        found = store.summaries(owner, search=text, tag=tag, limit=limit)
    if as_json:
        rows = [{**Row(one).as_json(), "snippet": one.snippet} for one in found]
        _print_json({"sessions": [_without_pages(row) for row in rows]})
    elif found:
        session_views.found(_screen(), map(Row, found), text)
    else:
        note(f"nothing has {text!r} in it")


@app.command(short_help="Give a session another name.")
@_quiet
def rename(
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    owner: Owner = OWNER,
    as_json: Json = False,
) -> None:
    """Give a session another name; that may be while it is in use.

    \b
    Examples:
      lmchat sessions rename chat-3 trip
      lmchat sessions rename 3f9a21 "a longer name"
    """
    with opened_store() as (store, _home):
        record = load(store, owner, name)
        before = record.name
        store.rename(record, new)
    _tell(as_json, f"{before} is called {new} now", {"name": new, "id": record.id})


@app.command(short_help="Copy a session, or its beginning.")
@_quiet
def fork(
    name: Name,
    new: Annotated[
        str | None, typer.Argument(metavar="NEW", help="The copy's name. [default: chat-N]")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="Copy up to this question and its reply. [default: all]"),
    ] = None,
    owner: Owner = OWNER,
    as_json: Json = False,
) -> None:
    """Copy a session's conversation to a new one, which shares its keys and values.

    \b
    Examples:
      lmchat sessions fork trip
      lmchat sessions fork trip trip-by-train --at 2
    """
    from . import maintenance as session_upkeep
    from .unfinished_turn import unfinished

    with opened_store() as (store, _home):
        old = load(store, owner, name)
        record = session_upkeep.fork(store, old, new, at)
        _tell_of_left_out(store, old)
        if unfinished(store, old) is not None:
            note(LEFT_OUT)
    count = sum(turn.role == "user" for turn in record.tree)
    text = f"session {record.name} begins with {counted(count, 'question')} of {name}"
    _tell(as_json, text, {"name": record.name, "id": record.id, "turns": count})


@app.command(short_help="Keep a session's keys and values before others'.")
@_quiet
def pin(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Sessions.")],
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
    owner: Owner = OWNER,
    as_json: Json = False,
) -> None:
    """Keep the keys and values of sessions before those of others when space runs short.

    \b
    Examples:
      lmchat sessions pin trip
      lmchat sessions pin trip --off
    """
    from . import maintenance as session_upkeep

    with opened_store() as (store, home), _pages(home) as pages:
        records = [load(store, owner, name) for name in names]
        for record in records:
            session_upkeep.change(store, record, lambda found: setattr(found, "pinned", not off))
            session_upkeep.touch(pages, record)
    words = ", ".join(record.name for record in records)
    text = f"{words}: no longer pinned" if off else f"{words}: pinned"
    _tell(as_json, text, {"names": [r.name for r in records], "pinned": not off})


@app.command(short_help="Write a session to a file.")
@_quiet
def export(
    name: Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A zip to write, or a .md or .json file.")
    ],
    pages: Annotated[
        bool, typer.Option("--pages", help="With its keys and values, as far as the disk has them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    owner: Owner = OWNER,
    as_json: Json = False,
) -> None:
    """Write a session with all its branches to a zip that `lmchat sessions import` takes.

    It holds session.json: the messages, the exact token ids, settings and seeds. Equal sessions
    make equal files. A FILE that ends in .md or .json gets the current conversation alone, to be
    read by people or programs; it cannot be imported.

    \b
    Examples:
      lmchat sessions export trip trip.zip
      lmchat sessions export trip trip.zip --pages --force
      lmchat sessions export trip trip.md
    """
    from lmchat.archive import export_session

    from .export import is_text

    with opened_store() as (store, home), _pages(home) as found:
        record = load(store, owner, name)
        if not force and file.exists():
            raise InvalidRequest(f"{file} exists; --force replaces it")
        _tell_of_left_out(store, record)
        if is_text(file):
            done = _export_text(store, record, file, force, pages)
        else:
            page_store = found.store if pages else None
            if pages and page_store is None:
                note("no keys and values are kept here: the file has none")
            done = export_session(store, page_store, record, file, force, say=note)
    also = "" if is_text(file) else f" and {counted(done.pages, 'page')}"
    text = f"{file}: {counted(done.turns, 'message')}{also} written, {human_bytes(done.bytes)}"
    _tell(as_json, text, asdict(done))


@app.command("import", short_help="Take a session from a file.")
@_quiet
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` has written.")],
    name: Annotated[
        str | None, typer.Option(help="Its name here. [default: as in the file]")
    ] = None,
    no_pages: Annotated[
        bool, typer.Option("--no-pages", help="Without keys and values; they are computed again.")
    ] = False,
    owner: Owner = OWNER,
    as_json: Json = False,
) -> None:
    """Take a session from a zip, as a new one. All of the file is verified before any of it counts.

    Keys and values cannot be compared with their tokens without computing them: take them only from
    those you trust. They may also come to other sessions of yours that begin alike.

    \b
    Examples:
      lmchat sessions import trip.zip
      lmchat sessions import trip.zip --name trip-2 --no-pages
    """
    from lmchat.archive import import_session

    with opened_store() as (store, home), _pages(home, not no_pages) as pages:
        page_store = None if no_pages else pages.make()
        say = None if no_pages else note
        try:
            record = import_session(store, page_store, file, name, owner, say=say)
        except InvalidRequest as error:
            hint = "; --name gives another" if "is taken" in str(error) else ""
            raise InvalidRequest(f"{error}{hint}") from None
    turns = sum(turn.role == "user" for turn in record.tree.path(record.leaf))
    model = f"; the model it names is {record.model!r}" if record.model else ""
    text = f"session {record.name} is here: {counted(turns, 'question')}{model}"
    found = {"name": record.name, "id": record.id, "turns": turns, "model": record.model}
    _tell(as_json, text, found)


@app.command(short_help="Delete sessions.")
@_quiet
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Sessions.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    owner: Owner = OWNER,
    as_json: Json = False,
) -> None:
    """Delete sessions with all their branches, and the keys and values that only they have.

    \b
    Examples:
      lmchat sessions rm trip
      lmchat sessions rm chat-1 chat-2 --yes
    """
    from . import maintenance as session_upkeep

    freed = 0
    gone: list[str] = []
    with opened_store() as (store, home), _pages(home) as pages:
        found = {one.id: one for one in (find(store, owner, name) for name in names)}
        if not yes and not _confirmed(found.values()):
            raise typer.Exit(FAILED)
        for one in found.values():
            try:
                freed += session_upkeep.remove(store, pages, one)
            except Error:
                if gone:
                    note(f"deleted before that: {', '.join(gone)}")
                raise
            gone.append(one.name)
    text = f"deleted: {', '.join(gone)}; {human_bytes(freed)} of keys and values freed"
    _tell(as_json, text, {"names": gone, "freed_bytes": freed})


@app.command(short_help="Free what no session refers to.")
@_quiet
def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how much that is, at most.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Free the keys and values that no session of any owner refers to.

    \b
    Examples:
      lmchat sessions gc --dry-run
      lmchat sessions gc
    """
    from . import maintenance as session_upkeep

    with opened_store() as (store, home), _pages(home) as pages:
        done = session_upkeep.collect(store, pages, dry_run=dry_run)
    word = "would be freed" if dry_run else "freed"
    what = counted(done.pages, "page")
    text = f"{human_bytes(done.bytes)} {word}: {what} that no session refers to"
    found = {"pages": done.pages, "bytes": done.bytes, "disk_bytes": done.disk_bytes}
    _tell(as_json, text, {**found, "dry_run": dry_run})


@app.command(short_help="Look for damage in sessions, keys and values.")
@_quiet
def verify(no_pages: NoPages = False, as_json: Json = False) -> None:
    """Read everything that is kept and say what is wrong with it; then the exit code is 1.

    Damaged pages are taken out: they are computed again when they are needed.

    \b
    Examples:
      lmchat sessions verify
      lmchat sessions verify --no-pages --json
    """
    with opened_store() as (store, home), _pages(home, not no_pages) as pages:
        count = len(store.summaries())
        problems = store.verify()
        checked = None if pages.store is None else pages.store.verify()
    damaged = checked.damaged if checked else 0
    if damaged:
        problems.append(f"{counted(damaged, 'damaged page')} taken out")
    for problem in () if as_json else problems:
        note(problem)
    good = checked.good if checked else 0
    text = f"{counted(count, 'session')} and {counted(good, 'page')} looked at: " + (
        counted(len(problems), "problem") if problems else "no damage"
    )
    facts = {"sessions": count, "pages": good + damaged, "damaged_pages": damaged}
    _tell(as_json, text, {**facts, "problems": problems})
    if problems:
        raise typer.Exit(FAILED)


# --- what they share --------------------------------------------------------------------------


def _screen() -> Screen:
    from ..terminal.screen import Screen

    return Screen()


def _pages(home: Path, wanted: bool = True) -> DiskPages:
    from .disk_pages import DiskPages

    return DiskPages(home, wanted)


def _rows(store: Store, pages: DiskPages, found: Iterable[Summary]) -> list[Row]:
    rows, speeds = [], store.noted(SPEEDS)
    for summary in found:
        try:
            record = store.find(summary.owner, summary.name) if pages.wanted else None
        except StoreError:  # damaged: `verify` says so
            record = None
        rows.append(_row(pages, summary, record, speeds))
    return rows


def _row(pages: DiskPages, summary: Summary, record: SessionRecord | None, speeds: object) -> Row:
    from .list_row import Row, predicted_ttft

    if record is None or not pages.wanted:
        return Row(summary)
    resident = pages.resident(record)
    known = speeds.get(record.fingerprint) if isinstance(speeds, dict) else None
    predicted = None if resident is None else predicted_ttft(summary.tokens, resident, known)
    return Row(
        summary,
        disk_bytes=pages.bytes_of(record),
        resident=resident,
        predicted_ttft=predicted,
    )


def _session_json(
    record: SessionRecord, row: Row, count: int | None, branches: bool
) -> dict[str, Any]:
    """A session as `show --json` prints it; the turns' names are those of an archive."""
    from lmchat.archive.document import to_document

    from .conversation import rounds
    from .views import all_branches

    document = to_document(record)
    turns = {turn["id"]: turn for turn in document["turns"]}
    kept = ("history", "overflow", "settings", "template_variables", "adapter")
    found = row.as_json() | {name: document["session"][name] for name in kept}
    found["messages"] = [turns[t.id] for t in rounds(record.tree.path(record.leaf), count)]
    if branches:
        found["branches"] = all_branches(record)
    return found


def _export_text(
    store: Store, record: SessionRecord, file: Path, force: bool, pages: bool
) -> Exported:
    """Writes the current conversation to a .md or .json file. InvalidRequest as for a zip."""
    from lmchat.archive import Exported

    from .export import Talk, check_ending, write_text
    from .unfinished_turn import unfinished

    check_ending(file, pages)
    if unfinished(store, record) is not None:
        note(LEFT_OUT)
    talk = Talk.of_record(record)
    target = write_text(talk, file, force)
    return Exported(str(target), len(talk.turns), 0, target.stat().st_size)


def _tell_of_left_out(store: Store, record: SessionRecord) -> None:
    """A turn that another process is at has no end yet."""
    if busy := find(store, record.owner, record.name).busy:
        note(f"{busy} is generating on {record.name}: that turn is left out")


def _without_pages(row: dict[str, Any]) -> dict[str, Any]:
    unknown = ("bytes", "residence", "resident_tokens", "predicted_ttft")
    return {name: value for name, value in row.items() if name not in unknown}


def _confirmed(sessions: Iterable[Summary]) -> bool:
    """Asks on a terminal; InvalidRequest where there is none."""
    if not (sys.stdin and sys.stdin.isatty()):
        raise InvalidRequest("nobody can be asked here, expected --yes")
    named = [f"{clean(one.name)} ({counted(one.turns, 'turn')})" for one in sessions]
    return typer.confirm(f"Delete {', '.join(named)}?", err=True)


def _tell(as_json: bool, text: str, found: dict[str, Any]) -> None:
    if as_json:
        _print_json(found)
    else:
        typer.echo(clean(text))


def _print_json(found: dict[str, Any]) -> None:
    typer.echo(json.dumps(found, indent=2))
