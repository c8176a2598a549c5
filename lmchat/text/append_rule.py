"""The rule "append": the text that a template puts after the last reply is appended."""

from __future__ import annotations

from lmchat.store.turns import Message
from lmchat.text.context_encoder import ContextEncoder
from lmchat.text.marks import Marks
from lmchat.text.recent import Recent
from lmchat.text.scene import Scene, Stage, Suffix, blank, rounds, texts


class AppendRule:
    """Renders a conversation of few words in place of the whole, once it is known that this makes
    no difference; so the cost of a turn does not grow with the conversation."""

    def __init__(self, stage: Stage, encoder: ContextEncoder) -> None:
        self._stage = stage
        self._encoder = encoder
        self._short: Recent[object, bool] = Recent()

    def suffix(self, scene: Scene) -> Suffix | None:
        """Returns the suffix, or None where the template does not show the last reply."""
        marks = Marks(texts([*scene.system, scene.question, scene.variables]))
        reply = scene.path[-1].message
        sign = marks.take()
        guarded = [self._stage.guard(message, marks) for message in scene.system]
        question = self._stage.guard(scene.question, marks)
        if self._is_short(scene):
            messages = self._window(min(scene.replies - 1, 1), reply, sign)
        else:
            past = [turn.message for turn in scene.path[len(scene.system) : -1]]
            messages = [*past, blank(reply, sign)]
        text = self._stage.render([*guarded, *messages, question], scene, marks)
        _, found, after = text.rpartition(sign)
        if not found:
            return None
        return scene.close(self._encoder.encode(scene.transcript[1], after, marks))

    def _is_short(self, scene: Scene) -> bool:
        """Returns whether the text after the last reply is independent of the number of turns."""
        reply = scene.path[-1].message
        key = (scene.setting, frozenset(blank(reply, "")))
        known = self._short.get(key)
        if known is None:
            marks = Marks(texts([*scene.system, scene.variables]))
            sign = marks.take()
            question: Message = {"role": "user", "content": "x"}
            system = [self._stage.guard(message, marks) for message in scene.system]
            endings = set()
            for count in (1, 2, 4):
                messages = [*system, *self._window(count, reply, sign), question]
                text = self._stage.render(messages, scene, marks, check=False)
                endings.add(text.rpartition(sign)[2])
            known = self._short.put(key, len(endings) == 1)
        return known

    @staticmethod
    def _window(earlier: int, reply: Message, content: str) -> list[Message]:
        question: Message = {"role": "user", "content": "x"}
        return [*rounds(earlier), question, blank(reply, content)]
