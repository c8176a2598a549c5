"""`EngineApi`: the names of an engine, and the verbs that every kind of engine has alike."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime  # noqa: F401 - a hint of SessionInfo, which is evaluated here
from typing import Any, NoReturn, Protocol

from typing_extensions import Unpack

from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import GenerationApi, Reading, ReplyStream
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.state import State
from lmchat.generation.ticket import QueueStats
from lmchat.interface.session import SessionApi
from lmchat.store.records import Summary
from lmchat.text.template_class import TemplateInfo
from turbomind import Residence, Stats
from turbomind.closing import Closing


@dataclass(frozen=True)
class SessionInfo(Summary):
    """One session in a list.

    `state` is its activity in this process; `busy` names another process that generates in it.
    `turns` counts user turns, `tokens` those of the transcript.
    """

    state: State = State.CLOSED


class TokenizerApi(Protocol):
    """A model's tokenizer, of this process or of a server."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, in which spellings of special tokens are these."""

    def raw(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` with the special tokens spelled out."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each of `ids` inside a text, special tokens spelled out."""


class ModelFacts(Protocol):
    """Properties of a model that any engine tells."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of one token over all layers, without padding."""

    @property
    def weights_text(self) -> str:
        """Formats of the matrices, such as "int8 and bfloat16"."""

    @property
    def kv_dtype(self) -> str:
        """Format of the KV cache."""


class EngineApi(Closing, ABC):
    """A model and its sessions, in this process (`ChatEngine`) or behind a server (`RemoteEngine`),
    for any number of threads.

    A context manager, which closes it. An `owner` of None is "local" here, and behind a server the
    one that the API key names; it can be no other there. Behind a server, every method that asks it
    may raise Unreachable too.
    """

    def __init__(self) -> None:
        self._reading = Reading()

    # --- sessions --------------------------------------------------------------------------------

    @abstractmethod
    def session(
        self,
        name: str | None = None,
        *,
        system: str | None = None,
        owner: str | None = None,
        history: str | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        overflow: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionApi:
        """Opens the owner's session `name`, or creates it.

        An existing session takes the arguments that are given, except `system`:
        `SessionApi.set_system()` changes that.

        Args:
            name: the name; None: a new session with a generated name.
            system: the system prompt of a new session.
            owner: the owner. Pages are shared only within an owner.
            history: the rule for earlier turns that the template would change, "append" or
                "template"; None: `template_info.default_history`.
            settings: generation settings for all turns.
            template_variables: variables that the template gets beside the messages.
            overflow: "refuse" or "drop" if a turn does not fit the context, see
                `SessionApi.set_overflow()`. Default of a new session: "refuse".
            tags: the tags.
            metadata: texts by key, see `SessionApi.set_metadata()`.

        Raises:
            InvalidRequest: an argument is out of range, or `system` differs from that of an
                existing session.
        """

    @abstractmethod
    def session_by_name(self, name: str, *, owner: str | None = None) -> SessionApi:
        """Opens the owner's session of this name, and creates none.

        Raises:
            NotFound: the owner has no such session.
        """

    @abstractmethod
    def session_by_id(self, session_id: str, *, owner: str | None = None) -> SessionApi:
        """Opens the owner's session of this id.

        Raises:
            NotFound: the owner has no such session.
        """

    @abstractmethod
    def sessions(
        self,
        owner: str | None = None,
        *,
        search: str | None = None,
        tag: str | None = None,
        hidden: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[SessionInfo]:
        """Lists the sessions, all or an owner's, without reading their turns.

        The last used comes first; with `search`, the best match.

        Args:
            owner: None: all owners; behind a server that of the API key.
            search: words of messages, titles and names; a word that ends with `*` is a prefix.
            tag: only sessions with this tag.
            hidden: whether the list has sessions with the tag "responses", which the server's
                Responses API made. With `tag` it has them in any case.
            limit: most entries; None: all.
            after: id of the last session of the page before, for lists in pages. A session that is
                used between two pages moves to the front, so the next page lacks it. All others
                stay in their order; if it is `after` itself, they come again.

        Raises:
            NotFound: there is no session of the id `after`, or a search does not find it.
        """

    @abstractmethod
    def count_sessions(self, owner: str | None = None) -> int:
        """Returns the number of an owner's sessions, those of the Responses API included."""

    @abstractmethod
    def residences(self, sessions: Iterable[Any]) -> list[Residence]:
        """Returns `SessionApi.residence` of many sessions of this engine, here with one request to
        the core."""

    @abstractmethod
    def predicted_ttfts(self, sessions: Iterable[Any], new_tokens: int = 32) -> list[float]:
        """Returns `SessionApi.predicted_ttft()` of many sessions of this engine, here with one
        request to the core."""

    @abstractmethod
    def delete(self, name: str, owner: str | None = None) -> None:
        """Stops and deletes a session, and frees pages on disk that no other session of its owner
        has.

        Raises:
            NotFound: the owner has no such session.
        """

    @abstractmethod
    def import_(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        owner: str | None = None,
        pages: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> SessionApi:
        """Imports a session that `SessionApi.export()` wrote, with its KV if the file has it.

        Args:
            path: the file, on this machine.
            name: name of the new session; None: the name it had.
            owner: owner of the new session.
            pages: whether KV in the file is used. Nothing can prove that it belongs to the tokens,
                so a server uses it only if it was started with `--import-pages`.
            notify: called with a sentence about each thing that is left out.

        Raises:
            InvalidRequest: the file is not valid, or the name is taken.
        """

    # --- without a session -----------------------------------------------------------------------

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply:
        """Generates a reply to messages, without a session, and waits for its end.

        Nothing is stored. Replies of this engine that come back in `messages` keep their tokens,
        and a conversation that extends or branches from a recent one computes only its new tokens.
        Texts that spell special tokens stay text.

        Args:
            messages: mappings with "role", "content" (a text) and what else the template reads,
                such as "reasoning_content" and "name". Roles and their order are the template's.
            owner: the owner. Replies and KV are shared only within an owner.
            template_variables: variables that the template gets beside the messages.
            continue_final_message: True: the last message is an assistant's, and the reply
                continues it. `Reply.text` has the new text only.
            settings: see `StatelessSettings`.

        Raises:
            InvalidRequest: an argument is out of range, or the template refuses the messages.
            ContextFull: the messages fill the context.
            Overloaded: the queue is full.
        """
        with self._reading:
            begun = self.start_chat(
                messages,
                owner=owner,
                template_variables=template_variables,
                continue_final_message=continue_final_message,
                **settings,
            )
            return ReplyStream(begun).result()

    def stream_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> ReplyStream:
        """Generates a reply to messages as `chat()` does, and returns its stream."""
        with self._reading:
            begun = self.start_chat(
                messages,
                owner=owner,
                template_variables=template_variables,
                continue_final_message=continue_final_message,
                **settings,
            )
            return ReplyStream(begun)

    @abstractmethod
    def start_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> GenerationApi:
        """Starts `chat()` and returns its generation without waiting."""

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> Reply:
        """Continues a text or token ids, without a template and without a session.

        Spellings of special tokens in a text become these tokens here, unlike in a session.

        Args:
            prompt: a text or token ids.
            owner: the owner. Pages are shared only within an owner.
            settings: see `StatelessSettings`. With `n`, `Reply.others` has the choices after the
                first one.

        Raises:
            InvalidRequest: an argument is out of range.
            ContextFull: the prompt is longer than the context.
            Overloaded: the queue is full.
        """
        with self._reading:
            return ReplyStream(self.start_generate(prompt, owner=owner, **settings)).result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> ReplyStream:
        """Continues a prompt as `generate()` does, and returns its stream."""
        with self._reading:
            return ReplyStream(self.start_generate(prompt, owner=owner, **settings))

    @abstractmethod
    def start_generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> GenerationApi:
        """Starts `generate()` and returns its generation without waiting."""

    @abstractmethod
    def score(self, prompt: str | Iterable[int], *, owner: str | None = None) -> list[float]:
        """Returns the log-probability of each token after the first, given the tokens before it.

        Args:
            prompt: a text or token ids.
            owner: the owner. Pages are shared only within an owner.

        Raises:
            InvalidRequest: an argument is out of range.
            ContextFull: the prompt is longer than the context.
            Overloaded: the queue is full.
        """

    @abstractmethod
    def chat_token_ids(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the prompt of messages as token ids, as `chat()` would compute it now. It may be
        longer than the context.

        Args:
            messages: as in `chat()`.
            owner: as in `chat()`; replies of its conversations keep their tokens.
            template_variables: as in `chat()`.
            continue_final_message: as in `chat()`.
            add_generation_prompt: whether the header of the next reply ends the prompt. False: the
                last message may be a reply.

        Raises:
            InvalidRequest: an argument is out of range, or the template refuses the messages.
        """

    # --- properties ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def tokenizer(self) -> TokenizerApi:
        """The model's tokenizer."""

    @property
    @abstractmethod
    def template_info(self) -> TemplateInfo:
        """Kind of the model's chat template, and the rules that follow from it."""

    @property
    @abstractmethod
    def model_settings(self) -> dict[str, Any]:
        """Generation settings of the model's own configuration."""

    @property
    @abstractmethod
    def model(self) -> str:
        """Name of the model in lists of sessions: a folder's path, a hub name, or "memo". Behind a
        server it has no path."""

    @property
    @abstractmethod
    def info(self) -> ModelFacts:
        """Properties of the model."""

    @property
    @abstractmethod
    def device(self) -> str:
        """Device that computes: "cpu", "cuda:0", or "cuda:0,1" for the GPU of each rank."""

    @property
    @abstractmethod
    def threads(self) -> int | None:
        """Number of threads that compute on the CPU. None: an older server does not tell."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Largest length of a conversation, in tokens."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests that wait for a slot of the batch."""

    @abstractmethod
    def stats(self) -> Stats:
        """Returns the engine's counters."""

    @abstractmethod
    def queue_stats(self) -> QueueStats:
        """Returns the counters of the queue before the engine. Never waits for the engine."""

    @abstractmethod
    def session_states(self) -> dict[State, int]:
        """Returns the number of open sessions in each state."""

    @abstractmethod
    def close(self) -> None:
        """Stops all generations of this process and stores their tokens. Idempotent."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: make another one")
