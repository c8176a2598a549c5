"""`lmchat chat`: a plain read-print loop on one engine handle, which keeps its KV."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Annotated, Any

import typer

from lmchat.sampling import sampling_defaults
from lmchat.template import ChatTemplate
from lmchat.tokenizer import IncrementalDetokenizer, Tokenizer
from turbomind import Engine
from turbomind.errors import InvalidRequest

from .options import Model, with_engine_options


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@with_engine_options
def command(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest reply. [default: to the end of the context]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: greedy. [default: the model's]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="[default: the model's]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0: all. [default: the model's]")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="[default: a new one each reply]")] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Chat: one line in, one reply out, until the input ends.

    Replies go to stdout, prompts and notes to stderr. Ctrl-C stops a reply, Ctrl-D leaves. A model
    without a chat template continues the text that is typed.

    \b
    Examples:
      lmchat chat ./Qwen2.5-0.5B-Instruct
      lmchat chat ./model --system "Answer in one sentence." --temperature 0.7 --seed 1
      echo "Once upon a time" | lmchat chat ./stories --max-new-tokens 200
    """
    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    with Engine(model, **engine) as core:
        folder = core.info.folder
        template = ChatTemplate.from_folder(folder)
        if template is None and system is not None:
            raise InvalidRequest("--system: this model has no chat template, so no place for one")
        tokenizer = Tokenizer.from_folder(folder)
        chat: Completion = (
            Completion(core, tokenizer)
            if template is None
            else Conversation(core, tokenizer, template, system)
        )
        sampling = sampling_defaults(core.info.generation_defaults)
        sampling |= {name: value for name, value in given.items() if value is not None}
        _loop(chat, sampling)


def _loop(chat: Completion, sampling: dict[str, Any]) -> None:
    for file in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):  # what is no text of the locale shows as U+FFFD, "?"
            file.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    if interactive:
        _note("Ctrl-C stops a reply, Ctrl-D leaves.")
    while True:
        try:
            if interactive:
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            if not interactive:
                raise
            _note("")  # drops the half-typed line
            continue
        if not line:
            return
        try:
            for text in chat.reply(line.rstrip("\n"), sampling):
                print(text, end="", flush=True)
        except InvalidRequest as error:  # this round cannot be served; the ones before it stand
            _note(f"lmchat: {error}")
            continue
        print(flush=True)


class Completion:
    """Rounds without a template: each line continues the text before it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.handle = engine.open()

    def reply(self, line: str, sampling: dict[str, Any]) -> Iterator[str]:
        """Yields the reply's text as it comes. An error takes the whole round back."""
        start = self.handle.length
        ids = self.tokenizer.encode(line, add_special_tokens=start == 0)
        try:
            if ids:
                self.handle.append(ids)
            yield from self._generate(self.tokenizer.stream(context=ids), sampling, [])
        except InvalidRequest:
            self.handle.truncate(start)
            raise

    def _generate(
        self,
        detokenizer: IncrementalDetokenizer,
        sampling: dict[str, Any],
        produced: list[int],
    ) -> Iterator[str]:
        stream = self.handle.generate(**sampling)
        with _on_interrupt(stream.cancel):
            for event in stream:
                if event.error is not None:
                    raise event.error
                produced.extend(event.token_ids)
                yield detokenizer.push(event.token_ids)
        yield detokenizer.flush()
        if self.handle.length >= self.engine.max_context:
            _note(f"lmchat: the context of {self.engine.max_context} tokens is full")


class Conversation(Completion):
    """Rounds of a chat model. Only the text that the template adds to the past is computed."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate, system: str | None
    ) -> None:
        super().__init__(engine, tokenizer)
        self.template = template
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.rendered = ""  # the text of what the handle holds

    def reply(self, line: str, sampling: dict[str, Any]) -> Iterator[str]:
        """Yields the reply's text as it comes. An error takes the whole round back."""
        messages = [*self.messages, {"role": "user", "content": line}]
        text = self.template.render(messages)
        past = self.handle.token_ids
        self._continue_with(text, past)
        produced: list[int] = []
        try:
            yield from self._generate(self.tokenizer.stream(), sampling, produced)
        except InvalidRequest:
            self.handle.truncate(0)
            self.handle.append(past)
            raise
        content = self.tokenizer.decode(produced)
        self.messages = [*messages, {"role": "assistant", "content": content}]
        self.rendered = text + self.tokenizer.decode(produced, skip_special_tokens=False)

    def _continue_with(self, text: str, past: list[int]) -> None:
        """Makes the handle hold `text`."""
        if text.startswith(self.rendered):
            suffix = text[len(self.rendered) :]
            self.handle.append(self.tokenizer.encode(suffix, add_special_tokens=False))
            return
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        common = 0
        while common < min(len(ids), len(past)) and ids[common] == past[common]:
            common += 1
        if common < len(past):
            _note(
                "lmchat: the chat template rewrites earlier rounds: "
                f"{len(past) - common} of {len(past)} tokens are replaced"
            )
        self.handle.truncate(common)
        self.handle.append(ids[common:])


@contextlib.contextmanager
def _on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `action` instead of raising, so that a reply ends with its last event."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        action()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
