"""The interface between the chat loop and its slash commands; it ends their import cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import lmchat

    from ..terminal.interrupts import Interrupts
    from ..terminal.screen import Screen
    from .message_files import MessageFile
    from .remote import Server

StartReply = Callable[[], "lmchat.ReplyStream"]
"""Starts the generation of a reply and returns its stream."""


class Leave(Exception):
    """The user leaves the chat."""


class ChatContext(Protocol):
    """The parts of a running chat that slash commands and views use. `Repl` implements it."""

    engine: lmchat.EngineApi
    session: lmchat.SessionApi
    """The current session."""
    screen: Screen
    interrupts: Interrupts
    name: str
    """Name of the model, as shown to the user."""
    private: bool
    """Nothing of this chat is stored."""
    server: Server | None
    """The server of the engine; None: the engine is of this process."""
    used: list[lmchat.SessionApi]
    """Sessions that were current in this chat, the current one last."""
    show_reasoning: bool
    next_text: str
    """Text that the next input line starts with."""
    files: list[MessageFile]
    """Files that the next message carries."""

    def go(self, session: lmchat.SessionApi, *, begun: bool = False) -> None:
        """Makes `session` the current one. `begun`: this chat created it under a default name."""

    def forget(self, name: str) -> None:
        """Removes a deleted session from `used`."""

    def confirm(self, question: str) -> bool:
        """Asks a yes/no question and returns whether the answer is yes."""

    def answer(self, start: StartReply, before: str = "", again: str = "") -> bool:
        """Shows the reply that `start` generates.

        Returns False if it was stopped before its first token, so that the session is as it was.

        Args:
            start: starts the reply.
            before: its text so far, already shown.
            again: the line that asks again, offered when the reply is stopped before its first
                token.
        """

    def is_seen(self) -> bool:
        """Returns whether the screen shows the session's current end; shows it otherwise."""


def _no_completions(_chat: ChatContext, _words: list[str]) -> Iterable[tuple[str, str]]:
    return ()


@dataclass(frozen=True)
class SlashCommand:
    """A command of the chat, such as /undo.

    Attributes:
        name: The word after the slash.
        arguments: Usage of the arguments, empty for none.
        help: One line for `/help` and the completion menu.
        run: Called with the chat and the text after the name.
        details: More lines for `/help NAME`.
        complete: Returns (argument, meaning) pairs for the words before the one being typed.
        table: Rows of (value, meaning) for `/help NAME`.
        takes_all: The argument may contain spaces.
        aliases: Other names.
    """

    name: str
    arguments: str
    help: str
    run: Callable[[ChatContext, str], None]
    details: str = ""
    complete: Callable[[ChatContext, list[str]], Iterable[tuple[str, str]]] = _no_completions
    table: Mapping[str, str] = field(default_factory=dict)
    takes_all: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """The command as it is typed, such as `/edit [N] [TEXT]`."""
        return f"/{self.name} {self.arguments}".rstrip()

    @property
    def summary(self) -> str:
        """`help`, and the other names of the command."""
        names = ", ".join(f"/{name}" for name in self.aliases)
        return f"{self.help} (also {names})" if names else self.help
