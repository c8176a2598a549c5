"""What the commands show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lmchat.sessions.state import State

from ..sessions.row import Row
from ..terminal.columns import columns, short
from ..terminal.line_input import can_prefill, quote
from ..terminal.markdown import wrap
from ..terminal.screen import Screen
from ..terminal.texts import counted, excerpt
from . import conversation as talk
from .setting_text import explanation, in_effect
from .status import CONTINUE, clean, context_use

if TYPE_CHECKING:
    import lmchat
    from lmchat.text.tokenizer import Tokenizer

    from .commands import Command
    from .repl import Repl

LISTED = 30  # sessions in a list
RESUMED = 2  # rounds that are shown of a session that goes on
_HEAD = "bold"


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
    from ..sessions import views as session_views

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
    kept, size = session.residence, repl.engine.info.kv_bytes_per_token
    return Row(
        info,
        device_bytes=kept.device * size,
        host_bytes=max(0, kept.host - kept.device) * size or None,  # beyond the device's
        resident=max(kept.device, kept.host, kept.disk),
        predicted_ttft=session.predicted_ttft() or None,
    )


def place(repl: Repl) -> None:
    """Where the chat is now: the session, its last round and what is left to do there."""
    session = repl.session
    used = context_use(session.length, repl.engine.max_context)
    repl.screen.note(f"session {session.name}, {used}, {kv_place(session)}")
    conversation(repl, 1)
    _busy(repl)
    loose_end(repl)


def resumed(repl: Repl) -> None:
    """A session that goes on after a while: its end, and what is kept of it where."""
    session, screen = repl.session, repl.screen
    rounds = sum(turn.role == "user" for turn in session.turns)
    parts = [session.name, counted(rounds, "round"), clean(session.title)]
    screen.print(Text(f"── {short(' · '.join(filter(None, parts)), screen.width - 6)} ──", "dim"))
    if rounds:
        conversation(repl, RESUMED)
    if session.length:
        screen.note(f"{counted(session.length, 'token')}, {kv_place(session)}")
    _busy(repl)
    loose_end(repl)


def _busy(repl: Repl) -> None:
    """Whether another process is at it."""
    for info in repl.engine.sessions(repl.session.owner):
        if info.name == repl.session.name and info.busy:
            repl.screen.note(f"{clean(info.busy)} is generating on it now")


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
    elif turns and _can_continue(repl, turns[-1]):
        repl.screen.note(CONTINUE)


def _can_continue(repl: Repl, last: lmchat.Turn) -> bool:
    """Whether a reply ended before its end, and the context has room for more of it."""
    if last.finish_reason == "length":
        return repl.session.length < repl.engine.max_context
    return last.finish_reason in ("interrupted", "cancelled")


def conversation(repl: Repl, count: int | None = None) -> None:
    """The last `count` rounds, None: all."""
    talk.conversation(
        repl.screen,
        repl.session.turns,
        count,
        reasoning=repl.show_reasoning,
        stopped=lambda: repl.interrupts.pressed,
    )


def found(repl: Repl, words: str) -> None:
    """The sessions in which that was said, the best first, each with a place."""
    from ..sessions import views as session_views

    rows = [Row(i) for i in repl.engine.sessions(repl.session.owner, search=words, limit=LISTED)]
    session_views.found(repl.screen, rows, words)
    repl.screen.note("/switch NAME goes to one" if rows else f"nothing with {clean(words)}")


def tokens(repl: Repl, count: int | None = None) -> None:
    """The ids of the last `count` rounds with their texts, a paragraph per turn."""
    session, tokenizer = repl.session, repl.engine.tokenizer
    talk.tokens(
        repl.screen,
        session.turns,
        count,
        spelled=lambda token_id: ":" + repr(_piece(tokenizer, token_id)).replace(" ", "␣"),
        stopped=lambda: repl.interrupts.pressed,
    )
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
    ways = []
    for branch in found:
        reply = excerpt(branch.reply.text) if branch.reply else "(no reply)"
        ways.append((branch.active, index + 1, branch.index + 1, branch.turn.text, reply))
    talk.ways(repl.screen, ways)
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
            ("running", f"{found.slots} requests, {found.waiting} waiting, "
                        f"{found.preemptions} preempted so far"),
            ("sessions", f"{len(repl.engine.sessions()):,} with {found.handles} handles"),
        ],
        ("bold",),
    )  # fmt: skip


def _usage(command: Command) -> str:
    return f"/{command.name} {command.arguments}".rstrip()
