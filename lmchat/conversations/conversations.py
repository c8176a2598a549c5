"""Chat without a session: from messages to a generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from lmchat.conversations.chat_generation import ChatGeneration
from lmchat.conversations.handle_pool import HandlePool
from lmchat.conversations.known_replies import KnownReplies
from lmchat.conversations.messages import Recognized, check_messages, recognized
from lmchat.errors import InvalidRequest
from lmchat.generation import settings as settings_module
from lmchat.generation.generation import Generation
from lmchat.generation.room import within
from lmchat.page_size import PAGE_TOKENS
from lmchat.store.protocol import check_mapping
from lmchat.text.conversation import Conversation, Prompt
from lmchat.text.scene import texts
from turbomind.params import about

if TYPE_CHECKING:
    from lmchat.sessions.runtime import Runtime


class Conversations:
    """The recent conversations of one engine. Any thread may call it.

    Args:
        runtime: the engine and its threads.
        reuse: whether replies and KV of conversations are kept.
    """

    def __init__(self, runtime: Runtime, reuse: bool) -> None:
        self._runtime = runtime
        self._replies: KnownReplies | None = None
        self._pool: HandlePool | None = None
        if reuse:
            self._replies = KnownReplies()
            pages = max(group.total for group in runtime.core.stats().groups)  # of whole sequences
            self._pool = HandlePool(runtime.core, pages * PAGE_TOKENS)

    def prompt(
        self,
        messages: Iterable[Mapping[str, Any]],
        owner: str,
        template_variables: Mapping[str, Any] | None,
        continued: bool,
        generation_prompt: bool = True,
        any_length: bool = False,
    ) -> tuple[Prompt, Recognized]:
        """Returns the prompt of messages, and the conversation with its known replies.

        Raises:
            InvalidRequest: the messages are no conversation, or the template refuses them.
            ContextFull: no context holds them, unless they may have `any_length`.
        """
        found = check_messages(messages, continued=continued, prompts=generation_prompt)
        if not any_length:
            self._runtime.check_fits(*texts(found))
        variables = check_mapping("template_variables", template_variables)
        given = Conversation(
            found,
            [None] * len(found),
            {name: value for name, value in variables.items() if value is not None},
            None,
            generation_prompt,
            continued,
        )
        builder, now = self._runtime.builder, datetime.now(timezone.utc).astimezone()
        asked = recognized(given, self._replies, owner, builder.reasoning, now)
        try:
            return builder.conversation(asked.conversation), asked
        except InvalidRequest as error:
            if error.param is None:
                about("messages", error)
            raise

    def generation(
        self,
        messages: Iterable[Mapping[str, Any]],
        owner: str,
        template_variables: Mapping[str, Any] | None,
        continued: bool,
        settings: Mapping[str, Any],
        begins: Callable[[Generation], None],
        ended: Callable[[Generation], None],
    ) -> ChatGeneration:
        """Returns the generation of a reply to messages. It has not been queued.

        Raises:
            InvalidRequest: an argument is out of range, or the template refuses the messages.
            ContextFull: the messages fill the context.
        """
        started = time.perf_counter()
        effective = settings_module.merge(
            settings,
            {},
            self._runtime.model_settings,
            stateless=True,
            vocab=self._runtime.core.vocab_size,
        )
        prompt, asked = self.prompt(messages, owner, template_variables, continued)
        length, context = len(prompt.token_ids), self._runtime.core.max_context
        effective = within(effective, length, context, "the messages")
        made = ChatGeneration(
            self._runtime,
            prompt,
            asked,
            effective,
            owner,
            self._replies,
            self._pool,
            begins,
            ended,
        )
        made.generation.clock.called = started
        return made

    def close(self) -> None:
        """Closes the handles."""
        if self._pool is not None:
            self._pool.close()
