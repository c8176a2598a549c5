"""The chat in a terminal: reads what is typed, shows what comes, obeys commands and Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from rich.text import Text

from lmchat.errors import ContextFull, EngineClosed, Error, SessionBusy, StoreError
from lmchat.generation.generation import Delta, Progress, Reply

from ..errors import CLOSED_PIPE, drop_output
from ..terminal.interrupts import Interrupts, Signal
from ..terminal.layout import short
from ..terminal.line_input import QUOTES, LineInput, can_prefill, unquote
from ..terminal.screen import Screen
from ..terminal.texts import clean, counted
from . import slash_commands, views
from .actions import users
from .context import Leave, StartReply
from .reply_status import FORK, ROOM, ending, usage_parts
from .reply_view import MarkdownView, PlainView, View
from .session_choice import NEW, Choice, drop_if_empty

if TYPE_CHECKING:
    import lmchat

LEAST_NAME = 8  # columns of a session's name before what is typed
STOP_EVERY = 0.02  # seconds between two tries to stop what has not begun yet
KEYS = ("Alt-Enter new line", "Ctrl-C stop", "Ctrl-D leave", "/help")


class Repl:
    """One person's chat: the terminal, and the current session of an engine with the model `name`.

    `about`, where given, is what the chat says of the model first, in a line of its own. The answer
    goes to stdout; where that is no terminal everything else goes to stderr. `plain` shows the text
    of replies as it is, without Markdown. Of a `private` chat nothing is kept.
    """

    def __init__(
        self,
        engine: lmchat.ChatEngine,
        session: lmchat.Session,
        *,
        name: str,
        about: str | None = None,
        plain: bool = False,
        private: bool = False,
    ) -> None:
        self.name = name
        self.about = about
        self.engine = engine
        self.session = session
        self.private = private
        to_stdout = sys.stdout.isatty()
        self.screen = Screen(sys.stdout if to_stdout else sys.stderr, plain=plain)
        self.show_reasoning = True
        self.next_text = ""  # what the next prompt begins with
        self.interrupts = Interrupts()
        self._is_plain = self.screen.plain or not to_stdout
        self.used = [session]  # in this chat
        self._begun: list[lmchat.Session] = []  # by this chat, without a name of the person's
        self._known: set[tuple[str, str]] = set()  # messages that the person could have seen
        self._place: list[tuple[int, str]] = []  # where they saw the conversation last
        self._input = LineInput(
            lambda text: slash_commands.complete(self, text),
            self._warm,
            to_stderr=not to_stdout,
            private=private,
        )

    def run(self, chosen: Choice = NEW) -> int:
        """Until the person leaves; returns the exit code. `chosen` says what the session is."""
        if chosen.name is None:
            self._begun.append(self.session)
        try:
            with self.interrupts, self.screen.taken():
                self._greet(chosen)
                return self._obey()
        finally:
            self._drop_empty()

    def _obey(self) -> int:
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
            try:
                self.handle(typed)
            except Leave:
                return 0
            except BrokenPipeError:
                drop_output()
                return CLOSED_PIPE

    def go(self, session: lmchat.Session, *, begun: bool = False) -> None:
        """Makes it the current one. `begun`: here and now, under a name that nobody chose."""
        self.used = [s for s in self.used if s.name != session.name] + [session]
        self._begun += [session] if begun else []
        self.session = session

    def forget(self, name: str) -> None:
        """The session of that name is gone."""
        self.used = [session for session in self.used if session.name != name]

    def confirm(self, question: str) -> bool:
        """Whether the person says yes."""
        return self._input.confirm(question)

    def handle(self, typed: str) -> None:
        """Obeys a command or answers a message. Whatever goes wrong is told, and the chat goes on.

        Raises Leave, and BrokenPipeError when nobody reads the answers any more.
        """
        text, is_shown = typed.strip(), False
        try:
            if text.startswith("/"):
                is_shown = slash_commands.run(self, text).name in slash_commands.SHOWING
                if not is_shown:
                    self._tell_of_others()  # which it may have come across
            elif text.strip(QUOTES).strip():
                message = unquote(typed)
                self.answer(lambda: self.session.stream(message))
                is_shown = True
        except (Leave, BrokenPipeError):
            raise
        except (SessionBusy, StoreError) as error:
            self.fail(error)
            if not text.startswith("/") and can_prefill():
                self.next_text = typed  # nothing came of it
        except Error as error:
            self.fail(error)
        except Exception as error:  # a bug of ours must not take the conversations with it
            traceback.print_exc()
            self.fail(error)
        self._look(is_shown)

    def answer(self, start: StartReply, before: str = "") -> None:
        """Shows the reply that `start` begins. `before`: what is on the screen of it already.

        Raises what the generation raises before its first token.
        """
        queue: SimpleQueue[object] = SimpleQueue()
        pump = threading.Thread(target=_pump, args=(start, queue), name="lmchat-reply", daemon=True)
        view = self._view(before)
        with self.screen.live_part(), self.interrupts.to(queue):
            pump.start()
            reply = self._follow(queue, view)
        pump.join()
        self._tell(reply)

    def fail(self, error: BaseException) -> None:
        """Tells of an error in one line."""
        words = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        if isinstance(error, ContextFull):
            older = self.session.overflow == "refuse" and users(self.session)  # else dropped
            words += f"; {ROOM if older else 'send less, or lower max_new_tokens'}"
        elif isinstance(error, SessionBusy):
            words += f"; {FORK}"
        self.screen.note(f"error: {clean(words)}", "red")
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
        self._look()

    def _prompt(self) -> str:
        if len(self.used) == 1:
            return "> "
        room = max(LEAST_NAME, self.screen.size.columns // 3)  # what is typed needs the rest
        return f"{short(self.session.name, room)}> "

    def _warm(self) -> None:
        """The person begins to type: what the next turn needs is brought up meanwhile."""
        threading.Thread(
            target=_warm, args=(self.session,), name="lmchat-warm", daemon=True
        ).start()

    def _look(self, is_shown: bool = True) -> None:
        """The person may know what the session holds now; `is_shown`: and has seen its end."""
        self._known = {(turn.role, turn.text) for turn in self.session.turns}
        if is_shown:
            self._place = self._where()

    def _where(self) -> list[tuple[int, str]]:
        return [(turn.id, turn.text) for turn in self.session.turns]

    def is_seen(self) -> bool:
        """Whether the conversation is where the person saw it last. Where another terminal has gone
        on with it that is told, so that nothing is done to a question that nobody saw here."""
        self.session.refresh()
        if self._where() == self._place:
            return True
        self.screen.note("not done: the conversation was continued elsewhere and now ends with:")
        views.place(self)
        return False

    def _drop_empty(self) -> None:
        """Sessions that were begun here and in which nothing was asked are not kept."""
        for session in self._begun:
            drop_if_empty(session)

    def _view(self, before: str) -> View:
        if self._is_plain:
            return PlainView(self.screen, sys.stdout, show_reasoning=self.show_reasoning)
        return MarkdownView(self.screen, show_reasoning=self.show_reasoning, before=before)

    def _follow(self, queue: SimpleQueue[object], view: View) -> Reply:
        """Shows what comes through the queue until the reply has ended."""
        ended = threading.Event()
        stopper: threading.Thread | None = None
        try:
            for item in _items(queue, view):
                if isinstance(item, Delta):
                    view.delta(item.kind, item.text)
                elif isinstance(item, Progress):
                    view.progress(item.done, item.total)
                elif item is Signal.STOP and stopper is None:
                    stopper = threading.Thread(target=self._stop, args=(ended,), daemon=True)
                    stopper.start()
                elif item is Signal.SUSPEND:
                    self.screen.suspend()
                    view.touch()
                elif item is Signal.RESIZE:
                    view.touch()
                elif isinstance(item, Reply):
                    return item
                elif isinstance(item, BaseException):
                    raise item
            raise AssertionError("the items never end")
        finally:
            ended.set()
            if stopper is not None:
                stopper.join()
            view.finish()

    def _stop(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self.session.stop()
            ended.wait(STOP_EVERY)

    def _tell(self, reply: Reply) -> None:
        """The dim lines after a reply."""
        for notice in reply.notices:
            self.screen.note(clean(notice))
        self._tell_of_others(reply.turn)
        length, most = self.session.length, self.engine.max_context
        if reply.error is not None:
            self.fail(reply.error)
        elif why := ending(reply, length, most):
            self.screen.note(why)
        self.screen.facts(usage_parts(reply, length, most))
        self.screen.print(Text())

    def _tell_of_others(self, reply: lmchat.Turn | None = None) -> None:
        """Turns that came from elsewhere, before this reply if there is one: from another terminal,
        say."""
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


def _warm(session: lmchat.Session) -> None:
    with contextlib.suppress(Exception):  # the turn itself tells what is wrong
        session.warm()


def _pump(start: StartReply, queue: SimpleQueue[object]) -> None:
    """Reads the stream on a thread of its own, so that the main one can paint and hear Ctrl-C."""
    try:
        with start() as stream:
            for event in stream.events():
                queue.put(event)
            queue.put(stream.reply)
    except BaseException as error:
        queue.put(error)


def _items(queue: SimpleQueue[object], view: View) -> Iterator[object]:
    """What comes, with the view painted in between when it is time."""
    while True:
        try:
            item = queue.get(timeout=view.refresh())
        except Empty:
            continue
        yield item
