"""The rule "template": the transcript as the template renders the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmchat.errors import InvalidRequest
from lmchat.store.turns import Message, Turn, common_prefix
from lmchat.text.context_encoder import ContextEncoder
from lmchat.text.marks import Found, Marks, locate
from lmchat.text.recent import Recent
from lmchat.text.replies.reply_form import ReplyForm
from lmchat.text.replies.reply_pieces import Piece, Sought, mark_reply, pieces_of
from lmchat.text.replies.reply_tokens import ReplyTokens, Speller
from lmchat.text.scene import CANNOT_SHOW, Scene, Stage, Suffix, blank, rounds, texts
from lmchat.text.tokenizer import Tokenizer

_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class _Window:
    """The rendered part: `messages`, of which the last ones are the replies' and questions of
    `turns` and then `after` others. Only what follows the text `sign` counts, if it is set, and
    what precedes the texts `end`. Without `prompt` the header of the next reply is left out."""

    scene: Scene
    messages: list[Message]
    turns: Sequence[Turn]
    marks: Marks
    sign: str = ""
    after: int = 1
    end: tuple[str, str] | None = None
    prompt: bool = True

    def cut(self, text: str) -> str:
        """Returns the part of a rendering that counts."""
        text = text.rpartition(self.sign)[2] if self.sign else text
        if self.end is None:
            return text
        text, found, _ = text.partition(self.end[1])
        if not found:
            raise InvalidRequest(
                "the chat template does not show the reply that is to be continued"
            )
        return text.removesuffix(self.end[0])


@dataclass(frozen=True)
class _Prompt:
    """A prompt: its tokens, and where they go on after the last reply with the text `after`.

    `text` is what was rendered for it. `last` is -1 when the last reply could not be found there.
    """

    ids: list[int]
    text: str
    last: int
    after: str


@dataclass(frozen=True)
class _Made:
    """A finished prompt: its last reply ends at the token `last`.

    White space after that reply could be its own or the template's. Then `asked` is what followed
    its tokens, up to the header of the next reply.
    """

    last: int
    asked: str


class FollowRule:
    """Renders the conversation and puts the replies' own tokens into it.

    Most templates change nothing in front of the last reply but one. For those, once a prompt has
    been made by this rule, the next one renders its last two rounds only.
    """

    def __init__(
        self, tokenizer: Tokenizer, stage: Stage, encoder: ContextEncoder, form: ReplyForm
    ) -> None:
        self._stage, self._encoder, self._form = stage, encoder, form
        self._speller = Speller(tokenizer)
        self._replies: Recent[int, tuple[tuple[int, ...], ReplyTokens]] = Recent(1024)
        self._local: Recent[object, bool] = Recent()
        self._made: Recent[object, _Made] = Recent()

    def suffix(self, scene: Scene) -> Suffix:
        """Returns the suffix that turns the old transcript into the template's."""
        whole, body = scene.transcript
        prompt = self._from_last(scene) or self._from_start(scene)
        if prompt.last >= 0:
            asked = ""
            if self._tokens(scene.path[-2].token_ids, scene.path[-1]).raw[-1:].isspace():
                asked = prompt.after.removesuffix(self._stage.header(scene))
            self._made.put(self._key(scene, prompt.ids), _Made(prompt.last, asked))
        prefix_length = common_prefix(whole, prompt.ids)
        return Suffix(
            scene.question,
            prefix_length,
            prompt.ids[prefix_length:],
            max(0, len(body) - prefix_length),
        )

    def conversation(
        self,
        scene: Scene,
        marks: Marks,
        last: Sequence[Message] = (),
        *,
        end: tuple[str, str] | None = None,
        prompt: bool = True,
    ) -> list[int]:
        """Returns the tokens of a whole conversation of any roles.

        Replies of the path's role "assistant" are made of their own tokens, all else is text.

        Args:
            scene: the conversation. Its question is not looked at.
            marks: marks for all texts of the conversation.
            last: messages that follow the path, already guarded.
            end: a text that the template may put before a text in `last`, and that one. The
                conversation ends before both.
            prompt: whether the header of the next reply ends it.
        """
        messages = [
            *(self._stage.guard(t.message, marks, own=t.role == "assistant") for t in scene.path),
            *last,
        ]
        window = _Window(
            scene, messages, scene.path, marks, after=len(last), end=end, prompt=prompt
        )
        return self._compose([], window).ids

    def _from_start(self, scene: Scene) -> _Prompt:
        past = [turn.message for turn in scene.path]
        marks = Marks(texts([*past, scene.question, scene.variables]))
        messages = [self._stage.guard(message, marks) for message in [*past, scene.question]]
        return self._compose([], _Window(scene, messages, scene.path, marks))

    def _from_last(self, scene: Scene) -> _Prompt | None:
        """Returns the same from the previous prompt, or None where equality is not certain."""
        if scene.replies < 2 or not self._is_local(scene):
            return None
        old = scene.transcript[0][: scene.path[-1].prefix_length]
        made = self._made.get(self._key(scene, old))
        if made is None:
            return None
        anchor, *turns = scene.path[-3:]
        new = [*(turn.message for turn in turns), scene.question]
        marks = Marks(texts([*scene.system, *new, scene.variables]))
        sign = marks.take()
        messages = [
            *(self._stage.guard(message, marks) for message in scene.system),
            *rounds(min(scene.replies - 2, 1)),
            _QUESTION,
            blank(anchor.message, sign),
            *(self._stage.guard(message, marks) for message in new),
        ]
        prompt = self._compose(old[: made.last], _Window(scene, messages, turns, marks, sign))
        # The question before is still what follows that reply.
        return prompt if marks.without_literals(prompt.text).startswith(made.asked) else None

    def _compose(self, before: list[int], window: _Window) -> _Prompt:
        """Returns the tokens `before`, followed by those of the window."""
        text = window.cut(
            self._stage.render(window.messages, window.scene, window.marks, prompt=window.prompt)
        )
        ids, at, last = list(before), 0, -1
        literal = self._literal_places(window, text)

        def encode(start: int, end: int) -> list[int]:
            part = window.marks.around_places(text, start, end, literal)
            return self._encoder.encode(ids, part, window.marks)

        for pieces in self._pieces(window, text):
            last = -1
            for piece in pieces:
                ids += encode(at, piece.start)
                ids += piece.ids
                at, last = piece.end, len(ids)
        ids += encode(at, len(text))
        return _Prompt(ids, text, last, window.marks.without_literals(text[at:]))

    def _literal_places(self, window: _Window, text: str) -> list[Found]:
        """Returns the positions of replies' words that spell tokens of the template.

        Where a reply is not found by its own tokens, its words are encoded, and stay words.
        """
        messages, pairs = list(window.messages), list[tuple[str, str]]()
        first = len(messages) - window.after - len(window.turns)
        for i, turn in enumerate(window.turns):
            if turn.role == "assistant":
                messages[first + i], found = self._stage.mark_reply(turn.message, window.marks)
                pairs += found
        if not pairs:
            return []
        shown = window.cut(
            self._stage.render(
                messages, window.scene, window.marks, check=False, prompt=window.prompt
            )
        )
        clean, places = locate(shown, pairs)
        torn = (pair for pair, place in zip(pairs, places, strict=True) if place is None)
        if clean != text or any(mark in shown for pair in torn for mark in pair):
            raise InvalidRequest(CANNOT_SHOW)
        return sorted(filter(None, places), key=lambda place: place.start)

    def _pieces(self, window: _Window, text: str) -> list[list[Piece]]:
        """Returns for each reply the parts of the rendering that its own tokens replace."""
        turns, header = window.turns, self._stage.header(window.scene)
        replies = [
            self._tokens(turns[i - 1].token_ids if i else (), turn)
            for i, turn in enumerate(turns)
            if turn.role == "assistant"
        ]
        for all_texts in (True, False):
            messages = list(window.messages)
            first = len(messages) - window.after - len(turns)
            sought: list[list[Sought]] = []
            for i, turn in enumerate(turns):
                if turn.role == "assistant":
                    marked, found = mark_reply(turn, window.marks, all_texts=all_texts)
                    messages[first + i] = marked
                    sought.append(found)
            shown = window.cut(
                self._stage.render(
                    messages, window.scene, window.marks, check=False, prompt=window.prompt
                )
            )
            clean, places = locate(shown, [text.marks for some in sought for text in some])
            if clean == text:
                rest = iter(places)
                return [
                    pieces_of(
                        reply,
                        [(part, place) for part in some if (place := next(rest)) is not None],
                        text,
                        header,
                    )
                    for reply, some in zip(replies, sought, strict=True)
                ]
        return [[] for _ in replies]

    def _tokens(self, before: Sequence[int], reply: Turn) -> ReplyTokens:
        """Returns the reply's tokens and their text after the tokens `before`, cached."""
        known = self._replies.get(id(reply.token_ids))
        if known is None or known[0] is not reply.token_ids:
            ids = reply.token_ids[: len(reply.token_ids) - reply.stopped]
            known = (reply.token_ids, ReplyTokens(self._speller, before, ids))
            self._replies.put(id(reply.token_ids), known)
        return known[1]

    def _key(self, scene: Scene, prompt: list[int]) -> object:
        """Returns the cache key of a prompt up to its last reply, apart from `prompt`."""
        shown = tuple(message["content"] for message in scene.system)
        return hash(tuple(prompt)), len(prompt), scene.setting, shown, scene.now

    def _is_local(self, scene: Scene) -> bool:
        """Returns whether a prompt can be made from the previous one.

        The template must leave everything before the last reply but one unchanged, and what follows
        must not depend on the number of turns.
        """
        known = self._local.get(scene.setting)
        if known is None:
            plain = self._form.message("x", "", "x")
            shapes = [[plain]]
            if (marks := self._form.reasoning) is not None:
                raw = f"{marks.open}\nx\n{marks.close}\n\nx"
                thinking = self._form.message("x", "x", raw)
                shapes += [[thinking], [plain, thinking], [thinking, plain]]
            known = all(self._changes_nothing(scene, shape) for shape in shapes)
            self._local.put(scene.setting, known)
        return known

    def _changes_nothing(self, scene: Scene, shapes: list[Message]) -> bool:
        """Returns the result for conversations whose replies have these shapes, last one first."""
        marks = Marks(texts([*scene.system, scene.variables]))
        sign = marks.take()
        system = [self._stage.guard(message, marks) for message in scene.system]

        def ends(replies: list[Message], at: int) -> tuple[str, str]:
            """Returns the text before and after the words of the reply `at`."""
            reply = {**replies[at], "content": replies[at]["content"] + sign}
            talk = [
                message
                for answer in [*replies[:at], reply, *replies[at + 1 :]]
                for message in (_QUESTION, answer)
            ]
            text = self._stage.render([*system, *talk, _QUESTION], scene, marks, check=False)
            before, _, after = text.rpartition(sign)
            return before, after

        endings = set()
        for count in (3, 4, 6):
            replies = [shapes[(count - 1 - i) % len(shapes)] for i in range(count)]
            before, after = ends(replies, count - 2)
            if not before or ends(replies[:-1], count - 2)[0] != before:
                return False
            short = [rounds(1)[1], *replies[-2:]]
            endings |= {after, ends(short, 1)[1]}
        return len(endings) == 1
