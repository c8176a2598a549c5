"""The page as Gradio components, and the events that connect them with `Chat`.

The page's JavaScript (static/page.js) draws the side panel, the title and the bars below
messages. It exchanges values with Python through hidden Textboxes: `action` to Python; `mark`,
`view`, `sessions` and `notice` from it. Every session id in them is checked against the owner.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import gradio as gr

from lmchat.server.http.exchange import EXCHANGE
from lmchat.server.state import OWNER, STATE, ServerState

from .chat import Chat, Parts, Visitor
from .form import CHOICES, HELP
from .markdown import LATEX


def theme() -> Any:
    """Returns the theme: neutral colours, and fonts of the system, so that none is loaded."""
    sans, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return gr.themes.Base(primary_hue="blue", neutral_hue="zinc", font=sans, font_mono=mono)


def _chatbot(name: str, label: str) -> Any:
    return gr.Chatbot(
        elem_id=name, elem_classes="messages", label=label, show_label=False, container=False,
        height=None, autoscroll=False, buttons=[], feedback_options=None, allow_tags=False,
        sanitize_html=True, latex_delimiters=cast(Any, LATEX), layout="bubble",
    )  # fmt: skip


def _field(name: str) -> Any:
    label = "System prompt" if name == "system" else name.replace("_", " ").capitalize()
    if name in CHOICES:
        return gr.Dropdown(CHOICES[name], label=label, info=HELP[name])
    if name == "pinned":
        return gr.Checkbox(label=label, info=HELP[name])
    lines = 3 if name == "system" else 1
    return gr.Textbox(label=label, info=HELP[name], lines=lines, max_lines=8)


def _visitor(chat: Chat, request: gr.Request) -> Visitor:
    scope = request.request.scope
    tab = chat.tabs.of(scope[OWNER], str(request.session_hash))
    return Visitor(scope[OWNER], tab, cast(ServerState, scope[STATE]).session_limit)


def _box(is_running: bool) -> Any:
    send, stop = (False, "Stop") if is_running else ("Send", False)
    return gr.Textbox(submit_btn=send, stop_btn=stop)


def blocks(chat: Chat) -> Any:
    """Returns the page, which does what `chat` does."""
    with gr.Blocks(title="lmchat", fill_height=True, analytics_enabled=False) as page:
        with gr.Sidebar(elem_id="panel", width=280):
            search = gr.Textbox(label="Search", placeholder="Search messages", elem_id="search")
            gr.Markdown("", elem_id="panel-content")
        with gr.Sidebar(elem_id="settings", position="right", open=False, width=320):
            gr.Markdown("### Session")
            fields = {name: _field(name) for name in HELP}
            save = gr.Button("Save", variant="primary")
            gr.Markdown("", elem_id="session-files")
        gr.Markdown("", elem_id="header")
        with gr.Column(elem_id="conversation"):
            history = _chatbot("history", "Earlier messages")
            last = _chatbot("last", "Last messages")
        box = gr.Textbox(
            label="Message", placeholder="Write a message", elem_id="box", lines=1, max_lines=12,
            submit_btn="Send", autofocus=True,
        )  # fmt: skip
        names = ("mark", "view", "sessions", "notice", "action")
        hidden = {n: gr.Textbox(visible="hidden", elem_id=n, label=n) for n in names}
        action = hidden.pop("action")
        timer = gr.Timer(1.0)
    parts = {**hidden, "history": history, "last": last, "box": box}
    mark = hidden["mark"]

    def values(found: Parts) -> dict[Any, Any]:
        """Returns the parts by component. One that is not there is skipped."""
        shown = {parts[name]: value for name, value in found.items() if name in parts}
        if "is_running" in found:
            shown[box] = _box(found["is_running"])
        if "refusals" in found:
            refused = found["refusals"]
            shown |= {
                part: type(part)(info=f"⚠ {refused[name]}" if name in refused else HELP[name])
                for name, part in fields.items()
            }
        return shown or {mark: gr.skip()}

    async def show(text: str, request: gr.Request) -> AsyncIterator[dict[Any, Any]]:
        visitor = _visitor(chat, request)
        async for found in chat.show(text, visitor):
            visitor.tab.due |= found.pop("form", {})
            yield values(found)

    async def fill(request: gr.Request) -> dict[Any, Any]:
        due = _visitor(chat, request).tab.due
        return {fields[name]: due.pop(name) for name in [*due]} or {save: gr.skip()}

    def bound(verb: Callable[..., Awaitable[Parts]]) -> Any:
        """Returns a verb of the chat as a handler of events."""

        async def call(request: gr.Request, *given: Any) -> dict[Any, Any]:
            return values(await verb(*given, _visitor(chat, request)))

        return call

    async def tick(text: str, request: gr.Request) -> dict[Any, Any]:
        request.request.scope[EXCHANGE].is_routine = True  # a tab asks once a second
        return values(await chat.tick(text, _visitor(chat, request)))

    async def store(text: str, request: gr.Request, *given: Any) -> dict[Any, Any]:
        found = dict(zip(fields, given, strict=True))
        return values(await chat.save(found, text, _visitor(chat, request)))

    # Gradio makes outputs anew that an event leaves alone, so the one that streams has few.
    every = {
        "outputs": [part for name, part in parts.items() if name != "sessions"],
        "show_progress": "hidden",
        "concurrency_limit": None,
        "api_visibility": "private",
    }
    short = {**every, "outputs": [mark, hidden["notice"], hidden["sessions"], box], "queue": False}
    with page:
        shown = mark.change(show, [mark], trigger_mode="multiple", **every)
        shown.then(fill, None, **{**short, "outputs": [save, *fields.values()]})
        timer.tick(tick, [mark], **short)
        action.change(bound(chat.act), [action, mark], trigger_mode="multiple", **short)
        box.submit(bound(chat.send), [box, mark], **short)
        box.stop(bound(chat.stop), [mark], **short)
        search.change(bound(chat.search), [search], trigger_mode="always_last", **short)
        save.click(
            store,
            [mark, *fields.values()],
            **{**short, "outputs": [mark, hidden["notice"], *fields.values()]},
        )
    return page
