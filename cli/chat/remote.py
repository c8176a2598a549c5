"""The engine of `lmchat chat --url`, and the choice of one of its sessions."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmchat.errors import Error, InvalidRequest, NotFound
from lmchat.store.protocol import check_name

from .session_choice import NO_STORE, Choice, existing

if TYPE_CHECKING:
    import lmchat

KEY_VARIABLE = "LMCHAT_API_KEY"


@dataclass(frozen=True)
class Server:
    """The server of a chat.

    Attributes:
        url: Its address.
        api_key: The key; None: it needs none.
    """

    url: str
    api_key: str | None = None

    @classmethod
    def of(
        cls,
        url: str | None,
        api_key: str | None,
        *,
        model: str | None,
        private: bool,
        engine: Mapping[str, Any],
    ) -> Server | None:
        """Returns the server that the options name, or None.

        Args:
            url: --url.
            api_key: --api-key.
            model: MODEL.
            private: --no-store.
            engine: The given engine options.

        Raises:
            InvalidRequest: Options are given that a server decides.
        """
        if url is None:
            if api_key is not None:
                raise InvalidRequest("--api-key is given without --url, expected both")
            return None
        options = ["--" + name.replace("_", "-") for name in engine]
        decided = [*(["MODEL"] if model is not None else ()), *options]
        if decided:
            raise InvalidRequest(f"--url and {decided[0]} are given: the server has the model")
        if private:
            raise InvalidRequest(f"--url and {NO_STORE} are given: the server stores its sessions")
        return cls(url, api_key or _key_of(os.environ.get(KEY_VARIABLE, "")))

    def connect(self) -> lmchat.EngineApi:
        """Returns the server's engine.

        Raises:
            Unreachable: The server does not answer.
        """
        import lmchat

        return lmchat.connect(self.url, self.api_key)

    def command(self, session: str) -> str:
        """Returns the command line that continues a session."""
        return f"lmchat chat --url {shlex.quote(self.url)} --session {shlex.quote(session)}"


def _key_of(text: str) -> str | None:
    """Returns the key in [NAME:]KEY, the form that the server reads; None if there is none."""
    name, colon, key = text.partition(":")
    return (key if colon else name) or None


def choose_remote(engine: lmchat.EngineApi, name: str | None, latest: bool) -> Choice:
    """Chooses the session of a server for the options of the command line.

    Args:
        engine: The server's engine.
        name: Name given with --session.
        latest: --continue was given.

    Raises:
        InvalidRequest: The options contradict each other, or the name is invalid.
    """
    if name is not None and latest:
        raise InvalidRequest("--session and --continue are given, expected one")
    if name is not None:
        check_name(name)
        return _named(engine, name)
    if not latest:
        return Choice(None)
    for info in engine.sessions():
        if info.turns or _has_something(engine, info.name):
            return _named(engine, info.name)
    return Choice(None, note="there is no session to continue: a new one starts")


def _named(engine: lmchat.EngineApi, name: str) -> Choice:
    try:
        return existing(engine.session_by_name(name))
    except NotFound:
        return Choice(None, name)


def _has_something(engine: lmchat.EngineApi, name: str) -> bool:
    """Returns whether the session has any question, also one on an inactive branch."""
    try:
        session = engine.session_by_name(name)
        return bool(session.unanswered or session.branches(0))
    except Error:  # deleted or damaged
        return False
