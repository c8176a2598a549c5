"""`SessionApi`: the names of a session, and the verbs that every kind of session has alike."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from typing_extensions import Unpack

from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower, GenerationApi, Reading, ReplyStream
from lmchat.generation.settings import GenerationSettings
from lmchat.interface.session_facts import SessionFacts
from lmchat.store.records import Exported
from lmchat.store.turns import Turn
from turbomind.closing import Closing


@dataclass(frozen=True)
class Branch:
    """A branch of the conversation at a user turn. `leaf` is the last turn of its newest
    conversation; `active` is True if the session is on it."""

    index: int
    turn: Turn
    reply: Turn
    leaf: int
    active: bool


class SessionApi(SessionFacts, Closing):
    """A conversation with its branches, in this process (`Session`) or behind a server
    (`RemoteSession`).

    Any thread may call its methods. A session generates one reply at a time: a second generation,
    and methods that would change the conversation meanwhile, raise SessionBusy. After `close()` all
    methods raise NotFound. A context manager, which closes it.

    Behind a server, every method that asks it may raise Unreachable too.
    """

    fresh = False
    """Whether this process created the session."""

    def __init__(self) -> None:
        self._reading = Reading()

    # --- generating ------------------------------------------------------------------------------

    def send(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply:
        """Generates a reply to `text` and waits for its end.

        Args:
            text: the user's message.
            template_variables: override the session's for this reply alone.
            settings: see `GenerationSettings`. They override the session's for this reply alone.

        Raises:
            SessionBusy: a reply is being generated, here or in another process.
            InvalidRequest: an argument is out of range.
            ContextFull: the turn does not fit the context.
            Overloaded: the queue is full.
            Error: the generation failed before its first token. The session is unchanged then.
        """
        with self._reading:
            begun = self.start_send(text, template_variables=template_variables, **settings)
            return ReplyStream(begun).result()

    def stream(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> ReplyStream:
        """Generates a reply to `text` as `send()` does, and returns its stream at once. Behind a
        server, a stream whose connection breaks attaches again and goes on where it was."""
        with self._reading:
            begun = self.start_send(text, template_variables=template_variables, **settings)
            return ReplyStream(begun)

    def continue_(self, **settings: Unpack[GenerationSettings]) -> Reply:
        """Extends the last reply in place, with its settings and seed. After a stop or a length
        limit the result equals an uninterrupted reply."""
        with self._reading:
            return ReplyStream(self.start_continue(**settings)).result()

    def stream_continue(self, **settings: Unpack[GenerationSettings]) -> ReplyStream:
        """Extends the last reply as `continue_()` does, and returns the stream of what is new."""
        with self._reading:
            return ReplyStream(self.start_continue(**settings))

    def retry(self, **settings: Unpack[GenerationSettings]) -> Reply:
        """Generates another reply to the last user turn, as a new branch with the next attempt."""
        with self._reading:
            return ReplyStream(self.start_retry(**settings)).result()

    def stream_retry(self, **settings: Unpack[GenerationSettings]) -> ReplyStream:
        """Generates another reply as `retry()` does, and returns its stream."""
        with self._reading:
            return ReplyStream(self.start_retry(**settings))

    def edit(self, turn: int, text: str, **settings: Unpack[GenerationSettings]) -> Reply:
        """Generates a reply to `text` in place of user turn `turn` (from 0), as a new branch."""
        with self._reading:
            return ReplyStream(self.start_edit(turn, text, **settings)).result()

    def stream_edit(
        self, turn: int, text: str, **settings: Unpack[GenerationSettings]
    ) -> ReplyStream:
        """Generates a reply as `edit()` does, and returns its stream."""
        with self._reading:
            return ReplyStream(self.start_edit(turn, text, **settings))

    @abstractmethod
    def start_send(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
        overflow: str | None = None,
        keep_question: bool = True,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> GenerationApi:
        """Starts `send()` and returns its generation without waiting.

        What `before` and `system` change is stored together with the reply. A message that is
        refused, or cancelled before the first token, leaves the conversation as it was.

        Args:
            text: the user's message.
            template_variables: as in `send()`.
            after: id of the reply that the message follows, as a new branch; None: the last one.
            before: messages between that reply and `text`, as in `append()`; an assistant's is the
                last of them.
            system: the system prompt from now on, empty for none; None: unchanged.
            overflow: `set_overflow()` for this turn alone; None: the session's.
            keep_question: whether `text` becomes `unanswered` when it is cancelled before the first
                token.
            metadata: JSON values stored with the user turn.
            settings: as in `send()`.

        Raises:
            NotFound: there is no reply `after`.
            Error: as `send()`.
        """

    @abstractmethod
    def start_continue(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> GenerationApi:
        """Starts `continue_()` and returns its generation without waiting. `metadata` are JSON
        values that are added to those of the reply."""

    @abstractmethod
    def start_retry(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> GenerationApi:
        """Starts `retry()` and returns its generation without waiting. `metadata` are JSON values
        stored with the reply."""

    @abstractmethod
    def start_edit(
        self,
        turn: int,
        text: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> GenerationApi:
        """Starts `edit()` and returns its generation without waiting. `metadata` are JSON values
        stored with the reply."""

    @property
    @abstractmethod
    def running(self) -> GenerationApi | None:
        """Current generation of this process, or None."""

    @property
    @abstractmethod
    def ending(self) -> GenerationApi | None:
        """Generation that was asked to stop and has not ended yet, or None. The next method that
        generates waits for it."""

    @abstractmethod
    def stop(self, turn: int | None = None) -> Reply | None:
        """Stops the current generation and waits until its turn is committed. Any thread may call
        it. A generation of another process stops within 0.25 s.

        All generated tokens stay. A turn that has none leaves the session as it was, with its
        question in `unanswered`; its Reply is empty and has no turn.

        Args:
            turn: stops only the reply that becomes this turn. None: any.

        Returns:
            The reply; None if nothing was being generated.
        """

    @abstractmethod
    def follow(self, turn: int | None = None) -> Follower:
        """Returns a reader of the reply that is being generated, which has all of it so far.

        The reply may be generated here or by another process; that one's tokens are read from its
        journal. Without one, the reader has the last reply, complete. Any number of readers may
        follow a reply. If the other process dies, the reply ends with `finish_reason`
        "interrupted", as `continue_()` finds it.

        Args:
            turn: only the reply that becomes, or is, this turn, of any branch. None: any.

        Raises:
            NotFound: there is no such reply, or the session is closed or was deleted.
            StoreError: the session cannot be read.
        """

    # --- the conversation ------------------------------------------------------------------------

    @abstractmethod
    def undo(self) -> str:
        """Removes the last user turn and its reply from the conversation and returns its text.

        The turn remains in `branches()`. Nothing is generated.

        Raises:
            InvalidRequest: the conversation has no user turn.
        """

    @abstractmethod
    def branches(self, turn: int) -> list[Branch]:
        """Returns the branches at user turn `turn` (from 0), oldest first.

        The number after the last turn selects the branches that `undo()` left.
        """

    @abstractmethod
    def switch(self, turn: int, index: int) -> None:
        """Switches to the newest conversation of branch `index` of `branches(turn)`."""

    @abstractmethod
    def fork(
        self,
        name: str | None = None,
        at: int | None = None,
        *,
        after: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> SessionApi:
        """Creates a session with the first `at` user turns and their replies (None: all), or with
        the conversation that ends with the reply of id `after`, which may be of another branch.

        It has the same settings and shares the pages, so nothing is computed. Works while a reply
        is being generated. `tags` are its tags; None: the same ones.
        """

    @abstractmethod
    def append(self, messages: Sequence[Mapping[str, Any]], *, system: str | None = None) -> None:
        """Appends messages to the conversation and generates nothing.

        Their text is encoded; a reply that a model generated has other token ids here than there.

        Args:
            messages: `role` and `content`: users and assistants in turn, a user first. A last user
                message without a reply becomes `unanswered`, after what that has. One with `parts`
                is several messages of these lengths, joined by empty lines; the turn's metadata
                has them.
            system: the system prompt from now on, empty for none; None: unchanged.

        Raises:
            InvalidRequest: the roles do not alternate, or the context is full.
            SessionBusy: a reply is being generated.
        """

    @abstractmethod
    def edit_reply(self, turn: int, text: str) -> None:
        """Gives user turn number `turn` (from 0) another reply, as a new branch that ends with it.

        Nothing is generated: the text is encoded. The old reply and what follows it stay as a
        branch.

        Raises:
            InvalidRequest: there is no such turn.
            ContextFull: the conversation would be longer than the context.
            SessionBusy: a reply is being generated.
        """

    @abstractmethod
    def conversation(self, reply: int) -> tuple[Turn, ...]:
        """Returns the turns up to the reply of this id, of any branch.

        Raises:
            NotFound: there is no such reply.
        """

    @abstractmethod
    def annotate(self, turn: int, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata of the turn of this id.

        Raises:
            NotFound: there is no such turn.
        """

    @abstractmethod
    def count_tokens(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
    ) -> int:
        """Returns the length of the prompt that `start_send()` would make of the same arguments, in
        tokens, also if it is longer than the context."""

    # --- its properties --------------------------------------------------------------------------

    @abstractmethod
    def _update(self, changes: Mapping[str, Any]) -> None:
        """Does what `update()` does. None is a value, which most properties refuse."""

    def update(
        self,
        *,
        title: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        history: str | None = None,
        overflow: str | None = None,
        system: str | None = None,
        pinned: bool | None = None,
    ) -> None:
        """Changes what is given in one transaction, or nothing.

        Args:
            title: as in `set_title()`.
            tags: as in `set_tags()`.
            metadata: as in `set_metadata()`.
            settings: as in `set()`.
            template_variables: as in `set_variables()`.
            history: as in `set_history()`.
            overflow: as in `set_overflow()`.
            system: as in `set_system()`, empty for none.
            pinned: as in `pin()`.

        Raises:
            InvalidRequest: a value is out of range.
            SessionBusy: `system` is given, and a reply is being generated.
        """
        given = {
            "title": title,
            "tags": tags,
            "metadata": metadata,
            "settings": settings,
            "template_variables": template_variables,
            "history": history,
            "overflow": overflow,
            "system": system,
            "pinned": pinned,
        }
        self._update({name: value for name, value in given.items() if value is not None})

    @property
    def title(self) -> str:
        """Title: the one that was set, else the start of the first user message. Setting an empty
        text restores the latter."""
        return self._shown_title()

    @title.setter
    def title(self, title: str) -> None:
        self.set_title(title)

    @abstractmethod
    def _shown_title(self) -> str: ...

    def set_title(self, title: str) -> None:
        """Sets the title; an empty text restores the start of the first user message."""
        self._update({"title": title})

    def set_tags(self, tags: Iterable[str]) -> None:
        """Replaces the tags."""
        self._update({"tags": tags})

    def set_metadata(self, metadata: Mapping[str, str]) -> None:
        """Replaces the metadata: at most 16 keys of 1 to 64 characters, and values of at most 512.

        Raises:
            InvalidRequest: the metadata is not of this form.
        """
        self._update({"metadata": metadata})

    def set(self, /, **settings: Unpack[GenerationSettings]) -> None:
        """Changes the session's generation settings; None restores the model's.

        Raises:
            InvalidRequest: a value is out of range, or no reply could use it.
        """
        self._update({"settings": settings})

    def set_variables(self, /, **variables: Any) -> None:
        """Changes template variables such as `enable_thinking`; None removes one."""
        self._update({"template_variables": variables})

    def set_history(self, history: str) -> None:
        """Changes the rule for earlier turns, "append" or "template", from the next turn on."""
        self._update({"history": history})

    def set_overflow(self, overflow: str) -> None:
        """Sets what happens if a turn does not fit the context.

        "refuse" raises ContextFull. "drop" removes the oldest turns, down to half the context, and
        adds a notice to the reply.
        """
        self._update({"overflow": overflow})

    def set_system(self, text: str | None) -> None:
        """Changes the system prompt; None or an empty text removes it. A conversation that has
        turns continues as a new branch from the root: replies have the same tokens, and the next
        turn computes all of it again.

        Raises:
            SessionBusy: a reply is being generated.
        """
        self._update({"system": "" if text is None else text})

    def pin(self, pinned: bool = True) -> None:
        """Sets whether its pages stay in memory longer than those of other idle sessions."""
        self._update({"pinned": bool(pinned)})

    @abstractmethod
    def rename(self, name: str) -> None:
        """Changes the name.

        Raises:
            InvalidRequest: another session of the owner has it.
        """

    # --- life ------------------------------------------------------------------------------------

    @abstractmethod
    def refresh(self) -> None:
        """Reads changes that others have made.

        Raises:
            NotFound: the session was deleted.
        """

    @abstractmethod
    def warm(self) -> None:
        """Starts to load the session's KV into the engine's memory before its next turn. Returns at
        once, and does nothing while a reply is being generated."""

    @abstractmethod
    def predicted_ttft(self, new_tokens: int = 32) -> float:
        """Returns an estimate of the time to first token, in seconds, of a message of `new_tokens`
        tokens sent now to an idle engine. Returns 0.0 before any measurement, and for a
        conversation of another tokenizer, whose number of tokens the next turn will show."""

    @abstractmethod
    def export(
        self,
        path: str | os.PathLike[str],
        pages: bool = False,
        *,
        force: bool = False,
        notify: Callable[[str], None] | None = None,
    ) -> Exported:
        """Writes the session to a file on this machine, which `import_()` of any engine reads.

        Args:
            path: the file.
            pages: whether the KV is written too.
            force: whether an existing file is replaced.
            notify: called with a sentence about each thing that is left out.

        Raises:
            InvalidRequest: the file exists and `force` is False.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops the generation of this process and closes the session, which `session()` of its
        engine opens again. Idempotent."""

    @abstractmethod
    def delete(self) -> None:
        """Closes and deletes the session.

        Raises:
            NotFound: it was deleted before.
        """

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: use fork()")


PROPERTIES = tuple(SessionApi.update.__kwdefaults__ or ())
"""Names of the properties that `SessionApi.update()` takes."""
