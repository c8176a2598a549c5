"""Generates chats: facts stated and asked for, small talk, questions, stories, system prompts.

`Composer(seed)` makes chats to train on, `Composer(seed, held_out=True)` chats about values that no
fact of those has. Names and words among them occur nowhere in those; a number may occur in a
street, a price or a code. The lines are in the files of `text/`.

Not here: real dialogues (`training.corpora`), tokens (`training.tokenizer`), and the questions of
the evaluation (`training.evaluation`).
"""

from training.grammar.chats import Chat, Check, Fact
from training.grammar.composer import Composer
from training.grammar.values import Values, is_held_out

__all__ = ["Chat", "Check", "Composer", "Fact", "Values", "is_held_out"]
