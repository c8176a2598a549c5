"""The verbs of a `ChatEngine` that need no session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, overload

from typing_extensions import Unpack

from lmchat.conversations.conversations import Conversations
from lmchat.generation import settings as settings_module
from lmchat.generation.generation import Generation, Reply, ReplyStream
from lmchat.generation.room import within
from lmchat.generation.scoring import Scoring
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.stateless import StatelessGeneration
from lmchat.sessions.runtime import Runtime
from lmchat.store.protocol import check_text
from turbomind import Engine
from turbomind.params import token_id_list, wrong


class StatelessVerbs:
    """Chat, completion and scoring without a session. Nothing of them is stored."""

    core: Engine
    _runtime: Runtime
    _conversations: Conversations
    _running: set[Generation | Scoring]

    def _check_open(self) -> None:
        raise NotImplementedError

    # --- messages --------------------------------------------------------------------------------

    @overload
    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: Literal[False] = False,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply: ...
    @overload
    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: Literal[True],
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> ReplyStream: ...
    @overload
    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: bool,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply | ReplyStream: ...
    def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply | ReplyStream:
        """Generates a reply to messages, without a session.

        Nothing is stored. Replies of this engine that come back in `messages` keep their tokens,
        and a conversation that extends or branches from a recent one computes only its new tokens.
        Texts that spell special tokens stay text.

        Args:
            messages: mappings with "role", "content" (a text) and what else the template reads,
                such as "reasoning_content" and "name". Roles and their order are the template's.
            owner: the owner. Replies and KV are shared only within an owner.
            stream: whether to return a stream instead of waiting for the end.
            template_variables: variables that the template gets beside the messages.
            continue_final_message: True: the last message is an assistant's, and the reply
                continues it. `Reply.text` has the new text only.
            settings: see `StatelessSettings`.

        Raises:
            InvalidRequest: an argument is out of range, or the template refuses the messages.
            ContextFull: the messages fill the context.
            Overloaded: the queue is full.
        """
        request = self._conversations.generation(
            *self._checked(messages, owner, template_variables, continue_final_message),
            settings,
            self._begins,
            self._running.discard,
        )
        replies = ReplyStream(request.generation)
        try:
            request.enter()
            return replies if stream else replies.result()
        except KeyboardInterrupt:
            request.generation.cancel()
            raise

    def start_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Generation:
        """Starts `chat()` and returns its generation without waiting."""
        request = self._conversations.generation(
            *self._checked(messages, owner, template_variables, continue_final_message),
            settings,
            self._begins,
            self._running.discard,
        )
        request.enter()
        return request.generation

    def chat_token_ids(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
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
        given = self._checked(messages, owner, template_variables, continue_final_message)
        if not isinstance(add_generation_prompt, bool):
            raise wrong("add_generation_prompt", add_generation_prompt, "True or False")
        prompt, _ = self._conversations.prompt(*given, add_generation_prompt, any_length=True)
        return prompt.token_ids

    def _checked(
        self,
        messages: Iterable[Mapping[str, Any]],
        owner: str,
        template_variables: Mapping[str, Any] | None,
        continued: bool,
    ) -> tuple[Iterable[Mapping[str, Any]], str, Mapping[str, Any] | None, bool]:
        check_text("owner", owner)
        self._check_open()
        if not isinstance(continued, bool):
            raise wrong("continue_final_message", continued, "True or False")
        return messages, owner, template_variables, continued

    # --- prompts ---------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
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
        request = self._stateless(prompt, owner, settings)
        replies = ReplyStream(request.generation)
        try:
            request.enter()
            return replies.result()
        except KeyboardInterrupt:
            request.generation.cancel()
            raise

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> ReplyStream:
        """Continues a prompt as `generate()` does, and returns its stream."""
        request = self._stateless(prompt, owner, settings)
        replies = ReplyStream(request.generation)
        request.enter()
        return replies

    def start_generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> Generation:
        """Starts `generate()` and returns its generation without waiting."""
        request = self._stateless(prompt, owner, settings)
        request.enter()
        return request.generation

    def _stateless(
        self, prompt: str | Iterable[int], owner: str, settings: StatelessSettings
    ) -> StatelessGeneration:
        check_text("owner", owner)
        self._check_open()
        ids = self._ids(prompt)
        if not ids:
            raise wrong("prompt", prompt, "at least one token", seen="empty")
        effective = settings_module.merge(
            settings, {}, self._runtime.model_settings, stateless=True, vocab=self.core.vocab_size
        )
        effective = within(effective, len(ids), self.core.max_context, "the prompt")
        return StatelessGeneration(
            self._runtime, ids, effective, owner, self._begins, self._running.discard
        )

    def _begins(self, generation: Generation) -> None:
        self._running.add(generation)  # before the check: `close()` sees it, or the check raises
        self._check_open()

    def score(self, prompt: str | Iterable[int], *, owner: str = "local") -> list[float]:
        """Returns the log-probability of each token after the first, given the tokens before it.

        Args:
            prompt: a text or token ids.
            owner: the owner. Pages are shared only within an owner.

        Raises:
            InvalidRequest: an argument is out of range.
            ContextFull: the prompt is longer than the context.
            Overloaded: the queue is full.
        """
        scoring = self.start_score(prompt, owner=owner)
        try:
            return scoring.result()
        except KeyboardInterrupt:
            scoring.cancel()
            raise

    def start_score(self, prompt: str | Iterable[int], *, owner: str = "local") -> Scoring:
        """Starts `score()` and returns without waiting."""
        check_text("owner", owner)
        self._check_open()
        scoring = Scoring(
            self._runtime, self._ids(prompt), owner, self._score_begins, self._running.discard
        )
        scoring.enter()
        return scoring

    def _score_begins(self, scoring: Scoring) -> None:
        self._running.add(scoring)
        self._check_open()

    def _ids(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str):
            self._runtime.check_fits(prompt)
            return self._runtime.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise wrong("prompt", prompt, "a string or token ids")
        return token_id_list(prompt, self.core.vocab_size, "prompt")
