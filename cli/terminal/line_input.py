"""Line input with history, several lines, an editor and completion, on prompt_toolkit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import stat
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, get_app, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.utils import is_dumb_terminal

from lmchat.errors import Error, StoreError
from lmchat.store.temporary import use_temporary_folder

from ..errors import note
from .escapes import takes_escapes
from .key_parser import with_key_parser
from .texts import clean

QUOTES = '"""'
MENU_ROWS = 5  # rows reserved under the prompt for completions
_BLOCK = re.compile(r'\s*(/\S+\s+(-?\d+\s+)?)?"""')
_SUFFIX = ".md"

Complete = Callable[[str], Iterable[tuple[str, int, str]]]
"""Maps the text before the cursor to (text, start relative to the cursor, meaning)."""


def state_folder() -> Path:
    """Returns the folder of the input history: $LMCHAT_HOME, else the platform's state folder.

    Raises:
        RuntimeError: There is no home directory.
    """
    if given := os.environ.get("LMCHAT_HOME"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "lmchat"


def unquote(text: str) -> str:
    '''Removes surrounding """ and empty lines at the ends.'''
    text = text.strip("\n").rstrip()
    if not text.lstrip().startswith(QUOTES):
        return text
    return text.lstrip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def quote(text: str) -> str:
    """Returns the line that sends `text`, quoted where it would be read as a command."""
    as_it_is = text == text.strip() and not text.startswith(("/", QUOTES))
    return text if as_it_is else f"{QUOTES}{text}{QUOTES}"


def can_prefill() -> bool:
    """Returns whether the input line can start with a text; a dumb terminal hides it."""
    return sys.stdin.isatty() and not is_dumb_terminal()


class LineInput:
    """Reads lines at the prompt.

    Enter sends the line, except in a block that starts with three quotes; Alt-Enter, Shift-Enter
    and Ctrl-Enter start a new line, Ctrl-R searches the history, Ctrl-X Ctrl-E opens the editor.

    Args:
        complete: Returns completions.
        begins: Called when the user starts to type at a prompt; it must not block.
        to_stderr: Show the prompt on stderr instead of stdout.
        private: Store no history.
        asks: `complete` may wait for a server. It is called on another thread, and keys that are
            typed meanwhile take effect.
    """

    def __init__(
        self,
        complete: Complete,
        begins: Callable[[], None] = lambda: None,
        *,
        to_stderr: bool = False,
        private: bool = False,
        asks: bool = False,
    ) -> None:
        self.warning = ""  # the reason if there is no history
        self._begins = begins
        self._has_begun = False
        self._file = sys.stderr if to_stderr else sys.stdout
        self._session = self._prompts(
            history=InMemoryHistory() if private else self._history(),
            completer=(_AskingCompleter if asks else _Completer)(complete),
            complete_while_typing=Condition(self._is_command),
            multiline=True,
            prompt_continuation=_continuation,
            key_bindings=_bindings(),
            enable_suspend=True,
            tempfile_suffix=_SUFFIX,
            reserve_space_for_menu=MENU_ROWS,
        )
        self._session.default_buffer.on_text_changed += self._changed

    def read(self, prompt: str, text: str = "") -> str:
        """Reads a line.

        Args:
            prompt: Text before the cursor.
            text: Text that the line starts with.

        Raises:
            KeyboardInterrupt: Ctrl-C on an empty line.
            EOFError: Ctrl-D on an empty line.
        """
        self._has_begun = False
        typed = self._session.prompt(FormattedText([("bold", clean(prompt))]), default=text)
        return typed.encode(errors="surrogateescape").decode(errors="replace")

    def confirm(self, question: str) -> bool:
        """Returns whether the answer is yes; Enter alone, Ctrl-C and Ctrl-D mean no."""
        asked = self._prompts(history=InMemoryHistory())
        try:
            answer = asked.prompt(FormattedText([("bold", f"{clean(question)} [y/N] ")]))
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in ("y", "yes")

    def _prompts(self, **options: Any) -> PromptSession[str]:
        """Returns a reader of lines; on a terminal without escape sequences one that writes none.

        That is prompt_toolkit's for dumb terminals, which it takes if no output is given to it.
        """
        if takes_escapes(self._file):
            keys = with_key_parser(create_input())
            return PromptSession(input=keys, output=create_output(self._file), **options)
        with create_app_session(output=PlainTextOutput(self._file)):
            return PromptSession(**options)

    def _changed(self, _buffer: object) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begins()

    def _is_command(self) -> bool:
        return self._session.default_buffer.text.startswith("/")

    def _history(self) -> History:
        try:
            path = state_folder() / "history"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_writable_file(path):
                return InMemoryHistory()
        except RuntimeError:
            self.warning = "no input history: there is no home directory; set LMCHAT_HOME"
            return InMemoryHistory()
        except OSError as error:
            self.warning = f"no input history: {error}"
            return InMemoryHistory()
        return _SafeHistory(str(path))


def _is_writable_file(path: Path) -> bool:
    """Creates the history's file, private to its user, and returns whether it keeps lines.

    The target of a link is a file of the user's, whose mode stays as it is. A device, such as the
    null device, keeps nothing.

    Raises:
        OSError: It cannot be written.
    """
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NONBLOCK  # a pipe must not wait
    descriptor = os.open(path, flags, 0o600)
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if is_file and not path.is_symlink():
            os.fchmod(descriptor, 0o600)
        return is_file
    finally:
        os.close(descriptor)


class _SafeHistory(FileHistory):
    """Accepts invalid Unicode, and ignores a full disk."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string.encode(errors="replace").decode())


class _Completer(Completer):
    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        if document.text.startswith("/") and "\n" not in document.text:
            for text, start, meaning in self._complete(document.text_before_cursor):
                yield Completion(text, start, display_meta=meaning)


class _AskingCompleter(_Completer):
    """Completes on another thread, and completes nothing where that fails.

    It is a daemon, unlike those of prompt_toolkit: the end of the prompt does not wait for it.
    """

    async def get_completions_async(
        self, document: Document, event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        """Yields the completions once all are there."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[list[Completion]] = loop.create_future()

        def done(found: list[Completion]) -> None:
            if not ready.done():  # the prompt may have ended
                ready.set_result(found)

        def ask() -> None:
            found: list[Completion] = []
            with contextlib.suppress(Error):
                found = list(self.get_completions(document, event))
            with contextlib.suppress(RuntimeError):  # the loop of the prompt is closed
                loop.call_soon_threadsafe(done, found)

        threading.Thread(target=ask, name="lmchat-complete", daemon=True).start()
        for completion in await ready:
            yield completion


def _continuation(width: int, _line: int, _wrapped: int) -> FormattedText:
    return FormattedText([("", " " * width)])


def _bindings() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not in a history search

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _BLOCK.match(buffer.text) and buffer.text.count(QUOTES) % 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    @keys.add("escape", "c-j", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-x", "c-e", filter=typing)
    def _(event: KeyPressEvent) -> None:
        try:
            use_temporary_folder()  # the editor's file is there
        except StoreError as error:
            run_in_terminal(functools.partial(note, error))
        else:
            event.current_buffer.open_in_editor(validate_and_handle=True)

    @keys.add("c-d", filter=typing & Condition(lambda: not get_app().current_buffer.text))
    def _(event: KeyPressEvent) -> None:
        event.app.exit(exception=EOFError, style="class:exiting")

    @keys.add("c-c", filter=typing)
    @keys.add(Keys.SIGINT)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
