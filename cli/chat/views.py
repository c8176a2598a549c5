"""Views of a session that the slash commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lmchat.figures import context_use
from lmchat.generation.state import State

from ..sessions import conversation as talk
from ..sessions.list_row import Row
from ..terminal.layout import short, wrap
from ..terminal.line_input import can_prefill, quote
from ..terminal.screen import Screen
from ..terminal.tables import columns
from ..terminal.texts import clean, counted, excerpt
from .context import ChatContext, SlashCommand
from .reply_status import CONTINUE
from .setting_values import explanation, in_effect

if TYPE_CHECKING:
    import lmchat
    import turbomind

LISTED = 30  # sessions in a list
RESUMED = 2  # rounds shown when a session is resumed
_HEAD = "bold"


def all_help(screen: Screen, commands: Iterable[SlashCommand]) -> None:
    """Prints all commands, a line each, and the keys."""
    columns(screen, [(c.usage, c.summary) for c in commands], ("bold",))
    screen.note(
        'Enter sends, Alt-Enter or """ ... """ make several lines, Ctrl-R searches what was '
        "typed, Ctrl-X Ctrl-E opens an editor, Tab completes, Ctrl-C stops a reply, "
        "Ctrl-D leaves. /help COMMAND explains one."
    )


def command_help(screen: Screen, command: SlashCommand) -> None:
    """Prints the full help of one command."""
    screen.print(*wrap(Text(command.usage, style=_HEAD), screen.width))
    sentence = command.summary[0].upper() + command.summary[1:] + "."
    screen.note("\n".join(filter(None, (sentence, command.details))), "")
    columns(screen, command.table.items(), ("bold",))


def sessions(chat: ChatContext, everything: bool = False) -> None:
    """Prints the sessions, the most recently used first; `everything` prints all of them."""
    from ..sessions import views as session_views

    found = chat.engine.sessions(chat.session.owner)
    shown = found if everything else found[:LISTED]
    session_views.table(chat.screen, [_row(chat, i) for i in shown], current=chat.session.name)
    if len(found) > len(shown):
        chat.screen.note(
            f"and {len(found) - len(shown):,} older ones: /sessions all, /search WORDS"
        )


def _row(chat: ChatContext, info: lmchat.SessionInfo) -> Row:
    """Returns a session's row of the list. Only sessions in use here report where their KV is."""
    session = next((s for s in chat.used if s.name == info.name), None)
    if session is None or session.state is State.CLOSED:
        return Row(info)
    residence, size = session.residence, chat.engine.info.kv_bytes_per_token
    return Row(
        info,
        device_bytes=residence.device * size,
        host_bytes=max(0, residence.host - residence.device) * size
        or None,  # not also on the device
        resident=max(residence.device, residence.host, residence.disk),
        predicted_ttft=session.predicted_ttft() or None,
    )


def place(chat: ChatContext) -> None:
    """Prints the current session, its last round and how to continue it."""
    session = chat.session
    used = context_use(session.length, chat.engine.max_context)
    chat.screen.note(f"session {session.name}, {used}, {kv_place(session)}")
    conversation(chat, 1)
    _busy(chat)
    loose_end(chat)


def resumed(chat: ChatContext) -> None:
    """Prints the end of a resumed session and where its KV cache is."""
    session, screen = chat.session, chat.screen
    rounds = sum(turn.role == "user" for turn in (*session.dropped, *session.turns))
    parts = [session.name, counted(rounds, "round"), clean(session.title)]
    screen.print(Text(f"── {short(' · '.join(filter(None, parts)), screen.width - 6)} ──", "dim"))
    if rounds:
        conversation(chat, RESUMED)
    if session.length:
        screen.note(f"{counted(session.length, 'token')}, {kv_place(session)}")
    _busy(chat)
    loose_end(chat)


def _busy(chat: ChatContext) -> None:
    """Prints a note if another process is generating in the session."""
    for info in chat.engine.sessions(chat.session.owner):
        if info.name == chat.session.name and info.busy:
            chat.screen.note(f"{clean(info.busy)} is generating in this session now")


def kv_place(session: lmchat.SessionApi) -> str:
    """Returns where the KV cache of a session is, the fastest tier first."""
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
        return "KV not cached: the next turn computes it"
    if (
        len(parts) == 1 and seen >= length - 1
    ):  # the KV of the last token is computed with the next turn
        return f"KV {parts[0][1]}"
    return "KV: " + ", ".join(f"{count:,} {where}" for count, where in parts)


def loose_end(chat: ChatContext) -> None:
    """Prints notices, an unanswered question, or how to extend the last reply."""
    for notice in chat.session.notices:
        chat.screen.note(clean(notice))
    turns, question = chat.session.turns, chat.session.unanswered
    if question:
        seen = can_prefill()
        chat.next_text = quote(question) if seen else ""
        chat.screen.note("your last question was not answered" + (
            "; Enter asks it again" if seen else f": {clean(question)}"
        ))  # fmt: skip
    elif turns and _can_continue(chat, turns[-1]):
        chat.screen.note(CONTINUE)


def _can_continue(chat: ChatContext, last: lmchat.Turn) -> bool:
    """Returns whether a reply was cut and the context has room to extend it."""
    if last.finish_reason == "length":
        return chat.session.length < chat.engine.max_context
    return last.finish_reason in ("interrupted", "cancelled")


def conversation(chat: ChatContext, count: int | None = None) -> None:
    """Prints the last `count` rounds; None: all."""
    talk.conversation(
        chat.screen,
        chat.session.turns,
        count,
        dropped=chat.session.dropped,
        reasoning=chat.show_reasoning,
        stopped=lambda: chat.interrupts.pressed,
    )


def found(chat: ChatContext, words: str) -> None:
    """Prints the sessions that contain the words, best match first, each with an excerpt."""
    from ..sessions import views as session_views

    rows = [Row(i) for i in chat.engine.sessions(chat.session.owner, search=words, limit=LISTED)]
    session_views.found(chat.screen, rows, words)
    chat.screen.note("/switch NAME opens one" if rows else f"no session contains {clean(words)}")


def tokens(chat: ChatContext, count: int | None = None) -> None:
    """Prints the token ids and texts of the last `count` rounds, a paragraph per turn."""
    session = chat.session
    shown = [i for turn in talk.rounds(session.turns, count) for i in turn.token_ids]
    pieces = dict(zip(shown, chat.engine.tokenizer.pieces(shown), strict=True))
    talk.tokens(
        chat.screen,
        session.turns,
        count,
        spelled=lambda token_id: ":" + repr(pieces[token_id]).replace(" ", "␣"),
        stopped=lambda: chat.interrupts.pressed,
    )
    chat.screen.note(context_use(session.length, chat.engine.max_context))


def branches(chat: ChatContext, index: int, found: Sequence[lmchat.Branch]) -> None:
    """Prints the branches at question `index`. An inactive one was replaced or taken back."""
    if len(found) == 1 and found[0].active:
        chat.screen.note(f"question {index + 1} has one version only; /edit and /retry make more")
        return
    lines = []
    for branch in found:
        reply = excerpt(branch.reply.text) if branch.reply else "(no reply)"
        lines.append((branch.active, index + 1, branch.index + 1, branch.turn.text, reply))
    talk.branch_list(chat.screen, lines)
    chat.screen.note(f"/branches {index + 1} K switches to branch K")


def all_branches(chat: ChatContext) -> None:
    """Prints the branches of all questions that have several."""
    session, shown = chat.session, False
    count = sum(turn.role == "user" for turn in session.turns)
    for index in range(count + 1):
        found = session.branches(index)
        if len(found) > (0 if index == count else 1):
            branches(chat, index, found)
            shown = True
    if not shown:
        chat.screen.note("no branches: /retry, /edit and /undo make some")


def settings(chat: ChatContext, only: str | None) -> None:
    """Prints the settings in effect and their origins, or one of them with its meaning."""
    session = chat.session
    rows = in_effect(session.settings, chat.engine.model_settings)
    if only:
        value = "{}, {}".format(*rows[only]) if only in rows else "not set"
        chat.screen.note(f"{only}: {value} ({explanation(only)})")
        return
    columns(chat.screen, [(n, f"{v}, {s}") for n, (v, s) in rows.items()], ("bold",))
    chat.screen.note("/set NAME VALUE changes one, /help set explains all")


def thinking(chat: ChatContext) -> None:
    """Prints whether reasoning is on and whether it is shown."""
    info, variables = chat.engine.template_info, chat.session.template_variables
    shown = "shown" if chat.show_reasoning else "hidden"
    if info.switch is None:
        state = "the model's template cannot switch it"
    else:
        value = variables.get(info.switch.variable)
        known = {repr(info.switch.on): "on", repr(info.switch.off): "off"}
        state = "as the model decides" if value is None else known.get(repr(value), repr(value))
    chat.screen.note(f"reasoning: {state}; {shown}")


def info(chat: ChatContext) -> None:
    """Prints the model of the chat and how it runs."""
    engine, kind = chat.engine, chat.engine.info
    used = context_use(chat.session.length, engine.max_context)
    rows = [
        ("model", clean(engine.model)),
        *([("server", chat.server.url)] if chat.server else []),
        ("format", f"{kind.weights_text}, KV {kind.kv_dtype}"),
        ("device", engine.device),
        ("threads", str(engine.threads or "unknown")),
        ("context", f"{counted(engine.max_context, 'token')}"),
        ("session", f"{chat.session.name}: {used}"),
    ]
    columns(chat.screen, rows, ("bold",))


def mean_wait(found: turbomind.Stats) -> float:
    """Returns the milliseconds that a request waited for a slot, on average."""
    return 1000 * found.queue_seconds / max(1, found.requests_started)


def stats(chat: ChatContext) -> None:
    """Prints the engine's counters and the context in use."""
    found, session = chat.engine.stats(), chat.session
    in_use = found.pages_referenced + found.pages_cached
    columns(
        chat.screen,
        [
            ("session", f"{session.name}: {context_use(session.length, found.max_context)}"),
            ("prefilled", f"{found.tokens_prefilled:,} tokens, {found.tokens_reused:,} reused, "
                          f"{found.tokens_recomputed:,} computed again"),
            ("decoded", f"{found.tokens_decoded:,} tokens in {found.steps:,} steps"),
            ("last step", f"{found.last_step_ms:.1f} ms"),
            ("pages", f"{in_use:,} of {found.pages_total:,} in use, {found.pages_cached:,} of them "
                      "cached"),
            ("running", f"{found.slots} requests, {found.waiting} waiting, "
                        f"{found.preemptions} preempted so far"),
            ("queue", f"{mean_wait(found):.0f} ms on average before {found.requests_started:,} "
                      "requests started"),
            ("sessions", f"{len(chat.engine.sessions()):,} with {found.handles} handles"),
        ],
        ("bold",),
    )  # fmt: skip
