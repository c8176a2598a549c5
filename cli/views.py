"""What the commands show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lmchat.state import State

from .blocks import BlockStream
from .line_input import can_prefill, quote
from .markdown import render, wrap
from .screen import Screen
from .session_row import Row
from .setting_text import explanation, in_effect
from .status import CONTINUE, clean, context_use

if TYPE_CHECKING:
    import lmchat
    from lmchat.text.tokenizer import Tokenizer

    from .commands import Command
    from .repl import Repl

EXCERPT = 50  # characters of a text in a list
LISTED = 30  # sessions in a list
RESUMED = 2  # rounds that are shown of a session that goes on
_ENDS = {
    "cancelled": "stopped",
    "length": "cut at its limit",
    "error": "ended by an error",
    "interrupted": "interrupted: its process was ended",
}
_HEAD = "bold"


def excerpt(text: str) -> str:
    """The beginning of a text, in one line."""
    words = " ".join(clean(text).split())
    return words if len(words) <= EXCERPT else words[: EXCERPT - 1] + "…"


def counted(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def columns(screen: Screen, rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Rows of cells under each other; the last cell is wrapped, or cut off in its own lines where
    the screen is narrow."""
    table = [list(row) for row in rows]
    if not table:
        return
    width = screen.width
    sizes = [max(Text(row[i]).cell_len for row in table) for i in range(len(table[0]) - 1)]
    start = sum(sizes) + 2 * len(sizes)
    for row in table:
        texts = [Text(cell, style=_style(styles, i)) for i, cell in enumerate(row)]
        if start > width // 2:  # no room beside them
            head = Text("  ").join(texts[:-1])
            lines = wrap(head, width) + [Text("  ") + line for line in wrap(texts[-1], width - 2)]
            screen.print(*(line for line in lines if line.plain.strip()))
            continue
        head = Text()
        for text, size in zip(texts[:-1], sizes, strict=True):
            head += Text(set_cell_size(text.plain, size), style=text.style) + Text("  ")
        first, *rest = wrap(texts[-1], width - start)
        head += first
        head.rstrip()
        screen.print(head, *(Text(" " * start) + line for line in rest))


def all_help(screen: Screen, commands: Iterable[Command]) -> None:
    """Every command with a line."""
    columns(screen, [(_usage(c), c.help) for c in commands], ("bold",))
    screen.note(
        'Enter sends, Alt-Enter or """ ... """ make several lines, Ctrl-R searches what was '
        "typed, Ctrl-X Ctrl-E opens an editor, Tab completes, Ctrl-C stops a reply, "
        "Ctrl-D leaves. /help COMMAND tells more."
    )


def command_help(screen: Screen, command: Command) -> None:
    """One command in full."""
    screen.print(*wrap(Text(_usage(command), style=_HEAD), screen.width))
    sentence = command.help[0].upper() + command.help[1:] + "."
    screen.note("\n".join(filter(None, (sentence, command.details))), "")
    columns(screen, command.table.items(), ("bold",))


def sessions(repl: Repl, everything: bool = False) -> None:
    """The sessions, the last used first, the current one marked."""
    from . import session_views

    found = repl.engine.sessions(repl.session.owner)
    shown = found if everything else found[:LISTED]
    session_views.table(repl.screen, [_row(repl, i) for i in shown], current=repl.session.name)
    if len(found) > len(shown):
        repl.screen.note(
            f"and {len(found) - len(shown):,} older ones: /sessions all, /search WORDS"
        )


def _row(repl: Repl, info: lmchat.SessionInfo) -> Row:
    """What the list says of one. Where its keys and values are is known of those in use here."""
    session = next((s for s in repl.used if s.name == info.name), None)
    if session is None or session.state is State.CLOSED:
        return Row(info)
    kept = session.residence
    resident = max(kept.device, kept.host, kept.disk)
    return Row(info, resident=resident, predicted_ttft=session.predicted_ttft() or None)


def place(repl: Repl) -> None:
    """Where the chat is now: the session, its last round and what is left to do there."""
    session = repl.session
    used = context_use(session.length, repl.engine.max_context)
    repl.screen.note(f"session {session.name}, {used}, {kv_place(session)}")
    conversation(repl, 1)
    loose_end(repl)


def resumed(repl: Repl) -> None:
    """A session that goes on after a while: its end, and what is kept of it where."""
    session, screen = repl.session, repl.screen
    rounds = sum(turn.role == "user" for turn in session.turns)
    parts = [session.name, counted(rounds, "round"), clean(session.title)]
    screen.print(Text(f"── {_cut(' · '.join(filter(None, parts)), screen.width - 6)} ──", "dim"))
    if rounds:
        conversation(repl, RESUMED)
    if session.length:
        screen.note(f"{counted(session.length, 'token')}, {kv_place(session)}")
    for info in repl.engine.sessions(session.owner):
        if info.name == session.name and info.busy:
            screen.note(f"{clean(info.busy)} is generating on it now")
    loose_end(repl)


def _cut(text: str, width: int) -> str:
    """At most so many columns of it."""
    fits = cell_len(text) <= width
    return text if fits else set_cell_size(text, max(1, width) - 1).rstrip() + "…"


def kv_place(session: lmchat.Session) -> str:
    """Where its keys and values are, from the fastest place on."""
    found, length = session.residence, session.length
    if not length:
        return "nothing computed yet"
    places = (("in memory", found.device), ("in RAM", found.host), ("on disk", found.disk))
    parts, seen = [], 0
    for where, upto in places:
        if upto > seen:
            parts.append((upto - seen, where))
            seen = upto
    if not parts:
        return "KV not kept: the next turn computes it"
    if len(parts) == 1 and seen >= length - 1:  # a reply's last token has none yet
        return f"KV {parts[0][1]}"
    return "KV: " + ", ".join(f"{count:,} {where}" for count, where in parts)


def loose_end(repl: Repl) -> None:
    """What a kill left of the last round, what was damaged of it, and how it goes on."""
    for notice in repl.session.notices:
        repl.screen.note(clean(notice))
    turns, question = repl.session.turns, repl.session.unanswered
    if question:
        seen = can_prefill()
        repl.next_text = quote(question) if seen else ""
        repl.screen.note("your last question was not answered" + (
            "; Enter asks it again" if seen else f": {clean(question)}"
        ))  # fmt: skip
    elif turns and turns[-1].finish_reason == "interrupted":
        repl.screen.note(CONTINUE)


def conversation(repl: Repl, count: int) -> None:
    """The last `count` rounds, and the system prompt where they begin at the first."""
    turns = repl.session.turns
    questions = [i for i, turn in enumerate(turns) if turn.role == "user"]
    if not questions:
        repl.screen.note("no question yet")
        return
    first = questions[-count] if 0 < count < len(questions) else 0
    number = len([i for i in questions if i < first])
    for turn in turns[first:] if count else ():
        if repl.interrupts.pressed:
            return
        if turn.role == "user":
            number += 1
            lines = wrap(Text(clean(turn.text), style=_HEAD), repl.screen.width - 3)
            repl.screen.print(Text(f"{number}> ", style=_HEAD) + lines[0], *lines[1:])
        elif turn.role == "system":
            repl.screen.note(f"system prompt: {clean(turn.text)}")
        else:
            _reply(repl, turn)


def _reply(repl: Repl, turn: lmchat.Turn) -> None:
    screen = repl.screen
    if turn.reasoning and repl.show_reasoning:
        screen.note(clean(turn.reasoning).strip())
        screen.print(Text())
    if screen.plain:
        screen.print(*(Text(line) for line in clean(turn.text).split("\n")))
    else:
        blocks = BlockStream()
        blocks.feed(turn.text.lstrip("\n"))
        for block in blocks.finish():
            screen.print(*render(block, screen.width, fold_code=False))
    if turn.finish_reason not in ("", "stop"):
        screen.note(f"({_ENDS[turn.finish_reason]})")
    screen.print(Text())


def found(repl: Repl, words: str) -> None:
    """The sessions in which that was said, the best first, each with a place."""
    from . import session_views

    rows = [Row(i) for i in repl.engine.sessions(repl.session.owner, search=words, limit=LISTED)]
    session_views.found(repl.screen, rows, words)
    repl.screen.note("/switch NAME goes to one" if rows else f"nothing with {clean(words)}")


def tokens(repl: Repl, count: int) -> None:
    """The ids of the last `count` rounds with their texts, a line per turn."""
    turns = repl.session.turns
    questions = [i for i, turn in enumerate(turns) if turn.role == "user"]
    first = questions[-count] if 0 < count < len(questions) else 0
    tokenizer = repl.engine.tokenizer
    for turn in turns[first:] if count else ():
        repl.screen.note(f"{turn.role}: {counted(len(turn.token_ids), 'token')}", _HEAD)
        line = Text()
        for token_id in turn.token_ids:
            if repl.interrupts.pressed:
                return
            text = _piece(tokenizer, token_id)
            line.append(str(token_id), "cyan")
            line.append(":" + repr(text).replace(" ", "␣") + " ", "")
        repl.screen.print(*(wrap(line, repl.screen.width) if turn.token_ids else ()))
    session = repl.session
    repl.screen.note(context_use(session.length, repl.engine.max_context))


def _piece(tokenizer: Tokenizer, token_id: int) -> str:
    """What the token is inside a text: SentencePiece drops the space at a text's beginning."""
    once = tokenizer.raw([token_id])
    return tokenizer.raw([token_id, token_id])[len(once) :] or once


def branches(repl: Repl, index: int, found: Sequence[lmchat.Branch]) -> None:
    """The alternatives at a question. One that is not active was taken back."""
    if len(found) == 1 and found[0].active:
        repl.screen.note(f"question {index + 1} has one version only; /edit and /retry make more")
        return
    rows = []
    for branch in found:
        reply = excerpt(branch.reply.text) if branch.reply else "(no reply)"
        mark = "*" if branch.active else " "
        rows.append((f"{mark} {index + 1} {branch.index + 1}", excerpt(branch.turn.text), reply))
    if repl.screen.width >= 3 * EXCERPT // 2:
        columns(repl.screen, [(a, f"{b} → {c}") for a, b, c in rows], ("bold",))
    else:
        columns(repl.screen, [(a, f"{b}\n→ {c}") for a, b, c in rows], ("bold",))
    repl.screen.note(f"/branches {index + 1} K goes to the Kth")


def all_branches(repl: Repl) -> None:
    """All questions that have several ways to go on."""
    session, shown = repl.session, False
    count = sum(turn.role == "user" for turn in session.turns)
    for index in range(count + 1):
        found = session.branches(index)
        if len(found) > (0 if index == count else 1):
            branches(repl, index, found)
            shown = True
    if not shown:
        repl.screen.note("no branches: /retry, /edit and /undo make some")


def settings(repl: Repl, only: str | None) -> None:
    """The settings in effect and where each comes from, or one of them with its meaning."""
    session = repl.session
    rows = in_effect(session.settings, repl.engine.model_settings)
    if only:
        value = "{}, {}".format(*rows[only]) if only in rows else "not set"
        repl.screen.note(f"{only}: {value} ({explanation(only)})")
        return
    columns(repl.screen, [(n, f"{v}, {s}") for n, (v, s) in rows.items()], ("bold",))
    repl.screen.note("/set NAME VALUE changes one, /help set explains all")


def thinking(repl: Repl) -> None:
    """Whether the model thinks and whether that is shown."""
    info, variables = repl.engine.template_info, repl.session.template_variables
    shown = "shown" if repl.show_reasoning else "hidden"
    if info.switch is None:
        state = "the model's template cannot switch it"
    else:
        value = variables.get(info.switch.variable)
        known = {repr(info.switch.on): "on", repr(info.switch.off): "off"}
        state = "as the model likes" if value is None else known.get(repr(value), repr(value))
    repl.screen.note(f"reasoning: {state}; {shown}")


def stats(repl: Repl) -> None:
    """The engine's counters and this session's context."""
    found, session = repl.engine.stats(), repl.session
    in_use = found.pages_referenced + found.pages_cached
    columns(
        repl.screen,
        [
            ("session", f"{session.name}: {context_use(session.length, found.max_context)}"),
            ("prefilled", f"{found.tokens_prefilled:,} tokens, {found.tokens_reused:,} reused"),
            ("decoded", f"{found.tokens_decoded:,} tokens in {found.steps:,} steps"),
            ("last step", f"{found.last_step_ms:.1f} ms"),
            ("pages", f"{in_use:,} of {found.pages_total:,} in use, {found.pages_cached:,} of them "
                      "cached"),
            ("running", f"{found.rows} requests, {found.waiting} waiting, "
                        f"{found.preemptions} preempted so far"),
            ("sessions", f"{len(repl.engine.sessions()):,} with {found.handles} handles"),
        ],
        ("bold",),
    )  # fmt: skip


def _usage(command: Command) -> str:
    return f"/{command.name} {command.arguments}".rstrip()


def _style(styles: Sequence[str], i: int) -> str:
    return styles[i] if i < len(styles) else ""
