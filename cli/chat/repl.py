"""The chat in a terminal: reads lines, runs commands, shows replies and handles Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from rich.text import Text

from lmchat.errors import (
    ContextFull,
    EngineClosed,
    Error,
    InternalError,
    SessionBusy,
    StoreError,
)
from lmchat.figures import usage_parts
from lmchat.generation.generation import Delta, Progress, Reply
from turbomind.config.limits import start_thread

from ..errors import CLOSED_PIPE, drop_output
from ..output import say
from ..terminal.interrupts import Interrupts, Signal
from ..terminal.layout import short
from ..terminal.line_input import QUOTES, LineInput, can_prefill, quote, unquote
from ..terminal.screen import Screen
from ..terminal.texts import clean, counted
from . import slash_commands, views
from .actions import users
from .context import Leave, StartReply
from .message_files import MessageFile, joined
from .patience import GivenUp, Patience
from .reply_status import FORK, ROOM, ending, is_withdrawn
from .reply_view import MarkdownView, PlainView, View
from .session_choice import NEW, Choice, drop_if_empty

if TYPE_CHECKING:
    import lmchat

    from .remote import Server

T = TypeVar("T")
LEAST_NAME = 8  # columns of a session's name in the prompt, at least
STOP_EVERY = 0.02  # seconds between attempts to stop a reply that has not started yet
KEYS = ("Alt-Enter new line", "Ctrl-C stop", "Ctrl-D leave", "/help")


class Repl:
    """The read-eval-print loop of a chat, with its current session.

    Replies go to stdout. If stdout is not a terminal, everything else goes to stderr.

    Args:
        engine: The engine of the chat.
        session: The first session.
        name: Name of the model, as shown to the user.
        about: First line of the greeting; None: the model's name.
        plain: Show replies as plain text, without Markdown.
        private: Store nothing on disk.
        server: The server of the engine; None: the engine is of this process.
        patience: How long the chat waits for that server.
    """

    def __init__(
        self,
        engine: lmchat.EngineApi,
        session: lmchat.SessionApi,
        *,
        name: str,
        about: str | None = None,
        plain: bool = False,
        private: bool = False,
        server: Server | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.server = server
        self._patience = patience or Patience()
        self.name = name
        self.about = about
        self.engine = engine
        self.session = session
        self.private = private
        to_stdout = sys.stdout.isatty()
        self.screen = Screen(sys.stdout if to_stdout else sys.stderr, plain=plain)
        self.show_reasoning = True
        self.next_text = ""  # text that the next input line starts with
        self.files: list[MessageFile] = []  # the next message carries them
        self.interrupts = Interrupts()
        self._is_plain = self.screen.plain or not to_stdout
        self.used = [session]  # in this chat, the current one last
        self._begun: list[lmchat.SessionApi] = []  # created by this chat under default names
        self._known: set[tuple[str, str]] = set()  # (role, text) of the turns seen so far
        self._place: list[tuple[int, str]] = []  # (id, text) of the conversation as last shown
        self._input = LineInput(
            lambda text: slash_commands.complete(self, text),
            self._prefetch,
            to_stderr=not to_stdout,
            private=private,
            asks=server is not None,
        )

    def run(self, chosen: Choice = NEW) -> int:
        """Runs the chat until the user leaves.

        Args:
            chosen: How the first session was chosen.

        Returns:
            The exit code.
        """
        if chosen.name is None:
            self._begun.append(self.session)
        try:
            with self.interrupts, self.screen.taken():
                try:
                    self._wait_for(lambda: self._greet(chosen))
                except GivenUp as error:
                    self.fail(error)
                self._record_seen()
                return self._loop()
        finally:
            self._patience.leave(self._drop_empty)

    def _loop(self) -> int:
        while True:
            self.interrupts.pressed = False
            text, self.next_text = self.next_text, ""
            try:
                typed = self._input.read(self._prompt(), text)
            except KeyboardInterrupt:
                self.screen.note("Ctrl-D or /exit leaves.")
                continue
            except EOFError:
                return 0
            self.screen.bracket_pastes()  # what comes before the next prompt is its draft
            try:
                self.handle(typed)
            except Leave:
                return 0
            except BrokenPipeError:
                drop_output()
                return CLOSED_PIPE

    def go(self, session: lmchat.SessionApi, *, begun: bool = False) -> None:
        """Implements `ChatContext.go`."""
        self.used = [s for s in self.used if s.name != session.name] + [session]
        self._begun += [session] if begun else []
        self.session = session

    def forget(self, name: str) -> None:
        """Implements `ChatContext.forget`."""
        self.used = [session for session in self.used if session.name != name]

    def confirm(self, question: str) -> bool:
        """Implements `ChatContext.confirm`."""
        return self._input.confirm(question)

    def handle(self, typed: str) -> None:
        """Runs a command or answers a message. Errors are printed, and the chat continues.

        Args:
            typed: The line that the user sent.

        Raises:
            Leave: The user leaves the chat.
            BrokenPipeError: The reader of stdout closed the pipe.
        """
        text, is_shown = typed.strip(), False
        try:
            if text.startswith("/"):
                command = self._wait_for(lambda: slash_commands.run(self, text))
                is_shown = command.name in slash_commands.SHOWING
                if not is_shown:
                    self._note_other_turns()  # the command may have loaded some
            elif text.strip(QUOTES).strip():
                self._send(unquote(typed))
                is_shown = True
        except (Leave, BrokenPipeError):
            raise
        except (SessionBusy, StoreError) as error:
            self.fail(error)
            if not text.startswith("/") and can_prefill():
                self.next_text = typed  # offer the unsent message again
        except Error as error:
            self.fail(error)
        except Exception as error:  # a bug must not end the chat
            say(traceback.format_exc(), sys.stderr)
            self.fail(error)
        self._record_seen(is_shown)

    def _send(self, typed: str) -> None:
        """Sends a message, with the files that wait for it."""
        message = joined(typed, self.files)
        try:
            if self.answer(lambda: self.session.stream(message), again=quote(typed)):
                self.files = []
        finally:
            if self.files:
                names = ", ".join(clean(file.name) for file in self.files)
                self.screen.note(f"the next message carries {names}; /file off removes it")

    def answer(self, start: StartReply, before: str = "", again: str = "") -> bool:
        """Implements `ChatContext.answer`. Raises the errors that occur before the first token."""
        queue: SimpleQueue[object] = SimpleQueue()
        over = threading.Event()
        arguments = (start, queue, over)
        pump = threading.Thread(target=_pump, args=arguments, name="lmchat-reply", daemon=True)
        view = self._view(before)
        with self.screen.live_part(), self.interrupts.to(queue):
            start_thread(pump, "a reply")
            reply = self._follow(queue, view, over)
        pump.join()
        is_offered = bool(again) and is_withdrawn(reply) and can_prefill()
        self._show_status(reply, is_offered)
        if is_offered:
            self.next_text = again
        return not is_withdrawn(reply)

    def fail(self, error: BaseException) -> None:
        """Prints an error in one line. Raises Leave if the engine is closed."""
        message = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        if isinstance(error, ContextFull):
            older = self.session.overflow == "refuse" and users(self.session)
            message += f"; {ROOM if older else 'send less, or lower max_new_tokens'}"
        elif isinstance(error, SessionBusy):
            message += f"; {FORK}"
        self.screen.note(f"error: {clean(message)}", "red")
        if isinstance(error, EngineClosed):
            raise Leave

    def _greet(self, chosen: Choice) -> None:
        if self.about is None:
            self.screen.facts((f"{clean(self.name)} answers", *KEYS))
        else:
            self.screen.note(self.about)
            self.screen.facts(KEYS)
        if self.engine.template_info.kind == "none":
            self.screen.note("The model has no chat template: it continues the text that you type.")
        if self.private:
            self.screen.note("This chat is not stored.")
        if self._input.warning:
            self.screen.note(self._input.warning)
        if chosen.note:
            self.screen.note(clean(chosen.note))
        if chosen.found:
            views.resumed(self)
        elif chosen.name is not None:
            self.screen.note(f"session {chosen.name} begins")

    def _wait_for(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which may ask the server.

        Raises:
            GivenUp: Ctrl-C ended it. With an engine of this process Ctrl-C does not.
        """
        if self.server is None:
            return work()
        try:
            with self.interrupts.raising():
                return work()
        except KeyboardInterrupt:
            raise GivenUp(
                f"no answer from {self.server.url} before Ctrl-C; what was asked may still be done "
                "there"
            ) from None

    def _prompt(self) -> str:
        if len(self.used) == 1:
            return "> "
        room = max(LEAST_NAME, self.screen.size.columns // 3)  # the rest is for typing
        return f"{short(self.session.name, room)}> "

    def _prefetch(self) -> None:
        """Prefetches the session's KV cache when the user starts to type."""
        thread = threading.Thread(
            target=_prefetch, args=(self.session,), name="lmchat-prefetch", daemon=True
        )
        with contextlib.suppress(InternalError):  # the turn itself fetches
            start_thread(thread, "a prefetch")

    def _record_seen(self, is_shown: bool = True) -> None:
        """Records the turns that the session has now; `is_shown`: the screen shows the last one."""
        self._known = {(turn.role, turn.text) for turn in self.session.turns}
        if is_shown:
            self._place = self._where()

    def _where(self) -> list[tuple[int, str]]:
        return [(turn.id, turn.text) for turn in self.session.turns]

    def is_seen(self) -> bool:
        """Implements `ChatContext.is_seen`: no command changes a turn of another process unseen."""
        self.session.refresh()
        if self._where() == self._place:
            return True
        self.screen.note("not done: the conversation was continued elsewhere and now ends with:")
        views.place(self)
        return False

    def _drop_empty(self) -> None:
        """Deletes the sessions that this chat created and that are still empty."""
        for session in self._begun:
            drop_if_empty(session)

    def _view(self, before: str) -> View:
        if self._is_plain:
            return PlainView(self.screen, sys.stdout, show_reasoning=self.show_reasoning)
        return MarkdownView(self.screen, show_reasoning=self.show_reasoning, before=before)

    def _follow(self, queue: SimpleQueue[object], view: View, over: threading.Event) -> Reply:
        """Shows the events of the queue until the reply has ended, and returns the reply.

        Sets `over` at the end.

        Raises:
            GivenUp: The server did not answer after Ctrl-C.
        """
        stopper: threading.Thread | None = None
        try:
            for item in _items(queue, view):
                if isinstance(item, Delta):
                    if item.text:
                        view.delta(item.kind, item.text)
                elif isinstance(item, Progress):
                    view.progress(item.done, item.total)
                elif item is Signal.STOP and stopper is None:
                    stopper = self._begin_stop(queue, over)
                elif item is Signal.SUSPEND:
                    self.screen.suspend()
                    view.touch()
                elif item is Signal.RESIZE:
                    view.touch()
                elif isinstance(item, Reply):
                    return item
                elif isinstance(item, BaseException):
                    raise item
            raise AssertionError("the events never end")
        except GivenUp:
            stopper = None  # it waits for the server too
            raise
        finally:
            over.set()
            if stopper is not None:
                stopper.join(self._patience.stop)
            view.finish()

    def _begin_stop(self, queue: SimpleQueue[object], over: threading.Event) -> threading.Thread:
        """Starts to stop the reply, and the time after which it is given up."""
        stopper = threading.Thread(target=_stop, args=(self.session, over), daemon=True)
        stopper.start()
        if self.server is not None and self._patience.stop is not None:
            error = GivenUp(
                f"no answer from {self.server.url} to Ctrl-C; the reply may still go on there, and "
                "is stored as far as it comes"
            )
            timer = threading.Timer(self._patience.stop, queue.put, (error,))
            timer.daemon = True
            timer.start()
        return stopper

    def _show_status(self, reply: Reply, is_offered: bool) -> None:
        """Prints the notices and the status line after a reply. `is_offered`: the next input line
        asks again."""
        for notice in reply.notices:
            self.screen.note(clean(notice))
        self._note_other_turns(reply.turn)
        length, most = self.session.length, self.engine.max_context
        if reply.error is not None:
            self.fail(reply.error)
        elif why := ending(reply, length, most, self.session.overflow):
            self.screen.note(f"{why}; Enter asks again" if is_offered else why)
        self.screen.facts(usage_parts(reply, length, most))
        self.screen.print(Text())

    def _note_other_turns(self, reply: lmchat.Turn | None = None) -> None:
        """Prints the number of turns that another process added, before `reply` if it is given."""
        ours = {reply.id, reply.parent} if reply else set()
        came = [
            turn
            for turn in self.session.turns
            if turn.id not in ours and (turn.role, turn.text) not in self._known
        ]
        if came:
            count = counted(len(came), "message")
            before = " before this" if reply else ""
            self.screen.note(f"{count} came from elsewhere{before}; /show all lists them")


def _prefetch(session: lmchat.SessionApi) -> None:
    with contextlib.suppress(Exception):  # the turn itself raises any error
        session.warm()


def _stop(session: lmchat.SessionApi, over: threading.Event) -> None:
    """Stops the session's reply, also one that has not started yet."""
    while not over.is_set():
        with contextlib.suppress(Error):  # the reply itself reports a server that is gone
            session.stop()
        over.wait(STOP_EVERY)


def _pump(start: StartReply, queue: SimpleQueue[object], over: threading.Event) -> None:
    """Puts the events of a stream in a queue: the main thread paints and handles signals.

    A reply that starts when nobody waits for it any more (`over`) is stopped.
    """
    try:
        with start() as stream:
            if over.is_set():
                return
            for event in stream.events():
                queue.put(event)
            queue.put(stream.reply)
    except BaseException as error:
        queue.put(error)


def _items(queue: SimpleQueue[object], view: View) -> Iterator[object]:
    """Yields the events of the queue and repaints the view between them when it is due."""
    while True:
        try:
            item = queue.get(timeout=view.refresh())
        except Empty:
            continue
        yield item
