"""`lmchat sessions`: the commands that manage stored sessions without opening a model."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lmchat.errors import InvalidRequest, StoreError
from lmchat.store.records import HIDDEN_TAG, LOCAL_OWNER

from ..command_group import SessionsGroup
from ..errors import CLOSED_PIPE, FAILED, drop_output, note, replace_undecodable
from ..options import Json
from ..output import say
from ..terminal.texts import counted, human_bytes
from .lookup import find, load, opened_store

if TYPE_CHECKING:
    from lmchat.store.protocol import Store
    from lmchat.store.records import SessionRecord, Summary

    from ..terminal.screen import Screen
    from .disk_pages import DiskPages
    from .list_row import Row

SPEEDS = "speeds"
"""Name of the store's note with the speeds that engines measured; see `predicted_ttft`."""

LEFT_OUT = "an unfinished reply is left out; opening the session recovers it"

app = typer.Typer(cls=SessionsGroup, no_args_is_help=True, rich_markup_mode=None)
Command = TypeVar("Command", bound=Callable[..., None])

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a session, or the start of its id.")
]
Owner = Annotated[str, typer.Option(help="Owner of the sessions.")]
NoPages = Annotated[bool, typer.Option("--no-pages", help="Do not read the KV cache on disk.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Largest number of sessions. [default: all]")
]
Tag = Annotated[str | None, typer.Option(help="Only sessions with this tag.")]


@app.callback()
def _root() -> None:
    """List, search, copy, export and delete stored sessions. No model is opened.

    Sessions are stored in $LMCHAT_HOME, else in the platform's data directory. A session is named
    by its name or by the first characters of its id.

    \b
    Examples:
      lmchat sessions list
      lmchat sessions show trip --turns 2
      lmchat sessions search kyoto
      lmchat sessions export trip trip.zip --pages
    """


def _quiet(command: Command) -> Command:
    """Ends a command silently when the reader of stdout closes the pipe."""

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


@app.command("list", short_help="List sessions, the most recently used first.")
@_quiet
def list_(
    owner: Owner = LOCAL_OWNER,
    tag: Tag = None,
    limit: Limit = None,
    sort: Annotated[
        str, typer.Option(help="Order: used, created, name, turns, tokens or bytes.")
    ] = "used",
    no_pages: NoPages = False,
    as_json: Json = False,
) -> None:
    """List sessions with their length, the size of their KV cache and the predicted TTFT.

    "disk" is the size of the KV pages of all branches; sessions may share pages. "KV" is the part
    of the conversation that is cached: all, part or none. "TTFT" predicts the time to the first
    token of the next turn from speeds measured on this machine; "-" means unknown. Sessions that
    the server's Responses API made are listed with --tag responses.

    \b
    Examples:
      lmchat sessions list
      lmchat sessions list --sort bytes --limit 10
      lmchat sessions list --tag work --no-pages --json
    """
    from . import views as session_views
    from .list_row import ordered

    ordered((), sort)  # rejects an unknown order before the slow part
    with opened_store() as (store, data_dir), _pages(data_dir, not no_pages) as pages:
        first = limit if sort == "used" else None
        rows = _rows(
            store, pages, store.summaries(owner, tag=tag, without_tag=_unwanted(tag), limit=first)
        )
        rows = ordered(rows, sort)[:limit]
    if as_json:
        _print_json({"sessions": [row.as_json() for row in rows]})
    elif rows:
        session_views.table(_screen(), rows)
    else:
        note("there are no such sessions" if tag else "there are no sessions yet")


def _unwanted(tag: str | None) -> str | None:
    """Returns the tag of sessions that a list leaves out unless it asks for a tag."""
    return HIDDEN_TAG if tag is None else None


@app.command(short_help="Show a session and its conversation.")
@_quiet
def show(
    name: Name,
    owner: Owner = LOCAL_OWNER,
    turns: Annotated[
        int | None, typer.Option(min=0, help="Number of questions, the last ones. [default: all]")
    ] = None,
    branches: Annotated[
        bool, typer.Option("--branches", help="Show all branches instead of the conversation.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show token ids instead of text.")
    ] = False,
    no_pages: NoPages = False,
    as_json: Json = False,
) -> None:
    """Show the settings of a session and its conversation.

    \b
    Examples:
      lmchat sessions show trip
      lmchat sessions show trip --turns 1 --tokens
      lmchat sessions show 3f9a21 --branches
    """
    from . import conversation
    from . import views as session_views
    from .unfinished_turn import unfinished

    with opened_store() as (store, data_dir), _pages(data_dir, not no_pages) as pages:
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
        conversation.conversation(screen, path, turns, dropped=record.tree.dropped(path))
    session_views.loose_end(screen, record, row, cut_off)


@app.command(short_help="Find sessions by their words.")
@_quiet
def search(
    words: Annotated[
        list[str],
        typer.Argument(metavar="WORD", help="Word to find; a * at its end matches a prefix."),
    ],
    owner: Owner = LOCAL_OWNER,
    tag: Tag = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Find sessions with all the words in one message, or in name and title, best match first.

    \b
    Examples:
      lmchat sessions search kyoto
      lmchat sessions search 'plan*' kyoto --limit 3
    """
    from . import views as session_views
    from .list_row import Row

    text = " ".join(words)
    with opened_store() as (store, _data_dir):
        found = store.summaries(
            owner, search=text, tag=tag, without_tag=_unwanted(tag), limit=limit
        )
    if as_json:
        rows = [{**Row(one).as_json(), "snippet": one.snippet} for one in found]
        _print_json({"sessions": [_without_pages(row) for row in rows]})
    elif found:
        session_views.found(_screen(), map(Row, found), text)
    else:
        note(f"no session contains {text!r}")


@app.command(short_help="Rename a session.")
@_quiet
def rename(
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new name.")],
    owner: Owner = LOCAL_OWNER,
    as_json: Json = False,
) -> None:
    """Rename a session, also while it is in use.

    \b
    Examples:
      lmchat sessions rename chat-3 trip
      lmchat sessions rename 3f9a21 "a longer name"
    """
    with opened_store() as (store, _data_dir):
        record = load(store, owner, name)
        before = record.name
        store.rename(record, new)
    _report(as_json, f"session {before} renamed to {new}", {"name": new, "id": record.id})


@app.command(short_help="Copy a session, or its first turns.")
@_quiet
def fork(
    name: Name,
    new: Annotated[
        str | None, typer.Argument(metavar="NEW", help="Name of the copy. [default: chat-N]")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="Copy up to this question and its reply. [default: all]"),
    ] = None,
    owner: Owner = LOCAL_OWNER,
    as_json: Json = False,
) -> None:
    """Copy the conversation of a session to a new one, which shares its KV cache.

    \b
    Examples:
      lmchat sessions fork trip
      lmchat sessions fork trip trip-by-train --at 2
    """
    from . import maintenance as session_upkeep
    from .unfinished_turn import unfinished

    with opened_store() as (store, _data_dir):
        old = load(store, owner, name)
        record = session_upkeep.fork(store, old, new, at)
        _note_unfinished(store, old)
        if unfinished(store, old) is not None:
            note(LEFT_OUT)
    count = sum(turn.role == "user" for turn in record.tree)
    text = f"session {record.name} created with {counted(count, 'question')} of {name}"
    _report(as_json, text, {"name": record.name, "id": record.id, "turns": count})


@app.command(short_help="Evict the KV cache of a session last.")
@_quiet
def pin(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of the sessions.")],
    off: Annotated[bool, typer.Option("--off", help="Unpin the sessions.")] = False,
    owner: Owner = LOCAL_OWNER,
    as_json: Json = False,
) -> None:
    """Pin sessions: their KV cache is evicted after that of all others.

    \b
    Examples:
      lmchat sessions pin trip
      lmchat sessions pin trip --off
    """
    from . import maintenance as session_upkeep

    with opened_store() as (store, data_dir), _pages(data_dir) as pages:
        records = [load(store, owner, name) for name in names]
        for record in records:
            session_upkeep.touch(pages, session_upkeep.change(store, record, pinned=not off))
    words = ", ".join(record.name for record in records)
    text = f"{words}: no longer pinned" if off else f"{words}: pinned"
    _report(as_json, text, {"names": [r.name for r in records], "pinned": not off})


@app.command(short_help="Write a session to a file.")
@_quiet
def export(
    name: Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write: .zip, .md or .json.")
    ],
    pages: Annotated[
        bool, typer.Option("--pages", help="Include the KV cache that is on disk.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    owner: Owner = LOCAL_OWNER,
    as_json: Json = False,
) -> None:
    """Write a session with all its branches to a zip that `lmchat sessions import` reads.

    The zip contains session.json with the messages, the exact token ids, settings and seeds. Equal
    sessions give equal files. A FILE that ends in .md or .json contains only the text of the
    current conversation and cannot be imported.

    \b
    Examples:
      lmchat sessions export trip trip.zip
      lmchat sessions export trip trip.zip --pages --force
      lmchat sessions export trip trip.md
    """
    from lmchat.archive import export_session

    from .export import check_ending, export_record, is_text
    from .unfinished_turn import unfinished

    with opened_store() as (store, data_dir), _pages(data_dir) as found:
        record = load(store, owner, name)
        if not force and file.exists():
            raise InvalidRequest(f"{file} exists; --force replaces it")
        _note_unfinished(store, record)
        if is_text(file):
            check_ending(file, pages)
            if unfinished(store, record) is not None:
                note(LEFT_OUT)
            done = export_record(record, file, force)
        else:
            page_store = found.store if pages else None
            if pages and page_store is None:
                note("no KV cache is on disk: the file contains none")
            done = export_session(store, page_store, record, file, force, notify=note)
    also = "" if is_text(file) else f" and {counted(done.pages, 'page')}"
    text = f"{file}: {counted(done.turns, 'message')}{also} written, {human_bytes(done.bytes)}"
    _report(as_json, text, asdict(done))


@app.command("import", short_help="Read a session from a file.")
@_quiet
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Zip written by `export`.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the session. [default: the name in the file]")
    ] = None,
    no_pages: Annotated[
        bool,
        typer.Option(
            "--no-pages", help="Leave out the KV cache; it is computed again when needed."
        ),
    ] = False,
    owner: Owner = LOCAL_OWNER,
    as_json: Json = False,
) -> None:
    """Read a session from a zip, as a new session. The whole file is verified first.

    Whether KV pages match their tokens cannot be verified without computing them: import pages only
    from sources that you trust. Other sessions with the same prefix may use them too.

    \b
    Examples:
      lmchat sessions import trip.zip
      lmchat sessions import trip.zip --name trip-2 --no-pages
    """
    from lmchat.archive import import_session

    with opened_store() as (store, data_dir), _pages(data_dir, not no_pages) as pages:
        page_store = None if no_pages else pages.make()
        notify = None if no_pages else note
        try:
            record = import_session(store, page_store, file, name, owner, notify=notify)
        except InvalidRequest as error:
            hint = "; --name gives another" if error.param == "name" else ""
            raise InvalidRequest(f"{error}{hint}") from None
    turns = sum(turn.role == "user" for turn in record.tree.path(record.leaf))
    model = f"; its model is {record.model!r}" if record.model else ""
    text = f"session {record.name} imported: {counted(turns, 'question')}{model}"
    found = {"name": record.name, "id": record.id, "turns": turns, "model": record.model}
    _report(as_json, text, found)


@app.command(short_help="Delete sessions.")
@_quiet
def rm(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Names of the sessions.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Instead of names: all that were last used so long ago, such as 12h, 30d or 8w.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    owner: Owner = LOCAL_OWNER,
    as_json: Json = False,
) -> None:
    """Delete sessions with all their branches, and KV cache that no other session shares.

    --older-than deletes sessions that list shows, but for pinned ones and those in which a reply is
    being generated, which are named.

    \b
    Examples:
      lmchat sessions rm trip
      lmchat sessions rm chat-1 chat-2 --yes
      lmchat sessions rm --older-than 30d --dry-run
    """
    from . import removal

    if bool(names) == (older_than is not None):
        raise InvalidRequest("expected the NAMEs of sessions, or --older-than")
    age = None if older_than is None else removal.parse_age(older_than)
    freed = 0
    with opened_store() as (store, data_dir), _pages(data_dir, not dry_run) as pages:
        if age is None:
            chosen = removal.by_name(store, owner, names or ())
        else:
            chosen = removal.by_age(store, owner, age)
        if chosen.sessions and not dry_run:
            if not yes and not removal.is_confirmed(chosen):
                raise typer.Exit(FAILED)
            freed = removal.remove(store, pages, chosen)
    found: dict[str, Any] = {"names": chosen.names, "freed_bytes": freed}
    if age is not None or dry_run:
        found |= {"skipped": chosen.skipped, "dry_run": dry_run}
    if not as_json:
        removal.note_skipped(chosen)
    if not chosen.sessions:
        reason = "" if chosen.skipped else f": all were used in the last {older_than}"
        text = f"no session is deleted{reason}"
    elif dry_run:
        text = f"would be deleted: {', '.join(chosen.names)}"
    else:
        text = f"deleted: {', '.join(chosen.names)}; {human_bytes(freed)} of KV cache freed"
    _report(as_json, text, found)


@app.command(short_help="Free KV pages that no session uses.")
@_quiet
def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print how much could be freed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Free the KV pages on disk that no session of any owner uses.

    \b
    Examples:
      lmchat sessions gc --dry-run
      lmchat sessions gc
    """
    from . import maintenance as session_upkeep

    with opened_store() as (store, data_dir), _pages(data_dir) as pages:
        done = session_upkeep.collect(store, pages, dry_run=dry_run)
    word = "would be freed" if dry_run else "freed"
    what = counted(done.pages, "page")
    text = f"{human_bytes(done.bytes)} {word}: {what} that no session uses"
    found = {"pages": done.pages, "bytes": done.bytes, "disk_bytes": done.disk_bytes}
    _report(as_json, text, {**found, "dry_run": dry_run})


@app.command(short_help="Check sessions and KV pages for damage.")
@_quiet
def verify(no_pages: NoPages = False, as_json: Json = False) -> None:
    """Read all stored sessions and KV pages and report damage; the exit code is then 1.

    Damaged pages are removed; they are computed again when they are needed.

    \b
    Examples:
      lmchat sessions verify
      lmchat sessions verify --no-pages --json
    """
    with opened_store() as (store, data_dir), _pages(data_dir, not no_pages) as pages:
        count = len(store.summaries())
        problems = store.verify()
        checked = None if pages.store is None else pages.store.verify()
    damaged = checked.damaged if checked else 0
    if damaged:
        problems.append(f"{counted(damaged, 'damaged page')} removed")
    for problem in () if as_json else problems:
        note(problem)
    good = checked.good if checked else 0
    text = f"checked {counted(count, 'session')} and {counted(good, 'page')}: " + (
        counted(len(problems), "problem") if problems else "no damage"
    )
    facts = {"sessions": count, "pages": good + damaged, "damaged_pages": damaged}
    _report(as_json, text, {**facts, "problems": problems})
    if problems:
        raise typer.Exit(FAILED)


# --- shared by the commands ----------------------------------------------------------------------


def _screen() -> Screen:
    from ..terminal.screen import Screen

    return Screen()


def _pages(data_dir: Path, wanted: bool = True) -> DiskPages:
    from .disk_pages import DiskPages

    return DiskPages(data_dir, wanted)


def _rows(store: Store, pages: DiskPages, found: Iterable[Summary]) -> list[Row]:
    rows, speeds = [], store.noted(SPEEDS)
    for summary in found:
        try:
            record = store.find(summary.owner, summary.name) if pages.wanted else None
        except StoreError:  # damaged: `verify` reports it
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
    """Returns the object of `show --json`; its turns have the fields of an archive."""
    from lmchat.archive.document import to_document

    from .conversation import rounds
    from .views import all_branches

    document = to_document(record)
    turns = {turn["id"]: turn for turn in document["turns"]}
    copied = ("history", "overflow", "settings", "template_variables", "adapter")
    found = row.as_json() | {name: document["session"][name] for name in copied}
    found["messages"] = [turns[t.id] for t in rounds(record.tree.path(record.leaf), count)]
    if branches:
        found["branches"] = all_branches(record)
    return found


def _note_unfinished(store: Store, record: SessionRecord) -> None:
    """Prints a note if another process is generating a turn, which is not copied."""
    if busy := find(store, record.owner, record.name).busy:
        note(f"{busy} is generating in {record.name}: that turn is left out")


def _without_pages(row: dict[str, Any]) -> dict[str, Any]:
    unknown = ("bytes", "residence", "resident_tokens", "predicted_ttft")
    return {name: value for name, value in row.items() if name not in unknown}


def _report(as_json: bool, text: str, found: dict[str, Any]) -> None:
    if as_json:
        _print_json(found)
    else:
        say(text)


def _print_json(found: dict[str, Any]) -> None:
    typer.echo(json.dumps(found, indent=2))
