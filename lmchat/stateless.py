"""The verbs of a `ChatEngine` that need no session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import Unpack, override

from lmchat.conversations.conversations import Conversations
from lmchat.generation import settings as settings_module
from lmchat.generation.generation import Generation
from lmchat.generation.room import within
from lmchat.generation.scoring import Scoring
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.stateless import StatelessGeneration
from lmchat.interface.engine import EngineApi
from lmchat.sessions.runtime import Runtime
from lmchat.store.protocol import check_text
from lmchat.store.records import LOCAL_OWNER
from turbomind import Engine
from turbomind.params import token_id_list, wrong


class StatelessVerbs(EngineApi):
    """Chat, completion and scoring without a session. Nothing of them is stored."""

    core: Engine
    _runtime: Runtime
    _conversations: Conversations
    _running: set[Generation | Scoring]

    def _check_open(self) -> None:
        raise NotImplementedError

    def _owner_of(self, given: str | None) -> str:
        """Returns the owner that an argument names."""
        if given is None:
            return LOCAL_OWNER
        check_text("owner", given)
        return given

    # --- messages --------------------------------------------------------------------------------

    @override
    def start_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Generation:
        return self._started(
            self._conversations.generation(
                *self._checked(messages, owner, template_variables, continue_final_message),
                settings,
                self._begins,
                self._running.discard,
            )
        )

    def _started(self, request: StatelessGeneration) -> Generation:
        self._reading.begins(lambda _: request.generation.cancel())
        request.enter()
        return request.generation

    @override
    def chat_token_ids(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        given = self._checked(messages, owner, template_variables, continue_final_message)
        if not isinstance(add_generation_prompt, bool):
            raise wrong("add_generation_prompt", add_generation_prompt, "True or False")
        prompt, _ = self._conversations.prompt(*given, add_generation_prompt, any_length=True)
        return prompt.token_ids

    def _checked(
        self,
        messages: Iterable[Mapping[str, Any]],
        owner: str | None,
        template_variables: Mapping[str, Any] | None,
        continued: bool,
    ) -> tuple[Iterable[Mapping[str, Any]], str, Mapping[str, Any] | None, bool]:
        owner = self._owner_of(owner)
        self._check_open()
        if not isinstance(continued, bool):
            raise wrong("continue_final_message", continued, "True or False")
        return messages, owner, template_variables, continued

    # --- prompts ---------------------------------------------------------------------------------

    @override
    def start_generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> Generation:
        owner = self._owner_of(owner)
        self._check_open()
        ids = self._ids(prompt)
        if not ids:
            raise wrong("prompt", prompt, "at least one token", seen="empty")
        effective = settings_module.merge(
            settings, {}, self._runtime.model_settings, stateless=True, vocab=self.core.vocab_size
        )
        effective = within(effective, len(ids), self.core.max_context, "the prompt")
        return self._started(
            StatelessGeneration(
                self._runtime, ids, effective, owner, self._begins, self._running.discard
            )
        )

    def _begins(self, generation: Generation) -> None:
        self._running.add(generation)  # before the check: `close()` sees it, or the check raises
        self._check_open()

    @override
    def score(self, prompt: str | Iterable[int], *, owner: str | None = None) -> list[float]:
        scoring = self.start_score(prompt, owner=owner)
        try:
            return scoring.result()
        except KeyboardInterrupt:
            scoring.cancel()
            raise

    def start_score(self, prompt: str | Iterable[int], *, owner: str | None = None) -> Scoring:
        """Starts `score()` and returns without waiting."""
        owner = self._owner_of(owner)
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
