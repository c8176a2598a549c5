"""Groups of commands that say what to type instead of a command that they do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer.core

from turbomind.near import nearest

_MODELS = "there is no list of models: a model is a folder, a GGUF file or a hub name"
_GONE = "the files of a model are deleted as any others, those of hub names with hf cache"

HINTS = {
    "run": "lmchat chat MODEL chats with a model, lmchat serve MODEL serves it",
    "pull": "lmchat chat MODEL downloads the model of a hub name when it is first used",
    "list": f"lmchat sessions list lists the sessions; {_MODELS}",
    "models": f"{_MODELS}; lmchat info MODEL describes one",
    "rm": f"lmchat sessions rm NAME deletes a session; {_GONE}",
    "show": "lmchat info MODEL describes a model, lmchat sessions show NAME a session",
    "ps": "lmchat deploy status shows the servers of a deployment",
    "stop": "Ctrl-C ends a server, lmchat deploy stop a deployment",
    "help": "lmchat --help lists the commands",
    "version": "lmchat --version prints the version",
}
"""What `lmchat` has instead of commands of other programs."""

HINTS |= {"ls": HINTS["list"], "download": HINTS["pull"], "start": HINTS["run"]}

SESSION_HINTS = {
    "ls": "lmchat sessions list lists the sessions",
    "delete": "lmchat sessions rm NAME deletes a session",
    "remove": "lmchat sessions rm NAME deletes a session",
    "copy": "lmchat sessions fork NAME copies a session",
    "mv": "lmchat sessions rename NAME NEW renames a session",
    "run": "lmchat chat --session NAME continues a session",
}
"""What `lmchat sessions` has instead of commands that it does not have."""


class CommandGroup(typer.core.TyperGroup):
    """A group that answers an unknown command with a hint or the nearest command."""

    hints: Mapping[str, str] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Returns the command; an unknown one ends the process with exit code 2."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            hint = self.hints.get(name.lower())
            near = nearest(name, self.commands)
            if hint is None:
                hint = f"did you mean {near!r}?" if near else f"{ctx.command_path} --help lists all"
            ctx.fail(f"No such command {name!r}; {hint}.".replace("?.", "?"))
        return super().resolve_command(ctx, args)


class RootGroup(CommandGroup):
    """The commands of `lmchat`."""

    hints = HINTS


class SessionsGroup(CommandGroup):
    """The commands of `lmchat sessions`."""

    hints = SESSION_HINTS
