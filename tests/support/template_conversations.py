"""Conversations under real chat templates, with replies as their models write them."""

import re
import shutil
from dataclasses import dataclass, field
from functools import cache

import tokenizers
from assets import asset, tokenizer_folder

from lmchat.store.turns import Turn, transcript
from lmchat.text.prompt import PromptBuilder
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.errors import InvalidRequest

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
SYSTEM = "Answer in one line."
TALK = [
    ("What is 2 + 2?", "It is 4, of course.", "Two and two make four."),
    ("naïve 你好 🦙?\nTwo lines.", "Llamas:\n\n1. 🦙\n2. Vicuña", "They want animals, so a list."),
    ("Thanks, bye", "", ""),
]
# Spellings of the special tokens that templates use.
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<[|][a-z]+>|<[a-z]+[|]>|</?[a-z_:]{1,24}>|\[/?[A-Za-z_]{2,24}\]"
)
# Ordinary text for many of the models whose templates spell it.
_PLAIN = {"[INST]", "[/INST]", "<tools>", "</tools>", "<response>", "</response>"}


def template_names():
    return sorted(path.stem for path in asset("chat_templates/jinja").glob("*.jinja"))


@cache
def template_named(name):
    source = asset(f"chat_templates/jinja/{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, TOKENS)


def tokenizer_text(name, scratch):
    """Returns the `tokenizer.json` of a real tokenizer."""
    if name == "mistral":
        model = asset("tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3")
        shutil.copy(model, scratch / "tokenizer.model")
        return Tokenizer.from_folder(scratch)._backend.to_str()
    return (tokenizer_folder(name, scratch) / "tokenizer.json").read_text(encoding="utf-8")


@cache
def special_texts():
    """Returns the spellings in the templates that are special tokens of their models, and apart
    from them the markers of reasoning, which tokenizers have as ordinary added tokens."""
    shown = set()
    for name in template_names():
        template = template_named(name)
        messages = [{"role": "system", "content": "s"}]
        for question, answer, thought in TALK:
            for last in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer, "reasoning_content": thought},
            ):
                messages.append(last)
                for start in (0, 1):
                    for prompt in (True, False):
                        text = rendered(template, messages[start:], prompt=prompt) or ""
                        shown |= set(_SPECIAL.findall(text))
    marks = {text for text in shown if "think" in text.lower()}
    return sorted(shown - marks - _PLAIN), sorted(marks | {"</think>"})


_HARMONY = {"<|channel|>", "<|message|>", "<|start|>"}


def tokenizer_for(name, scratch, harmony):
    """Returns a real tokenizer that has all these tokens. Those of gpt-oss are optional, because
    its reasoning would be recognised everywhere."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_text(name, scratch))
    special, marks = (
        [
            tokenizers.AddedToken(text, normalized=False)
            for text in texts
            if harmony or text not in _HARMONY
        ]
        for texts in special_texts()
    )
    backend.add_special_tokens(special)
    backend.add_tokens(marks)
    return Tokenizer(backend)


def natural_reply(talk, answer, thought):
    """Returns the reply that a model trained on the template writes.

    It is the text that the template shows in place of the reply, up to the end of the answer;
    otherwise the answer with the usual line breaks. Returns None if the prompt does not allow the
    model to reason, or not to reason.
    """
    builder, template = talk.builder, talk.template
    marks = builder.reasoning
    prompt = rendered(template, talk.messages, **talk.variables)
    if marks and (marks.closed_by(prompt) if thought else marks.opened_by(prompt)):
        return None
    raw = answer
    if thought:
        begun = "" if marks.opened_by(prompt) else f"{marks.open}\n"
        raw = f"{begun}{thought}\n{marks.close}\n\n{answer}"
    messages = [*talk.messages, builder.reply_message(answer, thought, raw)]
    shown = rendered(template, messages, prompt=False, **talk.variables) or ""
    if shown.startswith(prompt) and answer in shown and thought in shown:
        return shown[len(prompt) : shown.rindex(answer) + len(answer)]
    if raw == answer and not prompt[-1:].isspace():
        messages.append({"role": "user", "content": "next"})
        head = (rendered(template, messages, **talk.variables) or "").rpartition(answer)[0]
        return head[len(head.rstrip()) :] + answer
    return raw


QUESTION = {"role": "user", "content": "next"}


def reply_ids(talk, raw, answer):
    """Returns the reply's ids in an encoding of the next prompt in one piece, the number of ids
    before the answer, and the first token after the reply. If that prompt has other tokens before
    the reply, the text before the answer and the answer are encoded one after the other."""
    tokens = talk.tokenizer
    answered = talk.builder.reply_message(answer, "", raw)
    text = rendered(talk.template, [*talk.messages, answered, QUESTION], **talk.variables)
    suffix = text[text.rindex(answer) + len(answer) :]
    stop = tokens.encode(suffix, add_special_tokens=False)[0]
    stop = stop if stop in tokens.special_ids else tokens.special_texts["</s>"]
    whole = tokens.encode(text, add_special_tokens=False)
    before = talk.ids
    end = tokens.encode(text[: len(text) - len(suffix)], add_special_tokens=False)
    if whole[: len(end)] == end and end[: len(before)] == before:
        return end[len(before) :], 0, stop
    head = tokens.encode_after(tokens.raw(before[-24:]), raw.removesuffix(answer))
    body = tokens.encode_after(tokens.raw([*before, *head][-24:]), answer)
    return head + body, len(head), stop


def header_of(talk):
    """Returns the text that the template puts before a reply."""
    begun, ended = (
        rendered(talk.template, [QUESTION], prompt=prompt, **talk.variables)
        for prompt in (True, False)
    )
    return begun.removeprefix(ended)


def rendered(template, messages, *, prompt=True, **variables):
    """Returns the rendering, or None if the template refuses the messages."""
    try:
        return template.render(messages, add_generation_prompt=prompt, **variables)
    except InvalidRequest:
        return None


@dataclass
class Talk:
    """A minimal session: turns with tokens, by the builder's rules."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    history: str
    builder: PromptBuilder
    variables: dict = field(default_factory=dict)
    path: list = field(default_factory=list)

    @property
    def messages(self):
        return [turn.message for turn in self.path]

    @property
    def ids(self):
        return transcript(self.path)

    def system(self, text):
        message = {"role": "system", "content": text}
        self.path.append(Turn(1, None, "system", text, message))

    def ask(self, text):
        made = self.builder.suffix(
            self.path, text, history=self.history, variables=self.variables, now=None
        )
        self._add("user", text, made.message, made.token_ids, made.prefix_length)
        return made

    def reply(self, ids, *, text, raw=None, reasoning="", stop=None):
        ids = list(ids)
        raw = self.tokenizer.raw(ids) if raw is None else raw
        message = self.builder.reply_message(text, reasoning, raw)
        ids += [] if stop is None else [stop]
        extra = {"reasoning": reasoning, "stopped": stop is not None}
        self._add("assistant", text, message, ids, len(self.ids), **extra)

    def _add(self, role, text, message, ids, prefix_length, **extra):
        parent = self.path[-1].id if self.path else None
        turn_id = len(self.path) + 1
        length = prefix_length + len(ids)
        self.path.append(
            Turn(turn_id, parent, role, text, message, tuple(ids), prefix_length, length, **extra)
        )
