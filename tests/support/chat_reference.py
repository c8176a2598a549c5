"""Computes the tokens of a session without any of its code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import tokenizers

STOP = "<|im_end|>"


@dataclass
class Conversation:
    """The transcript of a ChatML conversation, built step by step."""

    backend: tokenizers.Tokenizer
    ids: list[int] = field(default_factory=list)
    begun: bool = False
    ends_with_stop: bool = False
    dropped: bool = False

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def user(self, text: str, system: str | None = None) -> None:
        head = ""
        if not self.begun and system is not None:
            head = f"<|im_start|>system\n{system}{STOP}\n"
        if self.begun:
            head = "\n" if self.ends_with_stop else f"{STOP}\n"
        if self.dropped:
            self.ids.pop()
            self.dropped = False
        text = f"{head}<|im_start|>user\n{text}{STOP}\n<|im_start|>assistant\n"
        self.ids += self.encode(text)
        self.begun = True

    def reply(self, ids: list[int]) -> None:
        """Adds a reply. An end token that the template does not spell is not part of it."""
        end, other = self.encode(STOP)[0], self.encode("<|endoftext|>")[0]
        self.ends_with_stop = ids[-1:] == [end]
        self.dropped = ids[-1:] == [other]
        self.ids += ids

    def copy(self) -> Conversation:
        return replace(self, ids=list(self.ids))


def common(one: list[int], other: list[int]) -> int:
    """Returns the length of the common prefix."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)


class Computed:
    """The token sequences whose KV a session has computed."""

    def __init__(self, known: list[list[int]] | None = None) -> None:
        self.known = list(known or [])

    def new_tokens(self, prompt: list[int]) -> int:
        """Returns how many tokens of a prompt are computed: at least one, for its logits."""
        return max(1, self.missing(prompt))

    def missing(self, ids: list[int]) -> int:
        """Returns how many tokens at the end of `ids` have no KV."""
        return len(ids) - max((common(ids, seen) for seen in self.known), default=0)

    def add(self, prompt: list[int], reply: list[int]) -> None:
        """Adds a turn. The last token of a reply is sampled, and its KV is not computed yet."""
        self.known.append([*prompt, *reply][: max(len(prompt), len(prompt) + len(reply) - 1)])
