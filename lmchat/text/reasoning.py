"""Reasoning markers of models, and the template variables that switch reasoning.

A reply can hold a reasoning block between two markers. Which markers a model writes is read from
its chat template, else from the tokens its tokenizer has for them; nothing else announces them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around a reasoning block.

    `open` begins it and `close` ends it. `skip` are headers of the visible text after the block
    (or of a reply without one) that are not shown. Newlines next to any of these belong to the
    format, not to the text.
    """

    open: str
    close: str
    skip: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Returns whether a reply to `prompt` starts inside a reasoning block."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Returns whether `prompt` ends with a finished block, so that the reply has none."""
        return prompt.rstrip().endswith(self.close)


@dataclass(frozen=True)
class ThinkingSwitch:
    """A template variable that turns reasoning `on` and `off`."""

    variable: str
    on: bool | int | str
    off: bool | int | str


_HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
)

# The marker that gives a format away in a template, and the format. Templates often spell `close`
# alone, where they cut the reasoning of earlier turns. Special formats come before the common one:
# their templates may mention `</think>` in passing.
_FORMATS = (
    ("<|channel|>analysis", _HARMONY),
    ("<|channel>thought", ReasoningFormat("<|channel>thought", "<channel|>")),
    (
        "<|END_THINKING|>",
        ReasoningFormat(
            "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|START_TEXT|>")
        ),
    ),
    ("</seed:think>", ReasoningFormat("<seed:think>", "</seed:think>")),
    ("[/THINK]", ReasoningFormat("[THINK]", "[/THINK]")),
    ("<|inner_suffix|>", ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>")),
    (
        "Here are my reasoning steps:",
        ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    ("</think>", ReasoningFormat("<think>", "</think>", ("<response>",))),
    ("</thinking>", ReasoningFormat("<thinking>", "</thinking>", ("[BEGIN FINAL RESPONSE]",))),
)

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message from which templates read the reasoning of a reply."""

SWITCHES = (
    ThinkingSwitch("enable_thinking", True, False),
    ThinkingSwitch("thinking", True, False),
    ThinkingSwitch("reasoning", True, False),
    ThinkingSwitch("reasoning_effort", "high", "none"),
    ThinkingSwitch("reasoning_effort", "high", "low"),
    ThinkingSwitch("thinking_budget", -1, 0),
)
"""Candidates, the better first: the first one that changes a rendering is a template's switch."""


def reasoning_format(source: str, added_texts: Collection[str] = ()) -> ReasoningFormat | None:
    """Returns the format that a template's `source` spells.

    Otherwise the format whose markers are both among the tokenizer's `added_texts`, or None.
    """
    for sign, form in _FORMATS:
        if sign in source:
            return form
    for _, form in _FORMATS:
        if form.open in added_texts and form.close in added_texts:
            return form
    if {"<|channel|>", "<|message|>", "<|start|>", "<|end|>"} <= set(added_texts):
        return _HARMONY
    return None
